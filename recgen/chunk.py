"""chunk: NormalForm -> ChunkForm: one token's micro-steps become matrix equations over a chunk of tokens.

With G the inclusive cumulative log decay, a reader (a correction's a, an output's q) at token i sees a writer's kappa at token j through
exp(G'_i - G'_j), where G' leaves the own token's decay out for a reader before it and takes it in for a write that it still acts on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sympy import Expr, Integer

from .elementwise import align, bounds, evaluate
from .errors import VerifyError
from .normalize import NormalForm

Array = NDArray[Any]
CHUNK = 64  # tokens: the score and inverse tiles fill one warp group's matrix instruction


@dataclass(frozen=True, slots=True)
class Reader:
    """A key row that reads the state: `after` its token's decay or before, seeing the micro-steps < step of its own token."""

    name: str
    vector: Expr
    after: bool
    step: int
    line: int  # of the spec


@dataclass(frozen=True, slots=True)
class Writer:
    """A key row along which value rows are written, in micro-step `step`, `after` its token's decay or before."""

    name: str
    vector: Expr
    after: bool
    step: int
    line: int  # of the spec

    def seen_by(self, reader: Reader) -> Literal["causal", "strict"]:
        """Whether a reader sees the write of its own token."""
        return "causal" if self.step < reader.step else "strict"


@dataclass(frozen=True, slots=True)
class Correction:
    """An event that reads: U = static + S a, written along kappa. Its rows solve a triangular system."""

    name: str
    static: Expr
    reader: Reader
    writer: Writer

    @property
    def line(self) -> int:
        return self.writer.line


@dataclass(frozen=True, slots=True)
class Write:
    """An event that reads nothing."""

    name: str
    static: Expr
    writer: Writer

    @property
    def line(self) -> int:
        return self.writer.line


@dataclass(frozen=True, slots=True)
class Output:
    """gain * (S query)."""

    gain: Expr
    reader: Reader

    @property
    def line(self) -> int:
        return self.reader.line


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """The chunk equations, over the normal form's inputs; `decay` is one token's log decay."""

    normal: NormalForm
    decay: Expr
    decay_axis: Literal["none", "scalar", "key"]
    decay_line: int
    corrections: tuple[Correction, ...]
    writes: tuple[Write, ...]
    outputs: tuple[Output, ...]
    direct: Expr

    @property
    def events(self) -> tuple[Correction | Write, ...]:
        """All that is written: corrections, then plain writes."""
        return (*self.corrections, *self.writes)

    @property
    def decays(self) -> bool:
        """Whether the log decay is at most 0 for all inputs in their domains."""
        return bounds(self.decay, self.normal.inputs)[1] <= 0

    def verify(self) -> None:
        for correction in self.corrections:
            if correction.writer.step < correction.reader.step:
                raise VerifyError(f"{correction.name} reads what it writes itself")
        for output in self.outputs:
            for event in self.events:
                seen = event.writer.seen_by(output.reader) == "causal"
                if seen and event.writer.after and not output.reader.after:
                    raise VerifyError(f"{output.reader.name} before the decay would see {event.name} written after it: a positive exponent")

    def __str__(self) -> str:
        from .chunk_text import text

        return text(self, CHUNK)

    # meaning

    def run(self, env: Mapping[str, Any], S0: Array) -> tuple[Array, Array]:
        """(o [T,V], S [V,K]) of one head, from the chunk equations over the whole sequence as one chunk.

        env: arrays [T] [T,K] [T,V] [] [K] [V] by the inputs' names, and numbers for consts (their default when missing).
        """
        rows = _Rows(self, env, S0)
        state: Array = np.asarray(S0, np.float64)
        values = [*self._solve(rows, state), *(rows.value(w.static) for w in self.writes)]
        written = [(e.writer, x) for e, x in zip(self.events, values, strict=True)]
        o = rows.value(self.direct)
        for out in self.outputs:
            read = rows.from_start(out.reader) @ state.T
            for writer, x in written:
                read = read + rows.score(out.reader, writer) @ x
            o = o + rows.value(out.gain) * read
        S = state * np.exp(rows.spans[-1, 0])
        for writer, x in written:
            S = S + x.T @ rows.to_end(writer)
        return o, S

    def _solve(self, rows: _Rows, state: Array) -> list[Array]:
        """The rows U of every correction, [T,V] each: one linear system over corrections and tokens."""
        right = []
        for c in self.corrections:
            y = rows.value(c.static) + rows.from_start(c.reader) @ state.T
            for w in self.writes:
                y = y + rows.score(c.reader, w.writer) @ rows.value(w.static)
            right.append(y)
        if not right:
            return []
        lower = np.block([[rows.score(c.reader, d.writer) for d in self.corrections] for c in self.corrections])
        return list(np.split(np.linalg.solve(np.eye(len(lower)) - lower, np.concatenate(right)), len(right)))


