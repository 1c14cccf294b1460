"""normalize: equivalent specs give equal normal forms, and every form means what its spec says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from recgen.elementwise import Input, axes_of, bounds, evaluate, sigmoid, silu, softplus, symbol
from recgen.errors import VerifyError
from recgen.normalize import NormalForm, normalize
from recgen.parse import Spec, parse

ROOT = Path(__file__).parent.parent
SPECS = sorted((ROOT / "specs").glob("*.rec"))
T, K, V = 6, 4, 3

DECLARED = {
    "q": "key",
    "q2": "key",
    "k": "key[unit_norm]",
    "k2": "key[unit_norm]",
    "a": "key[unit]",
    "v": "value",
    "v2": "value",
    "y": "value",
    "g": "scalar[log_decay]",
    "h": "scalar[log_decay]",
    "w": "key[log_decay]",
    "beta": "scalar[unit]",
    "b2": "scalar[0, 2]",
    "alpha": "scalar[unit]",
    "lam": "head[unit]",
    "u": "head[key]",
    "d": "head[value]",
    "scale": "const = K ** -0.5",
}
READ = "o = scale * (S @ q)"


def spec_of(body: str) -> Spec:
    """A spec with the inputs that its lines use; `; ` ends a line."""
    body = body.replace("; ", "\n")
    if "o =" not in body:
        body += "\n" + READ
    words = set(re.findall(r"\w+", body))
    return parse("".join(f"{n}: {d}\n" for n, d in DECLARED.items() if n in words) + body + "\n", name="case")


def draw(inputs: tuple[Input, ...], seed: int = 0) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """fp64 inputs in their domains, and a state [V,K]."""
    random = np.random.default_rng(seed)
    size = {"t": T, "k": K, "v": V}
    env = {}
    for i in inputs:
        if i.axes is None:
            continue
        x = random.standard_normal([size[a] for a in i.axes])
        match i.domain.kind:
            case "log_decay":
                x = -np.abs(x)
            case "unit" | "interval":
                low, high = i.domain.low, i.domain.high
                x = low + (high - low) / (1 + np.exp(-x))
            case "unit_norm":
                x = x / np.linalg.norm(x, axis=-1, keepdims=True)
        env[i.name] = x
    return env, random.standard_normal((V, K))


def agree(form: NormalForm, seed: int = 0) -> None:
    """The micro-steps mean what the updates mean."""
    env, S0 = draw(form.inputs, seed)
    for x, y in zip(form.run(env, S0), form.run_updates(env, S0), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(y).max(initial=0))))


# Each entry: specs that say the same.
EQUIVALENT: dict[str, tuple[str, ...]] = {
    "linear_attention": (
        "S = S + v @ k.T",
        "S = (k @ v.T + S.T).T",
        "S = S @ identity() + v @ k.T",
        "S = S - grad(-dot(v, S @ k), S)",
    ),
    "retention": (
        "S = exp(-lam) * S; S = S + v @ k.T",
        "S = S @ scalar(exp(-lam)) + v @ k.T",
        "S = exp(-lam) * S + v @ k.T",
        "S = v @ k.T - -exp(-lam) * S",
    ),
    "mamba2": (
        "b2 = softplus(b2 + lam); S = exp(-exp(lam) * b2) * S + b2 * v @ k.T; o = S @ q + lam * v",
        "x = softplus(lam + b2); S = S / exp(exp(lam) * x); S = S + v @ (x * k).T; o = lam * v + S @ q",
        "x = softplus(lam + b2); S = S @ scalar(exp(-x * exp(lam))) + (x * v) @ k.T; o = S @ q + lam * v",
    ),
    "gla": (
        "S = S @ diag(exp(w)); S = S + v @ k.T",
        "S = S @ diagonal(exp(w)) + v @ k.T",
        "S = (diag(exp(w)) @ S.T).T + v @ k.T",
    ),
    "rwkv6": (
        "o = scale * (S @ q + v * dot(u * k, q)); S = S @ diag(exp(w)) + v @ k.T",
        "o = scale * (S @ q) + scale * v * (k.T @ (q * u)); S = S @ diag(exp(w)); S = S + v @ k.T",
        "P = S; S = S @ diag(exp(w)) + v @ k.T; o = (P @ q + dot(q, k * u) * v) * scale",
    ),
    "deltanet": (
        "e = beta * (v - S @ k); S = S + e @ k.T",
        "S = S @ (I - beta * k @ k.T) + beta * v @ k.T",
        "S = S @ householder(k, beta) + v @ (beta * k).T",
        "S = S - beta * grad(norm2(S @ k - v) / 2, S)",
        "S = S - grad(beta * dot(S @ k - v, S @ k - v) / 2, S)",
        "S = S - beta * ((S @ k).T - v.T).T @ k.T",
        "S = S - beta * S @ k @ k.T + beta * v @ k.T",
        "S = S - grad(beta * norm2(S @ k) / 2 - beta * v.T @ (S @ k), S)",
    ),
    "gated_deltanet": (
        "S = exp(g) * S; e = beta * (v - S @ k); S = S + e @ k.T",
        "S = exp(g) * S @ (I - beta * k @ k.T) + beta * v @ k.T",
        "S = S @ scalar(exp(g)) @ householder(k, beta) + beta * v @ k.T",
        "S = S @ householder(k, beta) @ scalar(exp(g)) + beta * v @ k.T",
        "S = exp(g) * S; S = S - beta * grad(norm2(S @ k - v) / 2, S)",
        "P = exp(g) * S; S = P + beta * (v - P @ k) @ k.T",
        "e = beta * (v - exp(g) * (S @ k)); S = exp(g) * S; S = S + e @ k.T",
    ),
    "kda": (
        "S = S @ diag(exp(w)); p = S @ k; e = beta * (v - p); S = S + e @ k.T",
        "S = S @ diag(exp(w)) @ householder(k, beta) + beta * v @ k.T",
        "S = S @ (diag(exp(w)) - beta * (exp(w) * k) @ k.T) + beta * v @ k.T",
        "p = S @ (exp(w) * k); S = S @ diag(exp(w)) + (beta * (v - p)) @ k.T",
    ),
    "dplr": (
        "S = S @ (diag(exp(w)) + a @ k.T) + v @ q.T",
        "S = S @ dplr(exp(w), a, k) + v @ q.T",
        "p = S @ a; S = S @ diag(exp(w)); S = S + p @ k.T; S = S + v @ q.T",
        "p = S @ a; S = S @ diag(exp(w)); S = S + v @ q.T + p @ k.T",
    ),
    "rwkv7": (
        "S = S @ (diag(exp(w)) - k @ (a * k).T) + v @ k2.T; o = S @ q",
        "S = S @ diag(exp(w)) - (S @ k) @ (k * a).T + v @ k2.T; o = S @ q",
        "S = S @ dplr(exp(w), -k, a * k) + v @ k2.T; o = S @ q",
    ),
    "written before the decay": (
        "S = S + beta * (v - S @ k) @ k.T; S = exp(g) * S",
        "S = exp(g) * (S + beta * (v - S @ k) @ k.T)",
        "S = exp(g) * S @ householder(k, beta) + (exp(g) * beta * v) @ k.T",
    ),
    "written before a decay by channel": (
        "S = S + beta * (v - S @ k) @ k.T; S = S @ diag(exp(w))",
        "S = (S + beta * (v - S @ k) @ k.T) @ diag(exp(w))",
        "S = S @ diag(exp(w)) + beta * (v - S @ k) @ (exp(w) * k).T",
    ),
    "predicted before the decay, written after it": (
        "e = beta * (v - S @ k); S = exp(g) * S; S = S + e @ k.T",
        "S = exp(g) * S + beta * (v - S @ k) @ k.T",
    ),
    "read between decay and write": (
        "S = exp(g) * S; o = S @ q; S = S + v @ k.T",
        "o = exp(g) * (S @ q); S = exp(g) * S + v @ k.T",
        "o = S @ (q * exp(g)); S = S @ scalar(exp(g)) + v @ k.T",
    ),
    "a retention that is a number": (
        "S = alpha * S + v @ k.T",
        "S = alpha * S; S = S + v @ k.T",
        "S = S - (1 - alpha) * S + v @ k.T",
        "S = S @ scalar(alpha) + v @ k.T",
    ),
    "weight decay as an objective": (
        "S = S - beta * grad(lam * norm2(S) / 2 - dot(v, S @ k), S)",
        "S = (1 - beta * lam) * S + beta * v @ k.T",
        "S = (1 - lam * beta) * S; S = S + v @ (beta * k).T",
    ),
    "two householders": (
        "S = S @ householder(k, beta) @ householder(k2, b2) + v @ q.T",
        "S = S @ householder(k, beta); S = S @ householder(k2, b2); S = S + v @ q.T",
        "S = S @ householder(k, beta); S = S @ householder(k2, b2) + v @ q.T",
        "S = S @ (householder(k, beta) @ householder(k2, b2)) + v @ q.T",
    ),
    "delta product": (
        "S = exp(g) * S; S = S + beta * (v - S @ k) @ k.T; S = S + b2 * (v2 - S @ k2) @ k2.T",
        "S = exp(g) * S @ householder(k, beta) + beta * v @ k.T; S = S @ householder(k2, b2) + b2 * v2 @ k2.T",
    ),
    "decays that merge": (
        "S = exp(g) * S; S = S + beta * (v - S @ k) @ k.T; S = exp(h) * S; S = S + b2 * (v2 - S @ k2) @ k2.T",
        "S = exp(g) * S @ householder(k, beta) + beta * v @ k.T; S = exp(h) * S @ householder(k2, b2) + b2 * v2 @ k2.T",
    ),
    "the order of writes": (
        "S = S + v @ k.T; S = S + v2 @ k2.T",
        "S = S + v2 @ k2.T; S = S + v @ k.T",
        "S = S + v @ k.T + v2 @ k2.T",
    ),
    "writes of one row": (
        "S = S + v @ (k + a * k2).T",
        "S = S + v @ k.T + v @ (a * k2).T",
        "S = S + v @ (a * k2).T; S = S + v @ k.T",
    ),
    "corrections of one row": (
        "e = v - S @ k; S = S + beta * e @ k.T + e @ (u * k2).T",
        "S = S + (v - S @ k) @ (beta * k + u * k2).T",
        "e = S @ k - v; S = S - e @ (beta * k).T - e @ (k2 * u).T",
    ),
    "a write that fades": (
        "S = S + (1 - alpha) * v @ k.T",
        "S = S + v @ k.T - alpha * v @ k.T",
        "S = S + v @ (k - alpha * k).T",
    ),
    "a sum in a value": (
        "S = S + (d * (v + v2)) @ k.T",
        "S = S + (d * v) @ k.T + (d * v2) @ k.T",
    ),
    "reads that add": (
        "S = S + v @ k.T; o = S @ (q + q2) + y * (S @ q)",
        "S = S + v @ k.T; o = S @ q + S @ q2 + y * (S @ q)",
    ),
    "norms": (
        "k = k / norm(k); S = S + v @ k.T",
        "S = S + v @ (k / norm2(k) ** 0.5).T",
        "S = S + (v / sqrt(dot(k, k))) @ k.T",
    ),
    "a sigmoid gate": (
        "S = sigmoid(beta) * S + v @ k.T",
        "S = exp(-softplus(-beta)) * S + v @ k.T",
    ),
}


@pytest.mark.parametrize("case", EQUIVALENT)
def test_equivalent_specs_are_equal(case: str) -> None:
    first, *others = (normalize(spec_of(b)) for b in EQUIVALENT[case])
    assert first.obstacle is None and first.steps
    agree(first)
    for body, other in zip(EQUIVALENT[case][1:], others, strict=True):
        agree(other)
        assert other.canonical() == first.canonical(), f"{body}\n{other}\n{first}"


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_zoo_equals_its_other_spellings(path: Path) -> None:
    form = normalize(parse(path.read_text(), str(path)))
    assert form.obstacle is None
    agree(form)
    other = normalize(spec_of(EQUIVALENT[path.stem][0]))
    assert [len(s.events) for s in other.steps] == [len(s.events) for s in form.steps]
    assert [s.decay_axis for s in other.steps] == [s.decay_axis for s in form.steps]


# spec -> what its form must look like, in order: the events of each micro-step, where the decay is, the reads (step, after_decay)
PLACES: dict[str, tuple[list[int], int | None, list[tuple[int, bool]]]] = {
    "S = S + v @ k.T": ([1], None, [(1, True)]),
    "o = S @ q; S = S + v @ k.T": ([1], None, [(0, True)]),
    "S = exp(g) * S; S = S + v @ k.T": ([1], 0, [(1, True)]),
    "o = S @ q; S = exp(g) * S + v @ k.T": ([1], 0, [(0, False)]),
    "S = exp(g) * S; o = S @ q; S = S + v @ k.T": ([1], 0, [(0, True)]),
    "S = S + v @ k.T; o = S @ q; S = exp(g) * S": ([1], 0, [(1, False)]),
    "S = S + v @ k.T; o = S @ q; S = S + v2 @ k2.T": ([1, 1], None, [(1, True)]),
    "S = S + v @ k.T; o = S @ q; S = exp(g) * S + v2 @ k2.T": ([1, 1], 1, [(1, False)]),
    "S = exp(g) * S + v @ k.T; o = S @ q; S = S + v2 @ k2.T": ([1, 1], 0, [(1, True)]),
    "S = S @ householder(k, beta) @ householder(k2, b2) + v @ q.T": ([1, 2], None, [(2, True)]),
    "e = v - S @ k; S = S + v2 @ k2.T; S = S + e @ k.T": ([2], None, [(1, True)]),
    "S = exp(g) * S; o = S @ q + S @ q2; S = exp(h) * S + v @ k.T": ([1], 0, [(0, False)]),
    # No place for the decays together: all reads go down to the start of the token.
    "S = exp(g) * S + v @ k.T; o = S @ q; S = exp(h) * S + v2 @ k2.T": ([2], 0, [(0, False)]),
    "e = v - S @ k; S = S + v2 @ k2.T; S = S + (v - S @ k2) @ k2.T; S = S + e @ k.T": ([2], None, [(1, True)]),
    "S = exp(g) * S + (v - S @ k) @ k.T; S = exp(h) * S + (v2 - S @ k2) @ k2.T": ([2], 0, [(1, True)]),
    "S = S + v2 @ k2.T; e = v - S @ k; S = S + v @ q.T; S = S + e @ k.T": ([1, 2], None, [(2, True)]),
}


@pytest.mark.parametrize("body", PLACES)
def test_places(body: str) -> None:
    form = normalize(spec_of(body))
    agree(form)
    events, decay, reads = PLACES[body]
    assert [len(s.events) for s in form.steps] == events, str(form)
    assert next((n for n, s in enumerate(form.steps) if s.decay_axis != "none"), None) == decay
    assert [(r.step, r.after_decay) for r in form.reads] == reads


def test_correction_and_write_are_one_event() -> None:
    (step,) = normalize(spec_of("S = exp(g) * S; e = beta * (v - S @ k); S = S + e @ k.T")).steps
    (event,) = step.events
    k, v, beta, g = (symbol(n) for n in ("k", "v", "beta", "g"))
    assert (event.static, event.read, event.write) == (v, -k, beta * k)
    assert event.read_after and event.write_after
    assert (step.decay, step.decay_axis) == (g, "scalar")


def test_no_exponent_is_positive() -> None:
    """Decays are only ever multiplied: what is moved never gets exp(-g)."""
    for bodies in EQUIVALENT.values():
        form = normalize(spec_of(bodies[0]))
        rows = [x for s in form.steps for e in s.events for x in (e.static, e.read, e.write) if x is not None]
        for x in [*rows, *(r.query for r in form.reads), form.direct]:
            for f in x.atoms(sympy.exp):
                assert not any(f.args[0].coeff(symbol(n)) < 0 for n in ("g", "h", "w")), str(form)


OBSTACLES = {
    "S = diag(exp(y)) @ S + v @ k.T": ("for each value channel", 4),
    "S = S + (y * (v - S @ k)) @ k.T": ("a strength for each value channel", 4),
    "S = (I - beta * v @ v.T) @ S + v @ k.T": ("value side", 5),
    "S = (I - beta * v @ v.T) @ S @ householder(k, beta) + v @ k.T": ("value side", 5),
    "S = householder(v, beta) @ S; S = S @ householder(k, beta) + v @ k.T": ("value side", 5),
    "S = v @ k.T": ("dropped", 4),
    "P = S; S = S + v @ k.T; S = S + P": ("an older state", 6),
    "S = -0.5 * S + v @ k.T": ("may be negative", 4),
    "S = (1 - b2) * S + v @ k.T": ("down to -1", 5),
    "S = (g + h) * S + v @ k.T": ("never positive", 5),
}


@pytest.mark.parametrize("body", OBSTACLES)
def test_obstacle(body: str) -> None:
    form = normalize(spec_of(body))
    why, lines_of_inputs = OBSTACLES[body]
    assert form.obstacle is not None and why in form.obstacle
    assert form.obstacle_line is not None
    assert (form.steps, form.reads, form.direct) == ((), (), 0)
    assert f"no chunk form: {form.obstacle}" in str(form)
    del lines_of_inputs
    agree(form)


def test_hard_resets() -> None:
    """alpha = 0 and g = -inf: the past is gone, nothing is NaN."""
    for body, name, value in (("S = alpha * S + v @ k.T", "alpha", 0.0), ("S = exp(g) * S + v @ k.T", "g", -np.inf)):
        form = normalize(spec_of(body))
        env, S0 = draw(form.inputs)
        env[name][3] = value
        o, S = form.run(env, S0)
        o2, S2 = form.run_updates(env, S0)
        assert np.isfinite(o).all() and np.isfinite(S).all()
        np.testing.assert_allclose(o, o2, atol=1e-12)
        np.testing.assert_allclose(S, S2, atol=1e-12)


# random specs


@st.composite
def bodies(draw_from: st.DrawFn) -> str:
    """Lines that forget, correct, write and read in any order."""
    pick = lambda *xs: draw_from(st.sampled_from(xs))  # noqa: E731
    decay = lambda: pick("exp(g)", "exp(h)", "alpha", "exp(g + h)", "(1 - beta * lam)", "sigmoid(b2)")  # noqa: E731
    row = lambda: pick("k", "k2", "a * k", "(k - k2)", "u * k2")  # noqa: E731
    value = lambda: pick("v", "v2", "(v + d * v2)", "tanh(v)")  # noqa: E731
    strength = lambda: pick("", "beta * ", "b2 * ", "exp(g) * ", "(1 - alpha) * ")  # noqa: E731
    lines, held = [], False
    count = draw_from(st.integers(1, 4))
    read_at = draw_from(st.integers(0, count))
    query = pick("q", "(q + a * q2)", "exp(w) * q")
    output = f"o = S @ ({query})" + pick("", " + d * v", " + y * (S @ q2)", " + v * dot(u * k, q)")
    for n in range(count):
        if n == read_at:
            lines.append(output)
        match draw_from(st.integers(0, 7)):
            case 0:
                lines.append(f"S = {decay()} * S")
            case 1:
                lines.append("S = S @ diag(exp(w))")
            case 2:
                lines.append(f"S = S + {strength()}{value()} @ ({row()}).T")
            case 3:
                r = row()
                lines.append(f"S = S + {strength()}({value()} - S @ ({r})) @ ({pick(r, row())}).T")
            case 4:
                lines.append(f"S = {decay()} * S @ householder({row()}, beta) + {value()} @ ({row()}).T")
            case 5:
                lines.append(f"S = S @ (diag(exp(w)) - ({row()}) @ ({row()}).T) + {value()} @ ({row()}).T")
            case 6 if held:
                lines.append(f"S = S + {strength()}e @ ({row()}).T")
            case _:
                held = True
                lines.append(f"e = {value()} - S @ ({row()})")
    if not any(x.startswith("S") for x in lines) or not any("v" in re.findall(r"\w+", x) for x in lines):
        lines.append("S = S + v @ k.T")
    return "\n".join([*lines, *([output] if read_at >= count or output not in lines else [])])


@settings(max_examples=150, deadline=None)
@given(bodies())
def test_random_specs(body: str) -> None:
    form = normalize(spec_of(body))
    form.verify()
    assert str(form) == str(normalize(spec_of(body)))
    agree(form)


# texts


GOLDEN: Mapping[str, str] = {
    "deltanet": """
  S1 = S0    # deltanet.rec:13
       + (v - S0 k) (beta*k)^T    # deltanet.rec:13
  o = S1 (q*scale)    # deltanet.rec:14
