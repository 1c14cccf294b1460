"""The emitted torch path: the token loop's numbers and gradients over the zoo, in the cases that break hand-written kernels."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recgen import torch_primitives as primitives
from recgen.chunk import chunk
from recgen.emit_torch import torch_text
from recgen.normalize import Input, normalize
from recgen.parse import parse
from recgen.reference import reference_source
from recgen.resources import find, folder
from recgen.sample import REGIMES, InputRow, draw, error, has_gate, loose, results
from recgen.tile import TileGraph, tile
from tests.conftest import ZOO
from tests.torch_path import Call, compiled, source

K, V, H = 8, 6, 2


@lru_cache
def graph(name: str, text: str | None = None) -> TileGraph:
    given = find(name, folder("specs")).text if text is None else text
    return tile(chunk(normalize(parse(given, f"{name}.rec", name))))


@lru_cache
def ops(name: str, text: str | None = None) -> tuple[Call, Call, tuple[InputRow, ...]]:
    """The torch path, the token loop, and the table of inputs."""
    given = find(name, folder("specs")).text if text is None else text
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(reference_source(parse(given, f"{name}.rec", name)), scope)
    return compiled(graph(name, text), K, V), scope[f"reference_{name}"], rows(graph(name, text).form.normal.inputs)


def rows(inputs: tuple[Input, ...]) -> tuple[InputRow, ...]:
    return tuple((i.name, "".join(i.axes), i.domain.kind, i.domain.low, i.domain.high) for i in inputs if i.axes is not None)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def compare(name: str, inputs: dict[str, Tensor], dtype: torch.dtype, limit: float, text: str | None = None) -> None:
    """All that both make of the inputs; gradients of gates and of heads' parameters may be ten times as far off (they cancel)."""
    op, reference, table = ops(name, text)
    B, T = next(inputs[n].shape[:2] for n, axes, *_ in table if "t" in axes)
    state, upstream, d_state = noise(B, H, K, V), noise(B, T, H, V), noise(B, H, K, V) / 2
    found = results(op, {n: x.to(dtype) for n, x in inputs.items()}, upstream, initial_state=state.to(dtype), state_grad=d_state)
    wanted = results(reference, inputs, upstream, initial_state=state, state_grad=d_state)
    for key, ref in wanted.items():
        assert error(found[key], ref) < (10 * limit if key in loose(table) else limit), f"{key}: {error(found[key], ref):.1e}"


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("T", [1, 2, 15, 33, 64, 65, 130])
def test_short_and_ragged_sequences(name: str, T: int) -> None:
    table = ops(name)[2]
    inputs = draw(table, 2, T, H, K, V, seed=T, dtype=torch.float64)
    compare(name, inputs, torch.float64, 1e-12)
    compare(name, inputs, torch.float32, 5e-6)


@pytest.mark.parametrize("gate", REGIMES)
@pytest.mark.parametrize("name", [n for n in ZOO if has_gate(ops(n)[2])])
def test_gates_from_no_decay_to_none_left(name: str, gate: str) -> None:
    inputs = draw(ops(name)[2], 1, 80, H, K, V, seed=1, dtype=torch.float64, gate=gate)
    compare(name, inputs, torch.float64, 1e-12)
    compare(name, inputs, torch.float32, 5e-6)


@pytest.mark.parametrize("reset", [-math.inf, -1e9])
@pytest.mark.parametrize("name", [n for n in ZOO if has_gate(ops(n)[2])])
def test_hard_resets(name: str, reset: float) -> None:
    table = ops(name)[2]
    inputs = draw(table, 2, 130, H, K, V, seed=1, dtype=torch.float64)
    for gate, axes in ((n, axes) for n, axes, kind, *_ in table if kind == "log_decay"):
        if "t" in axes:
            inputs[gate][:, 70] = reset
            inputs[gate][0, 100:102, 0] = reset
        else:
            inputs[gate][0] = reset
    compare(name, inputs, torch.float64, 1e-12)


NUMBER = """q: key
k: key
v: value
a: scalar[unit]

S = a * S + v @ k.T
o = S @ q
"""