class _Rows:
    """The rows of a form over a whole sequence, and the decay between any two places of it."""

    def __init__(self, form: ChunkForm, env: Mapping[str, Any], S0: Array) -> None:
        self.V, self.K = S0.shape
        self.env = align(env, form.normal.inputs)
        self.T: int = self.env["T"]
        self.spans = self._spans(self.key(form.decay))

    def _spans(self, gate: Array) -> Array:
        """[T+1, T+1, K]: at (i, j) the sum of the gate over tokens j .. i-1, -inf for j > i. Nothing is subtracted: a reset is exact."""
        spans = np.full((self.T + 1, self.T + 1, self.K), -np.inf)
        for i in range(self.T + 1):
            spans[i, i] = 0.0
            if i:
                spans[i, :i] = spans[i - 1, :i] + gate[i - 1]
        return spans

    def key(self, expr: Expr) -> Array:
        """[T,K]."""
        return np.broadcast_to(self._array(expr), (self.T, self.K, 1))[:, :, 0]

    def value(self, expr: Expr) -> Array:
        """[T,V]."""
        return np.broadcast_to(self._array(expr), (self.T, 1, self.V))[:, 0]

    def _array(self, expr: Expr) -> Array:
        with np.errstate(divide="ignore"):  # log(0) is a reset
            return np.asarray(evaluate(expr, self.env, np), np.float64)

    def places(self, row: Reader | Writer) -> Array:
        """[T]: how many decays the row's state has taken."""
        return np.arange(self.T) + int(row.after)

    def score(self, reader: Reader, writer: Writer) -> Array:
        """[T,T]: reader_i . exp(G'_i - G'_j) writer_j over the pairs that see each other."""
        decay = np.exp(self.spans[self.places(reader)[:, None], self.places(writer)[None, :]])
        full = np.einsum("ik,ijk,jk->ij", self.key(reader.vector), decay, self.key(writer.vector))
        return np.tril(full, 0 if writer.seen_by(reader) == "causal" else -1)

    def from_start(self, reader: Reader) -> Array:
        """[T,K]: the reader against the state at the start."""
        decayed: Array = np.exp(self.spans[self.places(reader), 0]) * self.key(reader.vector)
        return decayed

    def to_end(self, writer: Writer) -> Array:
        """[T,K]: the writer as the state at the end has it."""
        decayed: Array = np.exp(self.spans[-1, self.places(writer)]) * self.key(writer.vector)
        return decayed


def chunk(normal: NormalForm) -> ChunkForm:
    """Numbers the readers and writers of the micro-steps; the equations follow from where each stands relative to the decay."""
    decays = [s for s in normal.steps if s.decay_axis != "none"]
    if len(decays) > 1:
        raise VerifyError("more than one decay a token in the normal form")
    corrections: list[Correction] = []
    writes: list[Write] = []
    events = [(index, event) for index, step in enumerate(normal.steps) for event in step.events]
    for index, event in events:
        number = "" if len(events) == 1 else str(len(corrections) + len(writes) + 1)
        writer = Writer(f"w{number}", event.write, event.write_after, index, event.line)
        if event.read is None:
            writes.append(Write(f"N{number}", event.static, writer))
        else:
            reader = Reader(f"a{number}", event.read, event.read_after, index, event.line)
            corrections.append(Correction(f"U{number}", event.static, reader, writer))
    readers = [
        Reader("q" if len(normal.reads) == 1 else f"q{n}", read.query, read.after_decay, read.step, read.line)
        for n, read in enumerate(normal.reads, 1)
    ]
    outputs = [Output(read.gain, reader) for read, reader in zip(normal.reads, readers, strict=True)]
    decay = decays[0] if decays else None
    form = ChunkForm(
        normal=normal,
        decay=decay.decay if decay else Integer(0),
        decay_axis=decay.decay_axis if decay else "none",
        decay_line=decay.line if decay else 0,
        corrections=tuple(corrections),
        writes=tuple(writes),
        outputs=tuple(outputs),
        direct=normal.direct,
    )
    form.verify()
    return form
