"""reference: the printed torch loop is an independent witness of the normal form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from recgen.normalize import normalize
from recgen.parse import Spec, parse
from recgen.reference import reference_source
from tests.test_normalize import EQUIVALENT, OBSTACLES, PLACES, bodies, draw, spec_of

SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.rec"))
Reference = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def load(spec: Spec) -> Reference:
    """The printed function, compiled."""
    module: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(reference_source(spec), f"{spec.name}.py", "exec"), module)
    function: Reference = module[f"reference_{spec.name}"]
    return function


def tensors(spec: Spec, env: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The inputs of one head as [1,T,1,*] and [1,*]."""
    out = []
    for i in spec.inputs:
        if i.axes is not None:
            x = torch.tensor(env[i.name], dtype=dtype)
            out.append(x[None, :, None] if "t" in i.axes else x[None])
    return out


def witness(spec: Spec, seed: int = 0) -> None:
    """Reference == updates == micro-steps, in fp64."""
    form = normalize(spec)
    env, S0 = draw(form.inputs, seed)
    o, state = load(spec)(*tensors(spec, env), initial_state=torch.tensor(S0).mT[None, None], output_final_state=True)
    assert state is not None and o.dtype == state.dtype == torch.float64
    for want_o, want_S in (form.run_updates(env, S0), form.run(env, S0)):
        for got, want in ((o[0, :, 0].numpy(), want_o), (state[0, 0].mT.numpy(), want_S)):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(want).max(initial=0))))


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_zoo(path: Path) -> None:
    witness(parse(path.read_text(), str(path)))


@pytest.mark.parametrize("body", [b for group in EQUIVALENT.values() for b in group])
def test_spellings(body: str) -> None:
    witness(spec_of(body))


@pytest.mark.parametrize("body", [*PLACES, *OBSTACLES])
def test_odd_specs(body: str) -> None:
    witness(spec_of(body))


ODD = [
    "q = l2norm(q); k = l2norm(k + 2 * a); S = S + tanh(silu(v)) @ k.T",
    "x = norm(v) + norm2(k) + dot(q, k); S = S + (sqrt(x + 10) * v) @ k.T",
    "S = S + v @ (log(1 + exp(k)) / sigmoid(q)).T",
    "scale = scale * 2; lam = lam / 2; S = lam * S + v @ k.T",
    "S = sqrt(K) * exp(-1) * S / V + v @ k.T",
    "S = S + exp(scale) * v @ k.T",
    "S = S - (-v) @ -k.T",
    "S = S + ((1 - y) * v) @ (k / 2).T",
    "S = S @ (I + (k - a) @ q.T @ (I - 2 * k @ k.T)) + v @ k.T",
    "S = 0.5 * (S + S @ householder(k, b2)) + v @ k.T",
    "S = S - grad(norm2(S - v @ k.T) / 4 + lam * norm2(S @ q) + dot(S.T @ v, k) - v.T @ (S @ k) / 3, S)",
    "S = alpha * (exp(g) * (S + v @ k.T)) + v2 @ k2.T",
    "S = S + d @ u.T + v @ k.T",
]


@pytest.mark.parametrize("body", ODD)
def test_more_odd_specs(body: str) -> None:
    witness(spec_of(body))


@settings(max_examples=60, deadline=None)
@given(bodies())
def test_random_specs(body: str) -> None:
    witness(spec_of(body))


