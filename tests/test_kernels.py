"""The emitted kernels: interpreted here and compared with the token loop in fp64, and compiled for cards that are not here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from recgen import aot
from recgen.aot import SHIPPED, Configuration
from recgen.cache import module
from recgen.resources import find, folder
from recgen.sample import FLOORS, InputRow, draw, error
from tests.conftest import ZOO
from tests.interpreter import Interpret, interpreter

MODES = ("chunk", "recurrent")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GATED = ("dplr", "gated_deltanet", "gla", "kda", "retention", "rwkv6", "rwkv7")
# Of rms(x - ref) / rms(ref). Measured over the zoo: 1.9e-6 and 7.5e-4; under strong gates, whose sums reach -400, 1.6e-5 and 6e-4.
LIMITS = {"fp32": 5e-6, "fp16": 2e-3, "bf16": 1e-2}
STRONG = {"fp32": 5e-5, "fp16": 2e-3, "bf16": 1e-2}


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    with interpreter() as call:
        yield call


def package(name: str) -> ModuleType:
    return module(find(name, folder("specs")))


@dataclass(frozen=True, slots=True)
class Case:
    """A call of an op, and of its gradient."""

    name: str
    mode: str
    dtype: str = "fp32"
    T: int = 17
    K: int = 24
    V: int = 40
    B: int = 1
    H: int = 2
    # A regime of recgen.sample; "reset": a token, or a head, forgets everything; "steep": a large A_log; "halves": first next to nothing is
    # forgotten, then much.
    gate: str | None = None
    carried: bool = True  # an initial state
    loss: tuple[str, ...] = ("o", "state")

    def __str__(self) -> str:
        gate = f" {self.gate}" if self.gate else ""
        loss = "" if len(self.loss) == 2 else f" of {self.loss[0]}"
        return f"{self.name} {self.mode} {self.dtype} T{self.T} {self.K}x{self.V}{gate}{'' if self.carried else ' from zero'}{loss}"

    def inputs(self, table: tuple[InputRow, ...]) -> dict[str, Tensor]:
        """By name, the initial state among them."""
        regime = None if self.gate in ("reset", "steep", "halves") else self.gate
        inputs = draw(table, self.B, self.T, self.H, self.K, self.V, seed=self.T + self.K, dtype=DTYPES[self.dtype], gate=regime)
        for name, axes, kind, *_ in table:
            if self.gate == "reset" and kind == "log_decay":
                inputs[name][(slice(None), self.T // 2) if "t" in axes else 0] = -torch.inf
            elif self.gate == "halves" and kind == "log_decay" and "t" in axes:
                inputs[name][:, : self.T // 2], inputs[name][:, self.T // 2 :] = -1e-3, -5.0
            elif self.gate == "steep" and name == "A_log":
                inputs[name].fill_(4.0)
        if self.carried:
            inputs["initial_state"] = _normal(self.B, self.H, self.K, self.V)
        return inputs


# ---- what runs in the interpreter


def _normal(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """Inside, memory that torch leaves uninitialised holds NaN, so that nobody can read it unnoticed."""
    with mock.patch("torch.empty", _filled(torch.empty)), mock.patch("torch.empty_like", _filled(torch.empty_like)):
        yield


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*arguments: object, **keywords: object) -> Tensor:
        made = make(*arguments, **keywords)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    return filled


def call(case: Case, mode: str, wanted: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """o, state, and d<input> of what is wanted (None: of everything), through the op of that mode; the reference computes in fp64."""
    emitted = package(case.name)
    inputs = case.inputs(emitted.INPUTS)
    dtype = torch.float64 if mode == "reference" else DTYPES[case.dtype]
    if mode == "reference":
        inputs = {name: x.double() for name, x in inputs.items()}
    leaves = {name: x.requires_grad_(wanted is None or name in wanted) for name, x in inputs.items()}
    with memory_full_of_nan(), mock.patch.object(emitted.op, "check_kernels"):  # which refuses bf16 in the interpreter
        o, state = getattr(emitted, f"{mode}_{case.name}")(**leaves, output_final_state="state" in case.loss)
        found = {"o": o} if state is None else {"o": o, "state": state}
        upstream = {"o": _normal(*o.shape).to(DTYPES[case.dtype]).to(dtype), "state": _normal(case.B, case.H, case.K, case.V)}
        loss = [name for name in case.loss if found[name].requires_grad]
        asked = [x for x in leaves.values() if x.requires_grad]
        outputs, given = [found[name] for name in loss], [upstream[name].to(found[name].dtype) for name in loss]
        gradients = iter(torch.autograd.grad(outputs, asked, given, allow_unused=True) if asked else ())
    for name, x in leaves.items():
        if x.requires_grad:
            gradient = next(gradients)
            found[f"d{name}"] = torch.zeros_like(x) if gradient is None else gradient
    return {name: x.detach() for name, x in found.items()}


def errors(case: Case) -> dict[str, float]:
    """The error of everything, by name."""
    found, exact = call(case, case.mode), call(case, "reference")
    assert found.keys() == exact.keys()
    return {name: error(found[name], exact[name], FLOORS[DTYPES[case.dtype]]) for name in exact}


def alone(case: Case) -> list[str]:
    """Inputs whose gradient, asked for alone, has other bits than among all others; and outputs that have others without a gradient."""
    every = call(case, case.mode)
    outputs = call(case, case.mode, ())
    wrong = [name for name, x in outputs.items() if not torch.equal(x, every[name])]
    for name in [name.removeprefix("d") for name in every if name not in outputs]:
        wrong += [n for n, x in call(case, case.mode, (name,)).items() if not torch.equal(x, every[n])]
    return wrong


def errors_in_groups(case: Case) -> dict[str, float]:
    """As `errors`, where a program of a kernel for steep chunks looks at four of them, as on a card that has few programs to run."""
    op = package(case.name).op
    op._configure.cache_clear()
    with mock.patch.object(op, "chunks_a_program", lambda facts, chunks, on: 4 if facts.steep else 1):
        found = errors(case)
    op._configure.cache_clear()
    return found


# ---- interpreted

SHAPES = {
    "chunk": (
        ("fp32", 1, 24, 40),
        ("fp32", 65, 24, 40),
        ("fp16", 65, 24, 40),
        ("bf16", 65, 24, 40),
        ("fp32", 17, 80, 16),
        ("fp16", 17, 16, 16),
    ),
    "recurrent": (("fp32", 1, 24, 40), ("fp32", 17, 24, 40), ("fp16", 17, 32, 16), ("fp32", 2, 256, 40)),
}
ODD = [Case(name, mode, *shape) for name in ZOO for mode in MODES for shape in SHAPES[mode]]
GATES = [Case(name, "chunk", "fp32", 40, gate=gate) for name in GATED for gate in ("-5", "mixed", "reset")]
GATES += [Case(name, "chunk", "fp16", 70, gate="mixed") for name in GATED]
GATES += [Case(name, "chunk", "bf16", 66, gate=gate) for name in GATED for gate in ("-20", "mixed")]
GATES += [Case(name, "chunk", *shape, gate="halves") for name in GATED for shape in (("fp32", 64), ("fp16", 128))]
GATES += [Case(name, "recurrent", "fp32", 17, gate=gate) for name in GATED for gate in ("mixed", "reset")]
GATES += [Case("mamba2", "chunk", "fp32", 40, gate="steep"), Case("mamba2", "recurrent", "fp32", 17, gate="steep")]
LOSSES = [
    Case(name, mode, T=18, B=2, H=1, K=16, V=16, carried=carried, loss=(loss,))
    for name, mode, (loss, carried) in itertools.product(ZOO, MODES, (("o", False), ("state", True)))
]


@pytest.mark.parametrize("case", ODD, ids=str)
def test_shapes(interpret: Interpret, case: Case) -> None:
    """Sizes on no tile, more than one chunk, several tiles of key channels (80, in chunks) and of value channels (256 by 40)."""
    assert_within(LIMITS[case.dtype], interpret(errors, case))


@pytest.mark.parametrize("case", GATES, ids=str)
def test_gates(interpret: Interpret, case: Case) -> None:
    """From no forgetting to resets, -inf among them, in one sequence."""
    assert_within(STRONG[case.dtype], interpret(errors, case))


@pytest.mark.parametrize("gate", ("0", "mixed"))
@pytest.mark.parametrize("name", ("gla", "dplr"))
def test_steep_chunks_in_groups(interpret: Interpret, name: str, gate: str) -> None:
    """Ten chunks of two heads and one sequence, in groups of four."""
    case = Case(name, "chunk", "fp32", T=140, B=1, H=2, gate=gate)
    assert_within(STRONG[case.dtype], interpret(errors_in_groups, case))


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_losses(interpret: Interpret, case: Case) -> None:
    """On the output alone, from a state of zeros; on the final state alone."""
    assert_within(LIMITS[case.dtype], interpret(errors, case))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("gated_deltanet", "mamba2", "rwkv6"))
def test_a_gradient_asked_for_alone(interpret: Interpret, name: str, mode: str) -> None:
    assert interpret(alone, Case(name, mode, T=5, H=1, K=16, V=16)) == []


@pytest.mark.parametrize(("B", "T"), ((0, 3), (2, 0)))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_nothing_to_do(interpret: Interpret, name: str, mode: str, B: int, T: int) -> None:
    """No token: the state passes through, and so does its gradient. No sequence: nothing does."""
    case = Case(name, mode, T=T, B=B)
    found = interpret(call, case, mode)
    state = case.inputs(package(name).INPUTS)["initial_state"]
    assert found["o"].shape == (B, T, case.H, case.V)
    assert torch.equal(found["state"], state)
    assert torch.equal(found.pop("dinitial_state"), _normal(*state.shape))
    assert not any(x.any() for n, x in found.items() if n.startswith("d"))


def assert_within(limit: float, found: dict[str, float]) -> None:
    wrong = {name: f"{value:.1e}" for name, value in found.items() if not value <= limit}
    assert not wrong, f"over {limit}: {wrong}"


# ---- compiled ahead of time

TRAINED = {target: Configuration(target, "bf16", 128, 128) for target in aot.TARGETS}
LIGHT = ("deltanet", "gated_deltanet", "linear_attention", "mamba2", "retention")
# Every kind of kernel on one card, and no decay and a scalar one on all of them: four minutes on one core where nothing is cached.
COMPILED = [(name, TRAINED["sm_90"]) for name in (*LIGHT, "gla", "kda", "dplr")]
COMPILED += [("dplr", TRAINED["sm_100"])]
COMPILED += [(name, c) for target, c in TRAINED.items() if target != "sm_90" for name in ("gated_deltanet", "linear_attention")]
REST = [(name, c) for c in SHIPPED for name in ZOO if (name, c) not in COMPILED]


@pytest.mark.parametrize(("name", "configuration"), COMPILED, ids=lambda x: str(x).replace(" ", "-"))
def test_kernels_compile_and_fit(name: str, configuration: Configuration) -> None:
    assert_fit(name, configuration)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "configuration"), REST, ids=lambda x: str(x).replace(" ", "-"))
def test_every_shipped_kernel_compiles_and_fits(name: str, configuration: Configuration) -> None:
    """What is left of the whole table, which `python -m recgen.aot` prints."""
    assert_fit(name, configuration)


def assert_fit(name: str, configuration: Configuration) -> None:
    rows = aot.reports(name, configuration)
    print(f"{name}, {configuration}", *rows, sep="\n")
    emitted = package(name)
    assert {row.kernel for row in rows} == {kernel for kernel in vars(emitted.kernels) if kernel.endswith("_kernel")}
    assert not [str(row) for row in rows if not row.fits]