@pytest.mark.parametrize("low", [1e-6, 1e-8, 1e-20, 0.0])
def test_a_retention_of_next_to_nothing(low: float) -> None:
    """Given as a number: what is left of the past is divided by it, and there is less of that than sums are rounded by."""
    op, reference, table = ops("number", NUMBER)
    inputs = draw(table, 1, 130, H, K, V, seed=2, dtype=torch.float64)
    inputs["a"][:, 10] = low
    upstream = noise(1, 130, H, V)
    found = results(op, {n: x.float() for n, x in inputs.items()}, upstream)
    wanted = results(reference, inputs, upstream)
    assert max(error(found[name], wanted[name]) for name in ("o", "dq", "dk", "dv")) < 5e-6
    others = torch.ones(130, dtype=torch.bool)
    others[10] = False
    assert error(found["da"][:, others], wanted["da"][:, others]) < 5e-5
    assert found["da"][:, 10].abs().max() <= 2 * wanted["da"][:, 10].abs().max()


@pytest.mark.parametrize("name", ZOO)
def test_pieces_of_a_long_sequence(name: str) -> None:
    inputs = draw(ops(name)[2], 40, 140, H, K, V, seed=3, dtype=torch.float64)
    assert 40 * 140 * H > 4096
    compare(name, inputs, torch.float64, 1e-12)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5), (0, 0)])
def test_empty_inputs(name: str, B: int, T: int) -> None:
    op, _, table = ops(name)
    inputs = {n: x.requires_grad_() for n, x in draw(table, B, T, H, K, V, seed=1).items()}
    state = torch.randn(B, H, K, V, requires_grad=True)
    o, last = op(**inputs, initial_state=state, output_final_state=True)
    assert last is not None
    assert o.shape == (B, T, H, V)
    assert torch.equal(last, state)
    *gradients, d_state = torch.autograd.grad(o.sum() + last.sum(), [*inputs.values(), state])
    assert all(not d.any() for d in gradients)
    assert torch.equal(d_state, torch.ones_like(state))


def test_a_retention_of_zero_forgets_everything() -> None:
    text = "q: key\nk: key\nv: value\nalpha: scalar[unit]\n\nS = alpha * S\nS = S + v @ k.T\no = S @ q\n"
    op, reference, table = ops("retained", text)
    inputs = draw(table, 1, 70, H, K, V, seed=1, dtype=torch.float64)
    inputs["alpha"][:, 40] = 0.0
    found = results(op, inputs, noise(1, 70, H, V), initial_state=noise(1, H, K, V), state_grad=noise(1, H, K, V))
    wanted = results(reference, inputs, noise(1, 70, H, V), initial_state=noise(1, H, K, V), state_grad=noise(1, H, K, V))
    for x in (*found.values(), *wanted.values()):
        assert x.isfinite().all()
    found["dalpha"][:, 40] = wanted["dalpha"][:, 40] = 0.0  # nothing is left to tell how much: the chunk form says 0 there
    for name, x in wanted.items():
        assert error(found[name], x) < 1e-12, name


def test_names_of_a_spec_do_not_meet_those_of_the_function() -> None:
    text = (
        "size: key\nx: key[unit_norm]\noutputs: value\nseen: key[log_decay]\npiece: scalar[unit]\nread: head\nrows: head[key]\n"
        "decay: scalar\n\n"
        "S = S @ diag(exp(seen))\nS = S + piece * (outputs - S @ x) @ x.T\no = read * (S @ (rows * size)) + decay * outputs\n"
    )
    compare("names", draw(ops("names", text)[2], 1, 70, H, K, V, seed=1, dtype=torch.float64), torch.float64, 1e-12, text)


