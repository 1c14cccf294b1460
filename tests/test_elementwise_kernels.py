"""Elementwise work on inputs as SymPy leaves it, in every printed form: the torch path, and the kernels in Triton's interpreter."""

from __future__ import annotations

import re

import pytest

from recgen.pipeline import compile_spec
from recgen.resources import Source
from tests.conftest import RunPython

EQUATIONS = {
    "sqrt(k * k) is |k|": "S = exp(g) * S + beta * v @ sqrt(k * k).T\no = scale * (S @ q)",
    "numbers that are no literals": "S = exp(g) * S + exp(1) * log(2) * sqrt(2) * beta * v @ k.T\no = scale * (S @ q)",
    "functions of sizes and consts": "S = exp(g) * S + K ** -0.5 * tanh(log(V)) * beta / K * v @ k.T\no = exp(scale) * (S @ q)",
    "powers of either sign": "S = exp(g) * S + beta**3 * v**5 @ (k**4).T\no = scale * (S @ (exp(q) ** -5 + q**2))",
    "norms on a ragged chunk": "S = exp(g) * S + beta * v @ (k / norm(k) + k).T\no = scale * (S @ l2norm(q))",
    "rows that are not 0 where inputs are": "S = exp(g) * S + v @ softplus(k).T\no = scale * (S @ softplus(q))",
    "a shifted row, summed": "S = exp(g) * S + beta * v @ (k + 1).T\no = dot(q + 1, k + 2) * norm2(v + 1) * (S @ (q / norm(q + 3)))",
    "a quotient of channels with a parameter": "S = S @ diag(exp(exp(A) * log(sigmoid(k)))) + v @ (A / (1 + k * k)).T\no = S @ q",
    "two inputs with one gradient": "S = exp(g) * S + v @ (k + q).T\no = S @ (k + q)",
    "a value of a head beside two bodies": "S = exp(-exp(A) * softplus(g)) * S + exp(A) / K * v @ k.T\no = beta * V * (S @ q)",
}
DECLARED = {
    "q": "key",
    "k": "key",
    "v": "value",
    "g": "scalar[log_decay]",
    "beta": "scalar[unit]",
    "A": "head",
    "scale": "const = K ** -0.5",
}
RUN = """
import sys, torch, recgen
op = recgen.compile(sys.argv[1], name="probe")
package = sys.modules[op.__module__.rpartition(".")[0]]
torch.manual_seed(0)
sizes = {"t": (1, 70, 2), "tk": (1, 70, 2, 24), "tv": (1, 70, 2, 8), "": (2,)}
tensors = [torch.rand(sizes[axes]) if kind != "log_decay" else -torch.rand(sizes[axes]) for name, axes, kind, *_ in package.INPUTS]
tensors = [(x - 0.5 if x.dim() == 4 else x).requires_grad_() for x in tensors]

def results(op, tensors, **how):
    o, state = op(*tensors, output_final_state=True, **how)
    return o, state, *torch.autograd.grad((o * torch.linspace(0, 1, 8)).sum() + state.sum() / 8, tensors)

exact = results(package.reference_probe, [x.double() for x in tensors])
for mode in ("chunk", "recurrent"):
    for made, true in zip(results(op, tensors, mode=mode), exact, strict=True):
        assert (made - true).norm() <= 1e-5 * true.norm(), (mode, ((made - true).norm() / true.norm()).item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["0", "1"])
@pytest.mark.parametrize("equation", EQUATIONS.values(), ids=EQUATIONS)
def test_every_mode_agrees_with_the_reference(run_python: RunPython, equation: str, interpreted: str) -> None:
    declared = [f"{name}: {kind}" for name, kind in DECLARED.items() if re.search(rf"\b{name}\b", equation)]
    run_python("-c", RUN, "\n".join([*declared, equation, ""]), TRITON_INTERPRET=interpreted)


LARGE = """
import sys, torch, recgen
op = recgen.compile(sys.argv[1], name="probe")
package = sys.modules[op.__module__.rpartition(".")[0]]
torch.manual_seed(0)
q, k = (torch.randn(2, 1, 70, 1, 64) * 200).half()
tensors = [q, k, torch.randn(1, 70, 1, 16).half(), *(torch.rand(1, 70, 1, *d) for d in ((64,), ()))]
tensors = [-x / 50 if x.shape[-1] == 64 and x.dtype == torch.float32 else x for x in tensors]

def results(op, tensors, **how):
    tensors = [x.detach().requires_grad_() for x in tensors]
    o, state = op(*tensors, output_final_state=True, **how)
    return o, state, *torch.autograd.grad(o.sum() + state.sum(), tensors)

exact = results(package.reference_probe, [x.double() for x in tensors])
for made, true in zip(results(op, tensors, mode="chunk"), exact, strict=True):
    assert (made - true).norm() <= 2e-3 * true.norm(), ((made - true).norm() / true.norm()).item()
"""
RAW = """
q: key
k: key
v: value
g: key[log_decay]
beta: scalar[unit]

S = S @ diag(exp(g))
S = S + beta * (v - S @ l2norm(k)) @ l2norm(k).T
o = S @ l2norm(q)
"""


def test_no_large_number_meets_an_operand() -> None:
    """1 / (x + 1e-6), which SymPy clears into 1e6 / (1e6 x + 1)."""
    text = RAW.lstrip().replace("key[log_decay]", "scalar[log_decay]").replace("S @ diag(exp(g))", "exp(g) * S")
    kernels = compile_spec(Source("mine", "mine.rec", text)).files["kernels.py"]
    assert not re.findall(r"\b\d{4,}\.0\b", kernels)


@pytest.mark.slow
def test_raw_rows_that_are_normalised_may_be_large(run_python: RunPython) -> None:
    """Of norm 1600: their products are beyond fp16, so they are normalised before a score is kept in it."""
    run_python("-c", LARGE, RAW, TRITON_INTERPRET="1")