def random_call(spec: Spec, dtype: torch.dtype, T: int = 5) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    size = {"t": (2, T, 3), "k": (4,), "v": (6,)}
    out = []
    for i in spec.inputs:
        if i.axes is not None:
            shape = (size["t"] if "t" in i.axes else (3,)) + tuple(n for a in ("k", "v") if a in i.axes for n in size[a])
            x = torch.randn(shape, generator=random, dtype=torch.float64)
            out.append((-x.abs() if i.domain.kind == "log_decay" else x / 4).to(dtype))
    return out


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_shapes_dtypes_and_gradients(path: Path) -> None:
    spec = parse(path.read_text(), str(path))
    reference = load(spec)
    o, state = reference(*random_call(spec, torch.float32))
    assert o.shape == (2, 5, 3, 6) and o.dtype == torch.float32 and state is None
    o, state = reference(*random_call(spec, torch.bfloat16), output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert state is not None and state.shape == (2, 3, 4, 6) and state.dtype == torch.float32 and state.is_contiguous()
    empty, state = reference(*random_call(spec, torch.float32, T=0), output_final_state=True)
    assert empty.shape == (2, 0, 3, 6) and state is not None and not state.any()

    inputs = [x[:1, :3].requires_grad_() if x.ndim > 2 else x.requires_grad_() for x in random_call(spec, torch.float64)]
    start = torch.randn(1, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s, *xs: reference(*xs, initial_state=s, output_final_state=True), (start, *inputs), fast_mode=True, raise_exception=True
    )


def test_a_state_goes_on() -> None:
    spec = parse((SPECS[0].parent / "kda.rec").read_text(), "kda.rec")
    reference, inputs = load(spec), random_call(spec, torch.float64)
    whole, end = reference(*inputs, output_final_state=True)
    first, middle = reference(*(x[:, :2] for x in inputs), output_final_state=True)
    second, last = reference(*(x[:, 2:] for x in inputs), initial_state=middle, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(last, end)


def test_gradients_through_an_objective() -> None:
    written = load(spec_of("S = S - beta * grad(norm2(S @ k - v) / 2, S)"))
    closed = load(spec_of("S = S + beta * (v - S @ k) @ k.T"))
    inputs = random_call(spec_of("S = S + beta * (v - S @ k) @ k.T"), torch.float64)
    gradients = []
    for reference in (written, closed):
        leaves = [x.clone().requires_grad_() for x in inputs]
        gradients.append(torch.autograd.grad(reference(*leaves)[0].square().sum(), leaves))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        torch.testing.assert_close(written(*inputs)[0], closed(*inputs)[0])


@pytest.mark.parametrize(
    ("body", "name", "value"), [("S = alpha * S + v @ k.T", "alpha", 0.0), ("S = exp(g) * S + v @ k.T", "g", -torch.inf)]
)
def test_hard_resets(body: str, name: str, value: float) -> None:
    spec = spec_of(body)
    inputs = random_call(spec, torch.float64)
    at = [i.name for i in spec.inputs].index(name)
    inputs[at][:, 2] = value
    o, _ = load(spec)(*inputs)
    tail, _ = load(spec)(*(x[:, 2:] for x in inputs))
    assert torch.isfinite(o).all()
    torch.testing.assert_close(o[:, 2:], tail)


def test_consts() -> None:
    spec = spec_of("scale = 2 * scale; S = S + v @ k.T")
    reference, inputs = load(spec), random_call(spec, torch.float64)
    torch.testing.assert_close(reference(*inputs)[0], reference(*inputs, scale=0.5)[0])  # K = 4
    torch.testing.assert_close(reference(*inputs)[0] * 2, reference(*inputs, scale=1.0)[0])


def test_names_do_not_clash() -> None:
    """A spec may use the names that the printed function would have chosen."""
    inputs, locals_ = ["t", "x", "outputs", "q_all", "I_k"], ["dtype", "device", "o_dtype"]
    taken = [*inputs, *locals_]
    head = "q: key\nk: key\nv: value\n" + "".join(f"{n}: scalar\n" for n in inputs)
    body = "".join(f"{n} = t * x\n" for n in locals_)
    body += f"S = S @ (I + k @ k.T) + ({' + '.join(taken)}) * v @ k.T\no = S @ q\n"
    witness(parse(head + body, name="clash"))


def test_every_line_names_its_line() -> None:
    text = reference_source(parse((SPECS[0].parent / "kda.rec").read_text(), "kda.rec"))
    assert [line.strip() for line in text.splitlines() if "kda.rec:" in line] == [
        "S = S @ (torch.exp(g) * I_k)  # kda.rec:12",
        "p = S @ k  # kda.rec:13",
        "e = beta * (v - p)  # kda.rec:14",
        "S = S + e @ k.mT  # kda.rec:15",
        "o = scale * (S @ q)  # kda.rec:16",
    ]
