"""fuse: a kernel whose sums over key channels are fused computes what it computed."""

from __future__ import annotations

import numpy as np
import pytest

from recgen.fuse import fuse_sums
from recgen.meaning import evaluate
from recgen.ops import Levels, Load, Node, Op, Sum, topological
from recgen.schedule import Kernel
from recgen.scores import expand, kinds
from tests.conftest import ZOO
from tests.stages import plan, tile_graph

SIZES = {"t": 64, "s": 64, "k": 5, "v": 3}


def kernels(name: str) -> list[Kernel]:
    """The parallel kernels of a zoo member, for each kind of chunk."""
    graph = tile_graph(name).graph
    every = [*plan(name).forward, *plan(name).backward]
    return [expand(each, graph) for kernel in every if kernel.walk == "parallel" for each in kinds(kernel)]


def count(kernel: Kernel, op: Op) -> int:
    return sum(n.op == op for n in kernel.computed())


def values(nodes: list[Node]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    leaves = {n.op.name: n.axes for n in topological(nodes) if isinstance(n.op, Load)}
    env = {name: random.uniform(0.1, 0.9, [SIZES[a] for a in axes]) for name, axes in sorted(leaves.items())}
    gates = {name: -x if name in ("g", "w", "log_gamma") else x for name, x in env.items()} | {"scale": np.float64(0.3)}
    found = evaluate(nodes, gates, SIZES)  # type: ignore[arg-type]
    return [found[n.index] for n in nodes]


@pytest.mark.parametrize("name", ZOO)
def test_fused_sums_are_the_sums(name: str) -> None:
    graph = tile_graph(name).graph
    for kernel in kernels(name):
        fused = fuse_sums(kernel, graph)
        for op in (Sum("k"), Levels()):
            assert count(fused, op) <= count(kernel, op)
        plain = [b.node for b in kernel.stores]
        for wanted, found in zip(values(plain), values([b.node for b in fused.stores]), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max())


def test_what_is_only_added_up_is_one_sum() -> None:
    """The four sums of a gate's gradient, two readers' and two writers', are one; so are those over the levels of a steep chunk."""
    for name, op in (("gated_deltanet", Sum("k")), ("dplr", Levels())):
        gradient = [k for k in kernels(name) if k.name == "gradient"][-1]
        fused = fuse_sums(gradient, tile_graph(name).graph)
        assert count(gradient, op) - count(fused, op) >= 4