FORMS = {
    "a value that is a number": "S = S + beta * (1 - S @ k) @ k.T\no = 0.5 * (S @ q) + w * v",
    "a scale of a head": "S = exp(g) * S\nS = S + w * beta * (v - S @ k) @ k.T\no = S @ q",
    "a read of a head": "S = S @ diag(exp(gate))\nS = S + beta * (u * v - S @ k) @ k.T\no = 2 * (S @ p) + 2 * u * v",
    "two corrections": "S = S @ diag(exp(gate))\nS = S + beta * (v - S @ k) @ k.T\nS = S + beta * (w * v - S @ m) @ m.T\no = S @ q",
    "a decay between": "S = S + beta * (v - S @ k) @ k.T\nS = exp(g) * S\nS = S + beta * (w * v - S @ m) @ m.T\no = S @ q + S @ k",
    "a read before": "o = S @ q + S @ m\nS = S + v @ k.T\nS = exp(g) * S",
}
INPUTS = {
    "q": "key", "k": "key[unit_norm]", "m": "key[unit_norm]", "v": "value", "g": "scalar[log_decay]", "gate": "key[log_decay]",
    "beta": "scalar[unit]", "w": "head", "u": "head[value]", "p": "head[key]",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_moves_out_of_the_loop_is_the_same(form: str) -> None:
    lines = FORMS[form]
    name = "_".join(form.split())
    text = "".join(f"{x}: {kind}\n" for x, kind in INPUTS.items() if re.search(rf"\b{x}\b", lines)) + f"\n{lines}\n"
    inputs = draw(ops(name, text)[2], 2, 70, H, K, V, seed=1, dtype=torch.float64)
    compare(name, inputs, torch.float64, 1e-12, text)


def test_half_precision_comes_back_as_it_went_in() -> None:
    op, _, table = ops("kda")
    o, last = op(**draw(table, 1, 40, H, K, V, seed=1, dtype=torch.bfloat16), output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert last is not None
    assert last.dtype == torch.float32


@pytest.mark.parametrize("name", ZOO)
def test_the_text_is_the_same_each_time_and_names_the_lines(name: str) -> None:
    text = source(graph(name))
    assert text == source(graph(name))
    assert f"{name}.rec:" in text
    assert "$" not in text
    assert "§" not in text
    assert not {"_across", "_score"} & {h.split("(")[0][4:] for h in torch_text(graph("mamba2")).helpers}


@pytest.mark.parametrize("axis", [-1, -2])
def test_segment_sums_never_subtract(axis: int) -> None:
    x = torch.tensor([[-1.0, -87.0, -2.0], [-1e9, -3.0, -0.5]], dtype=torch.float64)
    n = x.shape[axis]
    for reverse in (False, True):
        for exclusive in (False, True):
            found = primitives._segment_sum(x, axis, reverse, exclusive)
            for i in range(n):
                seen = range(i + exclusive, n) if reverse else range(i + 1 - exclusive)
                wanted = sum((x.select(axis, j) for j in seen), start=torch.zeros_like(x.select(axis, 0)))
                assert torch.equal(found.select(axis, i), wanted)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_views_of_halves(size: int) -> None:
    x = torch.arange(16.0).reshape(1, 1, 2, 8)
    lower, upper = (f(x, size) for f in (primitives._lower, primitives._upper))
    assert torch.equal(torch.cat([lower, upper], -1).flatten(3), x)
    matrix = torch.zeros(1, 1, 2, 8, 8)
    primitives._across(matrix, size).copy_(torch.ones(1, 1, 2, 8 // (2 * size), size, size))
    t, s = torch.arange(8)[:, None], torch.arange(8)[None, :]
    across = (t // (2 * size) == s // (2 * size)) & (t // size > s // size)
    assert torch.equal(matrix[0, 0, 1], across.float())


def test_inverse_of_nearly_collinear_keys_stays_finite() -> None:
    k = F.normalize(torch.ones(64, 16) + 1e-3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    lower = -(k @ k.T).tril(-1)
    found = primitives._inverse(-lower)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) - lower.double())
    assert error(found, exact) < 1e-5


def test_pairs_that_no_decay_lies_between_take_no_part_in_its_gradient() -> None:
    """Read before the decay and written after it, under gates of -20: what counts is e^-20 of what does not."""
    text = "v: value\nk: key\nq: key\ng: scalar[log_decay]\n\np = S @ q\nS = exp(g) * S\nS = S + v @ k.T\no = p\n"
    compare("touching", draw(ops("touching", text)[2], 1, 70, H, K, V, seed=1, dtype=torch.float32, gate="-20"), torch.float32, 1e-4, text)