""",
    "dplr": """
  S1 = S0 Diag(exp(g))    # dplr.rec:14
       + (S0 a) b^T    # dplr.rec:14
       + v k^T    # dplr.rec:14
  o = S1 (q*scale)    # dplr.rec:15
""",
    "gated_deltanet": """
  S1 = exp(g) S0    # gated_deltanet.rec:12
       + (v - S0' k) (beta*k)^T    # gated_deltanet.rec:14
  o = S1 (q*scale)    # gated_deltanet.rec:15

  where S0' = exp(g) S0, the state after the decay
""",
    "gla": """
  S1 = S0 Diag(exp(g))    # gla.rec:11
       + v k^T    # gla.rec:12
  o = S1 (q*scale)    # gla.rec:13
""",
    "kda": """
  S1 = S0 Diag(exp(g))    # kda.rec:12
       + (v - S0' k) (beta*k)^T    # kda.rec:15
  o = S1 (q*scale)    # kda.rec:16

  where S0' = S0 Diag(exp(g)), the state after the decay
""",
    "linear_attention": """
  S1 = S0    # linear_attention.rec:10
       + v k^T    # linear_attention.rec:10
  o = S1 (q*scale)    # linear_attention.rec:11
""",
    "mamba2": """
  S1 = exp(-exp(A_log)*softplus(dt + dt_bias)) S0    # mamba2.rec:15
       + v (k*softplus(dt + dt_bias))^T    # mamba2.rec:15
  o = S1 q + D*v    # mamba2.rec:16
""",
    "retention": """
  S1 = exp(log_gamma) S0    # retention.rec:11
       + v k^T    # retention.rec:12
  o = S1 (q*scale)    # retention.rec:13
""",
    "rwkv6": """
  S1 = S0 Diag(exp(w))    # rwkv6.rec:13
       + v k^T    # rwkv6.rec:13
  o = S0 (r*scale) + scale*v*sum_k(k*r*u)    # rwkv6.rec:12
""",
    "rwkv7": """
  S1 = S0 Diag(exp(w))    # rwkv7.rec:12
       + v k^T    # rwkv7.rec:12
       + (-S0 kappa) (a*kappa)^T    # rwkv7.rec:12
  o = S1 r    # rwkv7.rec:13
""",
}


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_golden(path: Path) -> None:
    form = normalize(parse(path.read_text(), str(path)))
    steps = str(form).split("\n\n", 2)[2]
    assert steps == GOLDEN[path.stem].strip("\n")


def test_the_whole_text() -> None:
    path = ROOT / "specs" / "kda.rec"
    assert str(normalize(parse(path.read_text(), str(path)))).startswith(
        "normal form of kda\n\n"
        "  q:         [B,T,H,K]\n"
        "  k:         [B,T,H,K], of norm 1\n"
        "  v:         [B,T,H,V]\n"
        "  g:         [B,T,H,K] in [-inf, 0]\n"
        "  beta:      [B,T,H] in [0, 1]\n"
        "  scale:     a number, by default 1/sqrt(K)\n"
    )


def test_text_of_marks_and_obstacles() -> None:
    assert "where S1^ is S1 before the decay" in str(normalize(spec_of("S = S + v @ k.T; o = S @ q; S = exp(g) * S")))
    text = str(normalize(spec_of("S = householder(v, beta) @ S + v @ k.T")))
    assert "(-beta*v) (S0^T v)^T" in text


def test_same_text_under_two_hash_seeds() -> None:
    code = (
        "import glob; from recgen.parse import parse; from recgen.normalize import normalize\n"
        "for p in sorted(glob.glob('specs/*.rec')): f = normalize(parse(open(p).read(), p)); print(f, f.canonical())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1 and texts.pop()


# what a form must be


def test_verify_refuses_broken_forms() -> None:
    form = normalize(spec_of("S = exp(g) * S; S = S + beta * (v - S @ k) @ k.T"))
    (step,) = form.steps
    (event,) = step.events
    broken = [
        replace(form, steps=(replace(step, events=(replace(event, static=symbol("k")),)),)),
        replace(form, steps=(replace(step, events=(replace(event, write=symbol("v")),)),)),
        replace(form, steps=(replace(step, decay_axis="key"),)),
        replace(form, steps=(replace(step, decay=sympy.Integer(0)),)),
        replace(form, steps=(step, step)),
        replace(form, reads=(replace(form.reads[0], step=2),)),
        replace(form, reads=(replace(form.reads[0], query=symbol("nobody")),)),
        replace(form, direct=sympy.zoo),
        replace(form, obstacle="none", obstacle_line=1),
        replace(form, updates=(replace(form.updates[0], keeps=(replace(form.updates[0].keeps[0], version=1),)), form.updates[1])),
    ]
    for f in broken:
        with pytest.raises(VerifyError):
            f.verify()


# elementwise


def test_axes() -> None:
    inputs = spec_of("S = S + (v * dot(k, k2)) @ (u * k).T + (d * norm(v)) @ k.T").inputs
    k, v, u, d = (symbol(n) for n in ("k", "v", "u", "d"))
    (update,) = normalize(spec_of("S = S + (v * dot(k, k2)) @ (u * k).T + (d * norm(v)) @ k.T")).updates
    rows = [axes_of(r.static, inputs) for r, _ in update.outers]
    assert rows == [("t", "v"), ("t", "v")]
    assert axes_of(k * v, inputs) == ("t", "k", "v")
    assert axes_of(u, inputs) == ("k",) and axes_of(d, inputs) == ("v",)
    assert axes_of(sympy.Integer(3), inputs) == ()


def test_functions_and_their_derivatives() -> None:
    x = sympy.Symbol("x", real=True)
    at, step = np.array([-30.0, -2.0, -0.3, 0.0, 1.0, 40.0]), 1e-6
    for f in (sigmoid(x), softplus(x), silu(x), sympy.tanh(x), sympy.exp(x / 10), sympy.sqrt(x**2 + 1), 1 / (1 + x**2)):
        value = lambda e, y: evaluate(e, {"x": y}, np)  # noqa: E731
        slope = (value(f, at + step) - value(f, at - step)) / (2 * step)
        np.testing.assert_allclose(value(f.diff(x), at), slope, rtol=1e-5, atol=1e-8)


def test_bounds() -> None:
    inputs = spec_of("S = beta * b2 * exp(g) * S + v @ k.T").inputs
    beta, b2, g, v = (symbol(n) for n in ("beta", "b2", "g", "v"))
    assert bounds(1 - beta, inputs) == (0, 1)
    assert bounds(1 - b2, inputs) == (-1, 1)
    assert bounds(sympy.exp(g) * beta, inputs) == (0, 1)
    assert bounds(v, inputs) == (-np.inf, np.inf)
    assert bounds(1 / (1 + b2), inputs) == (pytest.approx(1 / 3), 1)


def test_a_read_between_correction_and_scalar_decay_keeps_the_correction_before_the_decay() -> None:
    text = """q: key
k: key[unit_norm]
m: key[unit_norm]
v: value
beta: scalar[unit]
g: scalar[log_decay]

S = S @ householder(m, beta)
S = S + v @ k.T
o = S @ q
S = S @ scalar(exp(g))
"""
    form = normalize(parse(text, "held.rec", "held"))
    (step,) = form.steps
    assert [(e.read_after, e.write_after) for e in step.events] == [(False, False), (False, False)]
    assert [(r.step, r.after_decay) for r in form.reads] == [(1, False)]


def test_a_normalised_key_stays_normalised_where_it_reads_and_where_it_writes() -> None:
    text = """k: key
q: key
v: value
b: scalar

k = l2norm(k)
e = sigmoid(b) * (v - S @ k)
S = S + e @ k.T
o = S @ q
"""
    (step,) = normalize(parse(text, "normed.rec", "normed")).steps
    (event,) = step.events
    assert event.static == symbol("v")
    assert event.read is not None
    assert event.read**2 * sigmoid(symbol("b")) ** 2 == event.write**2
