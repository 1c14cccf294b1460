"""form: the type NormalForm, the waist of the compiler, with its text and its meaning in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import sympy
from sympy import Expr, Symbol

from recgen.elementwise import SIZES, Axis, Input, align, axes_of, evaluate
from recgen.errors import VerifyError


@dataclass(frozen=True, slots=True)
class StateRead:
    """gain * (S_version @ vector): a value row read from the state as it stood at `version` (0 = start of the token)."""

    version: int
    vector: Expr  # key row
    gain: Expr  # scalar, or value row (then there is no chunk form inside a correction)


@dataclass(frozen=True, slots=True)
class Row:
    """A value row, affine in the state: static + sum of reads."""

    static: Expr
    reads: tuple[StateRead, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """(static + S read) write^T, added to the state.

    read_after / write_after: whether the state that is read (that the write lands on) has already taken
    the decay of this token. write_after False means that the decay still acts on what is written.
    """

    static: Expr  # value row nu; 0 when the event is a pure read-and-write
    read: Expr | None  # key row a; None: a plain write
    write: Expr  # key row kappa; takes the scalar factors that static and read have in common
    read_after: bool
    write_after: bool
    line: int


@dataclass(frozen=True, slots=True)
class MicroStep:
    """S <- S Diag(exp(decay)) + sum over events: all events read the state at the start of the micro-step."""

    decay: Expr  # log of the retention; 0: none
    decay_axis: Literal["none", "scalar", "key"]
    events: tuple[Event, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Read:
    """gain * (S query), a part of the output; sees the events of micro-steps < step."""

    query: Expr  # key row; scalar factors stand here
    gain: Expr  # value row or 1
    step: int  # number of micro-steps whose events are seen (0 .. len(steps))
    after_decay: bool  # whether the state read has taken this token's decay
    line: int


@dataclass(frozen=True, slots=True)
class Column:
    """A key row, affine in the state: static + sum of gain * (S_version^T vector), vector a value row."""

    static: Expr
    reads: tuple[StateRead, ...]  # here vector is a value row and gain a scalar or key row


@dataclass(frozen=True, slots=True)
class Keep:
    """value * S_version * key: the state kept, scaled along its two axes (1 where it is not scaled)."""

    version: int
    key: Expr  # key row or scalar
    value: Expr  # value row or 1


@dataclass(frozen=True, slots=True)
class Update:
    """S_{n+1} = sum of Keep + sum of Row Column^T: one line of the spec, as it stands.

    At most one side of an outer product reads the state.
    """

    keeps: tuple[Keep, ...]
    outers: tuple[tuple[Row, Column], ...]
    line: int


@dataclass(frozen=True, slots=True)
class NormalForm:
    """The waist.

    updates and output say what the spec says, line by line (versions 0, 1, ...): they give the recurrent kernels, also where no
    chunk form exists. steps, reads and direct are the same recurrence as micro-steps, canonical: equivalent specs give equal ones.
    """

    name: str
    doc: str
    inputs: tuple[Input, ...]
    updates: tuple[Update, ...]
    output: Row
    output_line: int
    steps: tuple[MicroStep, ...]
    reads: tuple[Read, ...]
    direct: Expr  # value row, free of the state
    obstacle: str | None  # why there is no chunk form; steps, reads, direct are empty then
    obstacle_line: int | None
    source: str  # the spec's text

    def canonical(self) -> tuple[tuple[MicroStep, ...], tuple[Read, ...], Expr]:
        """steps, reads and direct without the lines they came from: equal for equivalent specs."""
        steps = tuple(replace(s, line=0, events=tuple(replace(e, line=0) for e in s.events)) for s in self.steps)
        return steps, tuple(replace(r, line=0) for r in self.reads), self.direct

    def verify(self) -> None:
        """Every expression varies only along its axes, every index is in range; raises VerifyError."""
        for what, line, expr, allowed in _expressions(self):
            if not set(axes_of(expr, self.inputs)) <= {"t", *allowed}:
                raise VerifyError(f"{self.name}:{line}: {what} {expr} varies along {axes_of(expr, self.inputs)}")
            if expr.has(sympy.nan, sympy.zoo):
                raise VerifyError(f"{self.name}:{line}: {what} is {expr}")
        for n, u in enumerate((*self.updates, Update((), ((self.output, Column(sympy.Integer(1), ())),), self.output_line))):
            versions = [k.version for k in u.keeps] + [r.version for x, y in u.outers for r in (*x.reads, *y.reads)]
            if any(not 0 <= v <= n for v in versions) or any(x.reads and y.reads for x, y in u.outers):
                raise VerifyError(f"{self.name}:{u.line}: update {n} reads versions {versions}")
        decays = [n for n, s in enumerate(self.steps) if s.decay_axis != "none"]
        if len(decays) > 1 or any((s.decay == 0) != (s.decay_axis == "none") for s in self.steps):
            raise VerifyError(f"{self.name}: decays of micro-steps {decays}")
        for s in self.steps:
            if (s.decay_axis == "key") != ("k" in axes_of(s.decay, self.inputs)):
                raise VerifyError(f"{self.name}:{s.line}: decay {s.decay} is not per {s.decay_axis}")
        if any(not 0 <= r.step <= len(self.steps) for r in self.reads):
            raise VerifyError(f"{self.name}: a read beyond the last micro-step")
        if self.obstacle is not None and (self.steps or self.reads or self.direct != 0):
            raise VerifyError(f"{self.name}: an obstacle beside micro-steps")

    def __str__(self) -> str:
        from recgen.form_text import text

        return text(self)

    # meaning

    def run(self, env: Mapping[str, Any], S0: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(o [T,V], S [V,K]) of one head, from the micro-steps (from the updates where there are none).

        env: arrays [T] [T,K] [T,V] [] [K] [V] by the inputs' names, and numbers for consts (their default when missing).
        S0: [V,K], value x key as in the equations.
        """
        if self.obstacle is not None:
            return self.run_updates(env, S0)
        rows = _Rows(self, env, S0)
        S, out = np.array(S0, dtype=np.float64), []
        for t in range(rows.T):
            o = rows.value(self.direct, t)
            seen: dict[tuple[int, bool], np.ndarray[Any, Any]] = {}
            decayed = all(s.decay_axis == "none" for s in self.steps)
            for n, step in enumerate(self.steps):
                seen[n, decayed] = S
                if step.decay_axis == "none":
                    S = S + sum(_write(e, S, rows, t) for e in step.events)
                    continue
                d = np.exp(rows.key(step.decay, t))
                after = S * d
                before = S + sum(_write(e, after if e.read_after else S, rows, t) for e in step.events if not e.write_after)
                seen[n, True], seen[n + 1, False] = after, before
                S = before * d + sum(_write(e, after if e.read_after else S, rows, t) for e in step.events if e.write_after)
                decayed = True
            seen[len(self.steps), decayed] = S
            for r in self.reads:
                o = o + rows.value(r.gain, t) * (seen[r.step, r.after_decay] @ rows.key(r.query, t))
            out.append(o)
        return np.array(out).reshape(rows.T, rows.V), S

    def run_updates(self, env: Mapping[str, Any], S0: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The same from updates and output, as the spec says it line by line."""
        rows = _Rows(self, env, S0)
        S, out = np.array(S0, dtype=np.float64), []
        for t in range(rows.T):
            versions = [S]
            for u in self.updates:
                new = np.zeros_like(S)
                for k in u.keeps:
                    new = new + rows.value(k.value, t)[:, None] * versions[k.version] * rows.key(k.key, t)
                for x, y in u.outers:
                    new = new + np.outer(_row(x, versions, rows, t), _column(y, versions, rows, t))
                versions.append(new)
            out.append(_row(self.output, versions, rows, t))
            S = versions[-1]
        return np.array(out).reshape(rows.T, rows.V), S


class _Rows:
    """The expressions of a form over whole sequences, evaluated once each."""

    def __init__(self, form: NormalForm, env: Mapping[str, Any], S0: np.ndarray[Any, Any]) -> None:
        self.V, self.K = S0.shape
        self.env = align(env, form.inputs)
        self.T: int = self.env["T"]
        self.cache: dict[Expr, Any] = {}

    def array(self, expr: Expr) -> Any:
        if expr not in self.cache:
            with np.errstate(divide="ignore"):
                self.cache[expr] = np.asarray(evaluate(expr, self.env, np), dtype=np.float64)
        return self.cache[expr]

    def key(self, expr: Expr, t: int) -> Any:
        """A key row [K] (or a scalar, repeated) at token t."""
        return np.broadcast_to(self.array(expr), (self.T, self.K, 1))[t, :, 0]

    def value(self, expr: Expr, t: int) -> Any:
        """A value row [V] (or a scalar, repeated) at token t."""
        return np.broadcast_to(self.array(expr), (self.T, 1, self.V))[t, 0]


def _write(e: Event, S: Any, rows: _Rows, t: int) -> Any:
    row = rows.value(e.static, t)
    return np.outer(row if e.read is None else row + S @ rows.key(e.read, t), rows.key(e.write, t))


def _row(x: Row, versions: list[Any], rows: _Rows, t: int) -> Any:
    return sum((rows.value(r.gain, t) * (versions[r.version] @ rows.key(r.vector, t)) for r in x.reads), start=rows.value(x.static, t))


def _column(y: Column, versions: list[Any], rows: _Rows, t: int) -> Any:
    return sum((rows.key(r.gain, t) * (versions[r.version].T @ rows.value(r.vector, t)) for r in y.reads), start=rows.key(y.static, t))


def _expressions(form: NormalForm) -> Iterator[tuple[str, int, Expr, tuple[Axis, ...]]]:
    """Every expression with what it is, its line, and the axes that it may have beside time."""
    for u in form.updates:
        for k in u.keeps:
            yield "the key factor", u.line, k.key, ("k",)
            yield "the value factor", u.line, k.value, ("v",)
        for x, y in u.outers:
            yield "the row", u.line, x.static, ("v",)
            yield "the column", u.line, y.static, ("k",)
            for r in x.reads:
                yield "a read", u.line, r.vector, ("k",)
                yield "its gain", u.line, r.gain, ("v",)
            for r in y.reads:
                yield "a read", u.line, r.vector, ("v",)
                yield "its gain", u.line, r.gain, ("k",)
    for s in form.steps:
        yield "the decay", s.line, s.decay, ("k",)
        for e in s.events:
            yield "static", e.line, e.static, ("v",)
            yield "write", e.line, e.write, ("k",)
            if e.read is not None:
                yield "read", e.line, e.read, ("k",)
    for q in form.reads:
        yield "query", q.line, q.query, ("k",)
        yield "gain", q.line, q.gain, ("v",)
    yield "direct", form.output_line, form.direct, ("v",)


def symbols(form: NormalForm) -> tuple[str, ...]:
    """The inputs that the recurrence really uses, sorted."""
    found = {s.name for _, _, x, _ in _expressions(form) for s in x.free_symbols if isinstance(s, Symbol)}
    return tuple(sorted(found - set(SIZES)))
