"""scores: a score per channel and what it gives back, as matrix products of either kind, mean what the one node means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from recgen.chunk import chunk
from recgen.graph import Graph
from recgen.meaning import evaluate
from recgen.ops import Dot, Levels, Node, Pull, Score, levelled, topological
from recgen.schedule import Falls, schedule
from recgen.scores import Expansion, expand, kinds
from recgen.tile import tile
from tests.conftest import ZOO
from tests.stages import Array, form_of, plan, tile_graph
from tests.strategies import CROWDED

T, K = 64, 3
KINDS: tuple[Falls, ...] = ("even", "steep")
BEFORE = [(False, False), (True, False), (True, True), (False, True)]  # whether the reader, the writer stands before its own decay
PER_CHANNEL = {"gla", "rwkv6", "kda", "dplr", "rwkv7"}
GATES: dict[str, Callable[[np.random.Generator], Array]] = {
    "0": lambda random: np.zeros((T, K)),
    "-0.5": lambda random: -0.5 * random.uniform(0.5, 1.5, (T, K)),
    "-5": lambda random: -5.0 * random.uniform(0.5, 1.5, (T, K)),
    "mixed": lambda random: random.choice([0.0, -1e-3, -0.5, -2.5, -20.0, -87.0], (T, K)),
}


def score(graph: Graph, read_before: bool, write_before: bool, parameter: bool = False) -> Node:
    gate = graph.load("g", ("t", "k"))
    place = {before: graph.segment(gate, T, exclusive=before) for before in (False, True)}
    a = graph.load("a", ("k",) if parameter else ("t", "k"))
    return graph.score(a, graph.load("kappa", ("t", "k")), (place[read_before],), (place[write_before],), place[False])


def everything(graph: Graph, made: Node) -> list[Node]:
    """A score and all that it gives back; the cotangent is scaled over t, over s, and by a number."""
    scales = graph.load("tau", ("t",)), graph.along(graph.load("sigma", ("t",))), graph.const(-0.5)
    c = graph.mul(*scales, graph.load("c", ("t", "s")))
    return [made, *(graph.pull(side, made, c, gate=gate) for side in ("read", "write") for gate in (False, True))]


def environment(gate: str, parameter: bool = False) -> dict[str, Array]:
    random = np.random.default_rng(3)
    shapes = {"a": (K,) if parameter else (T, K), "kappa": (T, K), "tau": (T,), "sigma": (T,), "c": (T, T)}
    return {name: random.normal(size=shape) for name, shape in shapes.items()} | {"g": GATES[gate](random)}


@pytest.mark.parametrize("before", BEFORE, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_a_steep_chunk(gate: str, before: tuple[bool, bool]) -> None:
    """Every gate, whatever it is."""
    graph = Graph()
    nodes = everything(graph, score(graph, *before))
    made = Expansion(graph, "steep").expand(nodes, lambda n: False)
    found = evaluate([*nodes, *made.values()], environment(gate), {"t": T, "k": K, "v": 1})
    for node in nodes:
        wanted = found[node.index]
        np.testing.assert_allclose(found[made[node.index].index], wanted, rtol=1e-10, atol=1e-12 * np.abs(wanted).max())


@pytest.mark.parametrize("before", BEFORE, ids=str)
@pytest.mark.parametrize("gate", ["0", "-0.5", "-5"])
def test_an_even_chunk(gate: str, before: tuple[bool, bool]) -> None:
    """The score and the rows as the node means them; of the gates, what both sides together leave in a sum from the end of the chunk."""
    graph = Graph()
    nodes = everything(graph, score(graph, *before))
    made = Expansion(graph, "even").expand(nodes, lambda n: False)
    found = evaluate([*nodes, *made.values()], environment(gate), {"t": T, "k": K, "v": 1})
    pairs = [(found[n.index], found[made[n.index].index]) for n in nodes]
    whole, read, read_gate, write, write_gate = pairs
    for wanted, got in (whole, read, write):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12 * np.abs(wanted).max())

    def per_gate(side: int) -> Array:
        """d g_j = the sum over what comes at j or later; a place before its own decay does not hold it."""
        total = np.zeros((T, K))
        for x, exclusive in ((read_gate[side], before[0]), (-write_gate[side], before[1])):
            back = np.cumsum(x[::-1], 0)[::-1]
            total += np.concatenate([back[1:], np.zeros((1, K))]) if exclusive else back
        return total

    wanted = per_gate(0)
    np.testing.assert_allclose(per_gate(1), wanted, atol=1e-10 * max(1.0, np.abs(read_gate[1]).max()))


def test_a_parameter_reads_in_every_row() -> None:
    graph = Graph()
    nodes = everything(graph, score(graph, False, False, parameter=True))
    env = environment("-0.5", parameter=True)
    for kind in KINDS:
        made = Expansion(graph, kind).expand(nodes, lambda n: False)
        found = evaluate([*nodes, *made.values()], env, {"t": T, "k": K, "v": 1})
        for node in nodes:
            np.testing.assert_allclose(found[made[node.index].index], found[node.index], rtol=1e-9, atol=1e-9)


def test_one_product_for_the_chunk_or_one_for_all_its_levels() -> None:
    graph = Graph()
    made = score(graph, False, False)
    nodes = {k: topological([Expansion(graph, k).expand([made], lambda n: False)[made.index]]) for k in KINDS}
    for kind, found in nodes.items():
        (product,) = [n for n in found if isinstance(n.op, Dot)]
        assert sum(isinstance(n.op, Levels) for n in found) == (kind == "steep")
        assert (product.index in levelled(found)) == (kind == "steep")
        assert found[-1].index not in levelled(found)


def test_what_both_sides_are_given_is_rounded_alike() -> None:
    """The reader's row times what it is given, and the writer's, hold the same operands: the products cancel to the last bit."""
    graph = Graph()
    made = score(graph, False, False)
    c = graph.load("c", ("t", "s"))
    read, write = (graph.pull(side, made, c, gate=True) for side in ("read", "write"))
    even = Expansion(graph, "even").expand([read, write], lambda n: False)
    factors = [even[n.index].args for n in (read, write)]
    rows = [next(f for f in fs if not isinstance(f.op, Dot)) for fs in factors]
    products = [next(f for f in fs if isinstance(f.op, Dot)) for fs in factors]
    assert rows[0] in products[1].args
    assert rows[1] in products[0].args
    assert products[0].args[0] is products[1].args[0]  # and one masked cotangent


@pytest.mark.parametrize("name", ZOO)
def test_kernels_of_two_kinds(name: str) -> None:
    """A gate per channel makes two kernels of each that has scores; no scan is one of them, and nothing of the rest is done twice."""
    schedule, graph = plan(name), tile_graph(name).graph
    kernels = [*schedule.forward, *schedule.backward]
    two = [k.name for k in kernels if len(kinds(k)) == 2]
    assert two == (["prepare", "gradient"] if name in PER_CHANNEL else [])
    for kernel in kernels:
        for each in kinds(kernel):
            made = expand(each, graph)
            assert [b.name for b in made.stores] == [b.name for b in kernel.stores]
            assert made.loads == kernel.loads
            assert not [n for n in made.computed() if isinstance(n.op, Score | Pull)]


def test_a_crowded_kernel_is_for_steep_chunks_alone() -> None:
    """What an even chunk holds in shared memory through its loop would not fit."""
    kernels = schedule(tile(chunk(form_of(CROWDED)))).backward
    assert [k.name for k in kernels if [each.falls for each in kinds(k)] == ["steep"]] == ["gradient"]
