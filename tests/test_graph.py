"""graph: what is built means what was asked for, equal work is one node, and every operation has the gradient of its meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recgen.graph import Graph
from recgen.meaning import evaluate
from recgen.ops import ORDER, Axes, Axis, Dot, Map, Node, is_number, topological
from recgen.vjp import gradients
from tests.conftest import ROOT, ZOO
from tests.stages import Array, tile_graph

SIZES = {"t": 8, "k": 3, "v": 2}
SPECS = ("tk,sk->ts", "ts,sv->tv", "tv,sv->ts", "st,sv->tv", "tk,vk->tv", "tv,tk->vk", "tv,vk->tk", "ts,sk->tk", "tr,rs->ts")
PROSE = {"retention"}  # also the field's word for what a decay leaves
PATTERNS = [
    "chunk*",
    "tile",
    "graph",
    "ops",
    "vjp",
    "meaning",
    "schedule",
    "lower*",
    "emit*",
    "scores",
    "fuse",
    "statements",
    "cost",
    "hardware",
    "translate",
    "show*",
    "prove",
]
BEHIND_NORMALIZE = sorted(path for pattern in PATTERNS for path in (ROOT / "recgen").glob(f"{pattern}.py"))


def extent(axes: Axes) -> tuple[int, ...]:
    return tuple({**SIZES, "s": SIZES["t"]}[a] for a in axes)


def environment(nodes: tuple[Node, ...], seed: int = 0) -> dict[str, Array]:
    """Random values of every leaf, bounded away from 0."""
    random = np.random.default_rng(seed)
    leaves = {n.op.name: n.axes for n in nodes if hasattr(n.op, "name")}
    return {name: random.uniform(0.5, 1.5, size=extent(axes)) * random.choice([-1, 1], size=extent(axes)) for name, axes in leaves.items()}


def value(node: Node, env: dict[str, Array]) -> Array:
    return evaluate([node], env, SIZES)[node.index]  # type: ignore[arg-type]


def operand(graph: Graph, name: str, letters: str, scaled: tuple[Axis, ...]) -> tuple[Node, Callable[[dict[str, Array]], Array]]:
    """A tile, times a vector along each of its axes in `scaled`, and its value in NumPy."""
    names: dict[str, Axis] = {"k": "k", "v": "v"}
    axes: Axes = ("t", "s") if not set(letters) & set(names) else tuple(names.get(c, "t") for c in letters)
    node = graph.load(name, axes)
    for axis in scaled:
        if axis in axes:
            node = graph.mul(graph.load(f"{name}_{axis}", (axis,)), node)

    def meaning(env: dict[str, Array]) -> Array:
        x = env[name]
        for axis in scaled:
            if axis in axes:
                x = x * np.expand_dims(env[f"{name}_{axis}"], 1 - axes.index(axis))
        return x

    return node, meaning


@given(st.sampled_from(SPECS), st.sets(st.sampled_from(ORDER)), st.sets(st.sampled_from(ORDER)))
def test_scales_moved_out_of_a_product_do_not_change_it(spec: str, left: set[Axis], right: set[Axis]) -> None:
    graph = Graph()
    a, b = spec.split("->")[0].split(",")
    x, x_value = operand(graph, "x", a, tuple(sorted(left)))
    y, y_value = operand(graph, "y", b, tuple(sorted(right)))
    product = graph.dot(spec, x, y)
    env = environment(topological([product, x, y]))
    np.testing.assert_allclose(value(product, env), np.einsum(spec, x_value(env), y_value(env)), rtol=1e-12)


def test_loaded_tiles_meet_as_they_are() -> None:
    """A gate that scales rows and a beta that scales columns stand behind the product, not before it."""
    graph = Graph()
    q, k, gate, beta = graph.load("q", ("t", "k")), graph.load("k", ("t", "k")), graph.load("gate", ("t",)), graph.load("beta", ("t",))
    score = graph.dot("tk,sk->ts", graph.mul(gate, q), graph.mul(beta, k))
    (product,) = [n for n in topological([score]) if isinstance(n.op, Dot)]
    assert product.args == (q, k)


def test_equal_work_is_one_node() -> None:
    graph = Graph()
    x, y, z = (graph.load(n, ("t", "k")) for n in "xyz")
    assert graph.mul(x, y) is graph.mul(y, x)
    assert graph.mul(x, y, z) is graph.mul(graph.mul(x, y), z)
    assert graph.dot("tk,sk->ts", x, y) is graph.dot("sk,rk->sr", x, y)
    assert graph.exp(x) is graph.exp(x)
    assert graph.mask(graph.mask(graph.dot("tk,sk->ts", x, y), "strict"), "strict") is graph.mask(graph.dot("tk,sk->ts", x, y), "strict")
    vector = graph.load("g", ("t",))
    assert graph.along(graph.along(vector)) is vector


def test_numbers_disappear() -> None:
    graph = Graph()
    zero, one, _ = graph.const(0.0), graph.const(1.0), graph.const(-1.0)
    x = graph.load("x", ("t", "k"))
    assert graph.add(x, zero) is x
    assert graph.mul(x, one) is x
    assert is_number(graph.mul(x, zero), 0.0)
    assert graph.neg(graph.neg(x)) is x
    assert is_number(graph.exp(zero), 1.0)
    assert graph.pow(x, 1.0) is x
    assert is_number(graph.dot("tk,sk->ts", x, zero), 0.0)
    assert is_number(graph.segment(x, 1, exclusive=True), 0.0)
    assert graph.segment(x, 1) is x
    minus = [n for n in topological([graph.mul(graph.const(2.0), x, graph.const(-1.0))]) if is_number(n)]
    assert [n.op.value for n in minus] == [-2.0]  # type: ignore[union-attr]


def test_a_sum_over_an_axis_that_is_not_there_is_refused() -> None:
    graph = Graph()
    with pytest.raises(ValueError, match="no axis v"):
        graph.sum(graph.load("x", ("t", "k")), "v")


@pytest.mark.parametrize("axis", ["v", "s", "t"])
def test_a_turned_sum_is_the_sum(axis: str) -> None:
    """sum_v c (x y) is turned into a sum over key channels: the same number, and no product over v is left."""
    graph = Graph()
    x, S, c = graph.load("x", ("t", "k")), graph.load("S", ("v", "k")), graph.load("c", ("t", "v"))
    k, score = graph.load("k", ("t", "k")), graph.load("w", ("t", "s"))
    if axis == "v":
        plain = graph.mul(c, graph.dot("tk,vk->tv", x, S))
    else:
        plain = graph.mul(score, graph.mask(graph.dot("tk,sk->ts", x, k), "strict"))
    turned, straight = graph.sum(plain, axis), graph.sum(plain, axis, rotate=False)  # type: ignore[arg-type]
    env = environment(topological([turned, straight]))
    assert turned is not straight
    np.testing.assert_allclose(value(turned, env), value(straight, env), rtol=1e-12)


def segments(x: Array, size: int, reverse: bool, exclusive: bool) -> Array:
    out = np.zeros_like(x)
    for t in range(len(x)):
        first, last = t // size * size, t // size * size + size
        rows = range(t + exclusive, last) if reverse else range(first, t + 1 - exclusive)
        out[t] = sum((x[s] for s in rows), start=np.zeros_like(x[0]))
    return out


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_segment_sum_stays_in_its_block(size: int, reverse: bool, exclusive: bool) -> None:
    graph = Graph()
    node = graph.segment(graph.load("x", ("t", "k")), size, reverse=reverse, exclusive=exclusive)
    env = environment(topological([node]))
    np.testing.assert_allclose(value(node, env), segments(env["x"], size, reverse, exclusive), rtol=1e-12, atol=1e-12)


def test_levels_and_diagonal_are_the_lower_triangle() -> None:
    """Halves of halves: every pair s < t is across exactly one middle."""
    graph = Graph()
    x = graph.load("x", ("t", "s"))
    below = graph.levels(graph.mask(x, "across"))
    env = {"x": np.ones(extent(("t", "s")))}
    np.testing.assert_array_equal(value(below, env), np.tril(env["x"], -1))
    np.testing.assert_array_equal(value(graph.mask(x, "causal"), env), np.tril(env["x"]))


def test_a_reset_between_two_tokens_cuts_them() -> None:
    """Decay by sums of finite parts and counts of resets: exact at g = -inf, where a difference of sums is not a number."""
    graph = Graph()
    g = graph.load("g", ("t",))
    total, count = (graph.segment(graph.map(fn, g), 8) for fn in ("finite", "resets"))
    decay = graph.decay((total, count), (total, count), strict=False)
    gate = np.array([-0.1, -0.2, -np.inf, -0.4, -0.5, -100.0, -0.7, -0.8])
    found = value(decay, {"g": gate})
    for t in range(8):
        for s in range(8):
            between = gate[s + 1 : t + 1]
            expected = 0.0 if s > t or (between < -87).any() else np.exp(between.sum())
            assert found[t, s] == pytest.approx(expected, rel=1e-12)


def numeric(loss: Callable[[dict[str, Array]], float], env: dict[str, Array], name: str, step: float = 1e-6) -> Array:
    """The gradient by central differences."""
    out = np.zeros_like(env[name])
    for place in np.ndindex(*out.shape):
        ends = []
        for sign in (1, -1):
            moved = env[name].copy()
            moved[place] += sign * step
            ends.append(loss({**env, name: moved}))
        out[place] = (ends[0] - ends[1]) / (2 * step)
    return out


def per_channel(graph: Graph, x: Node, y: Node, read_before: bool, write_before: bool, causal: bool = False) -> Node:
    """A score whose rows and whose gate all depend on x and y."""
    gate = graph.neg(graph.mul(graph.const(0.3), graph.mul(x, x)))
    places = {before: graph.segment(gate, 8, exclusive=before) for before in (False, True)}
    return graph.score(graph.mul(x, y), graph.add(x, y), (places[read_before],), (places[write_before],), places[False], causal=causal)


def shared(graph: Graph, x: Node, y: Node, read_before: bool, write_before: bool, causal: bool = False) -> Node:
    """The same under one decay for all channels, with a reset at each token whose row sums to less than -1."""
    token = graph.sum(x, "k")
    resets = graph.map("resets", graph.mul(graph.const(87.0), token))
    gate = graph.neg(graph.mul(graph.const(0.1), graph.mul(token, token)))
    places = {b: (graph.segment(gate, 8, exclusive=b), graph.segment(resets, 8, exclusive=b)) for b in (False, True)}
    return graph.score(graph.mul(x, y), graph.add(x, y), places[read_before], places[write_before], causal=causal)


def build_maps(graph: Graph, x: Node, y: Node) -> dict[str, Node]:
    square = graph.mul(x, x)
    positive = graph.add(square, graph.const(0.1))
    token, score = graph.sum(x, "k"), graph.dot("tk,sk->ts", x, y)
    small = graph.mul(graph.const(0.1), score)
    lower = graph.mask(small, "strict")
    return {
        "add": graph.add(x, y),
        "mul": graph.mul(x, y),
        "exp": graph.exp(x),
        "log": graph.map("log", positive),
        "sigmoid": graph.map("sigmoid", x),
        "softplus": graph.map("softplus", x),
        "tanh": graph.map("tanh", x),
        "pow": graph.pow(positive, -0.5),
        "root": graph.pow(positive, 0.5),
        "cube": graph.pow(x, 3.0),
        "finite": graph.map("finite", x),
        "expand": graph.expand(token, ("t", "k")),
        "sum": graph.sum(graph.mul(x, y), "t"),
        "along": graph.mul(graph.along(token), score),
        "segment": graph.segment(x, 4, reverse=True, exclusive=True),
        "causal": graph.mask(score, "causal"),
        "score": per_channel(graph, x, y, False, False),
        "score before": per_channel(graph, x, y, True, False),
        "score both before": per_channel(graph, x, y, True, True),
        "causal score": per_channel(graph, x, y, False, False, causal=True),
        "score under one decay": shared(graph, x, y, False, False),
        "score under one decay before": shared(graph, x, y, True, False),
        "causal score under one decay": shared(graph, x, y, True, True, causal=True),
        "diagonal": graph.mul(graph.diagonal(token), score),
        "take diagonal": graph.take_diagonal(score),
        "inverse": graph.inverse(lower),
        "solve": graph.dot("ts,sk->tk", graph.inverse(lower), y),
        "solve rows": graph.solve(graph.inverse(lower), graph.dot("tk,vk->tv", x, graph.load("S", ("v", "k")))),
        "solve square": graph.solve(graph.inverse(lower), graph.mask(score, "causal")),
    }


@pytest.mark.parametrize("name", build_maps(g := Graph(), g.load("x", ("t", "k")), g.load("y", ("t", "k"))))
def test_a_gradient_is_that_of_the_meaning(name: str) -> None:
    graph = Graph()
    x, y = graph.load("x", ("t", "k")), graph.load("y", ("t", "k"))
    node = build_maps(graph, x, y)[name]
    cotangent = graph.load("c", node.axes, "cotangent")
    found = gradients(graph, {node: cotangent}, [x, y])
    env = environment(topological([node, *found.values(), x, y, cotangent]))

    def loss(at: dict[str, Array]) -> float:
        return float(np.sum(value(node, at) * env["c"]))

    for leaf, label in ((x, "x"), (y, "y")):
        gradient = np.broadcast_to(value(found[leaf], env), env[label].shape)
        np.testing.assert_allclose(gradient, numeric(loss, env, label), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_of_a_product(spec: str) -> None:
    graph = Graph()
    a, b = spec.split("->")[0].split(",")
    (x, _), (y, _) = operand(graph, "x", a, ()), operand(graph, "y", b, ())
    node = graph.dot(spec, x, y)
    found = gradients(graph, {node: graph.load("c", node.axes, "cotangent")}, [x, y])
    env = environment(topological([node, *found.values()]))
    for leaf, label in ((x, "x"), (y, "y")):
        expected = numeric(lambda at: float(np.sum(value(node, at) * env["c"])), env, label)
        np.testing.assert_allclose(value(found[leaf], env), expected, rtol=1e-6, atol=1e-7)


def test_the_gradient_of_a_solve_has_no_inverse_of_its_own() -> None:
    """dL = dY U^T: one inverse in the graph, used plainly and transposed, never multiplied with itself."""
    graph = Graph()
    lower, y = graph.load("x", ("t", "s")), graph.load("y", ("t", "v"))
    inverse = graph.inverse(graph.mask(lower, "strict"))
    solved = graph.solve(inverse, y)
    found = gradients(graph, {solved: graph.load("c", ("t", "v"), "cotangent")}, [lower, y])
    for node in topological(found.values()):
        assert not (isinstance(node.op, Dot) and node.args.count(inverse) == 2)
        assert not (isinstance(node.op, Dot) and inverse in node.args and node.axes == ("t", "s"))


@pytest.mark.parametrize("name", ZOO)
def test_every_argument_stands_before_its_user(name: str) -> None:
    nodes = topological([tile_graph(name).d_start, *(n for _, n in tile_graph(name).d_inputs)])
    assert all(arg.index < node.index for node in nodes for arg in node.args)
    assert all(node.axes == tuple(dict.fromkeys(node.axes)) for node in nodes)
    assert not [n for n in nodes if isinstance(n.op, Map) and n.op.fn == "mul" and any(is_number(a, 1.0) for a in n.args)]


@pytest.mark.parametrize("path", BEHIND_NORMALIZE, ids=lambda path: path.stem)
def test_nothing_behind_normalize_knows_a_variant(path: Path) -> None:
    """No name of the zoo in code or in text, and no import of its definitions."""
    source = path.read_text(encoding="utf-8")
    assert not set(re.findall(r"[A-Za-z0-9_]+", source)) & (set(ZOO) - PROSE)
    tree = ast.parse(source)
    assert not {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)} & set(ZOO)
    assert not re.search(r"from (recgen\.|\.)zoo |from (recgen|\.) import .*\bzoo\b|import recgen\.zoo", source)


def test_what_is_behind_normalize_is_all_there() -> None:
    assert {"chunk", "emit", "graph", "lower", "schedule", "show", "tile", "vjp"} <= {path.stem for path in BEHIND_NORMALIZE}
    assert len(ZOO) >= 10
