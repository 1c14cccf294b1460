"""parity: an emitted package against its own token loop in fp64, on this device.

Every output and every gradient, chunk and recurrent mode, over dtypes, shapes that fit no tile, and gate regimes. Inputs are
rounded first, so that an error is the op's own. Chunk mode must also give the same bits each time it runs.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recgen.sample import FLOORS, REGIMES, InputRow, draw, error, has_gate, loose, results

Call = Callable[..., tuple[Tensor, Tensor | None]]

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMITS: Mapping[str, float] = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-3}  # of rms(x - ref) / rms(ref); ten times that for what is `loose`
DRAWN = "drawn"  # the gates of a trained layer, rather than one regime


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    B: int
    T: int
    H: int
    K: int = 128
    V: int = 128
    decode: bool = False  # one token on a given state: the recurrent op, forward only
    bare: bool = False  # also compared without a state
    gates: bool = False  # compared in every gate regime, and not with gates as drawn
    regime: str | None = None  # of the log decays, where no other is asked for; None: as in a trained layer

    def __str__(self) -> str:
        regime = f", {self.regime} a token" if self.regime else ""
        return f"B {self.B}, T {self.T}, H {self.H}, K {self.K}, V {self.V}{regime}"

    def inputs(self, table: Sequence[InputRow], device: str, dtype: str, gate: str | None = None) -> dict[str, Tensor]:
        regime = self.regime if gate is None else gate
        return draw(table, self.B, self.T, self.H, self.K, self.V, seed=self.T, device=device, dtype=DTYPES[dtype], gate=regime)

    def upstream(self, device: str, dtype: str) -> Tensor:
        """The gradient of the output: [B,T,H,V]."""
        return _normal((self.B, self.T, self.H, self.V), 1, device).to(DTYPES[dtype])

    def state(self, device: str) -> Tensor:
        """An initial state: [B,H,K,V], fp32."""
        return _normal((self.B, self.H, self.K, self.V), 2, device)


GATED = Shape("gated", 1, 130, 2, 64, 64, gates=True)
# What one process each compiles for and compares.
CHECKED = (
    (Shape("ragged", 2, 65, 2, 64, 64, bare=True), Shape("token", 2, 1, 2, 64, 64), GATED),
    (Shape("odd", 1, 130, 3, 24, 40), Shape("narrow value", 1, 130, 2, 40, 24), Shape("train", 2, 200, 2)),
    (Shape("wide value", 1, 200, 2, 64, 128), Shape("wide key", 1, 130, 2, 128, 64)),
    (Shape("big", 1, 130, 2, 256, 256),),
)


@dataclass(frozen=True, slots=True)
class Emitted:
    name: str
    inputs: tuple[InputRow, ...]
    ops: Mapping[str, Call]  # by mode: auto, reference, and those of chunk and recurrent that there are

    @property
    def axes(self) -> dict[str, str]:
        return {row[0]: row[1] for row in self.inputs}


@dataclass(frozen=True, slots=True)
class Check:
    """One tensor of one call: o, state, d<input>; or `bitwise`, with error 0 when three runs gave the same bits."""

    op: str
    mode: str
    dtype: str
    shape: str
    gate: str
    carried: bool  # an initial state was given, and the final state is in the loss
    tensor: str
    error: float
    limit: float

    @property
    def right(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Failure:
    """What raised instead of giving a number."""

    op: str
    what: str
    message: str


def load(folder: Path, name: str) -> Emitted:
    """The package `folder`/<name>/, imported as a stranger would: its parent on the path, the compiler not needed."""
    root = str(folder.resolve().parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    package = importlib.import_module(f"{folder.resolve().name}.{name}")
    names = {"auto": name, **{mode: f"{mode}_{name}" for mode in ("chunk", "recurrent", "reference")}}
    return Emitted(name, package.INPUTS, {mode: getattr(package, op) for mode, op in names.items() if hasattr(package, op)})


def check_op(folder: Path, name: str, dtypes: Sequence[str], shapes: Sequence[Shape], device: str = "cuda") -> Iterator[Check | Failure]:
    """Compare an op with its reference. A case that raises is a Failure and the rest go on, unless the device itself is lost."""
    op = load(folder, name)
    cases: list[tuple[Shape, str | None, bool]] = [(shape, None, True) for shape in shapes if not shape.gates]
    cases += [(shape, None, False) for shape in shapes if shape.bare]
    cases += [(shape, gate, True) for shape in shapes if shape.gates and has_gate(op.inputs) for gate in REGIMES]
    for dtype in dtypes:
        for shape, gate, carried in cases:
            run = _runner(op, shape, gate, carried, dtype, device)
            reference = run("reference")
            for mode in ("chunk", "recurrent"):
                if mode not in op.ops:
                    continue
                try:
                    errors = _compare(run, mode, reference, FLOORS[DTYPES[dtype]])
                except Exception as failure:
                    if not alive(device):
                        raise
                    yield Failure(name, f"{mode} {dtype} {shape.name} {gate or DRAWN}", describe(failure))
                    continue
                for tensor, value in errors.items():
                    limit = LIMITS[dtype] * (10 if tensor in loose(op.inputs) else 1)
                    yield Check(name, mode, dtype, shape.name, gate or DRAWN, carried, tensor, value, limit)


def _runner(op: Emitted, shape: Shape, gate: str | None, carried: bool, dtype: str, device: str) -> Callable[[str], dict[str, Tensor]]:
    """A function from a mode to all its results on one drawing of the inputs; the reference gets it in fp64."""
    inputs = shape.inputs(op.inputs, device, dtype, gate)
    upstream, state = shape.upstream(device, dtype), shape.state(device)

    def run(mode: str) -> dict[str, Tensor]:
        cast = Tensor.double if mode == "reference" else Tensor.clone
        initial, state_grad = (cast(state), cast(state).flip(-1)) if carried else (None, None)
        values = {name: cast(x) for name, x in inputs.items()}
        return results(op.ops[mode], values, cast(upstream), initial_state=initial, state_grad=state_grad)

    return run


def _compare(run: Callable[[str], dict[str, Tensor]], mode: str, reference: Mapping[str, Tensor], floor: float) -> dict[str, float]:
    found = run(mode)
    errors = {tensor: error(value, reference[tensor], floor) for tensor, value in found.items()}
    if mode == "chunk":
        repeats = (run(mode) for _ in range(2))
        same = all(torch.equal(value, repeat[tensor]) for repeat in repeats for tensor, value in found.items())
        errors["bitwise"] = 0.0 if same else float("inf")
    return errors


def alive(device: str) -> bool:
    """Whether the device still answers: after an illegal access nothing else in the process will run."""
    try:
        if device != "cpu":
            torch.cuda.synchronize()
    except Exception:
        return False
    return True


def describe(failure: BaseException) -> str:
    """Kind, place and words of an exception, the last of them kept: compilers say what is wrong at the end."""
    frames = traceback.extract_tb(failure.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{type(failure).__name__} at {place}: {str(failure)[-1500:]}"


def _normal(size: tuple[int, ...], seed: int, device: str) -> Tensor:
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device)
