"""fuse: a kernel whose sums over key channels are fused computes what it computed."""

from __future__ import annotations

import numpy as np
import pytest

from recgen.fuse import fuse_sums
from recgen.meaning import evaluate
from recgen.ops import Load, Node, Sum, topological
from recgen.schedule import Kernel
from recgen.scores import expand, falls
from tests.conftest import ZOO
from tests.stages import plan, tile_graph

SIZES = {"t": 64, "s": 64, "k": 5, "v": 3}


def kernels(name: str) -> list[Kernel]:
    """The parallel kernels of a zoo member, for each kind of chunk."""
    graph = tile_graph(name).graph
    every = [*plan(name).forward, *plan(name).backward]
    return [expand(kernel, graph, kind) for kernel in every if kernel.walk == "parallel" for kind in falls(kernel)]


def over_keys(kernel: Kernel) -> int:
    return sum(isinstance(n.op, Sum) and n.op.axis == "k" for n in kernel.computed())


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
        assert over_keys(fused) <= over_keys(kernel)
        plain = [b.node for b in kernel.stores]
        for wanted, found in zip(values(plain), values([b.node for b in fused.stores]), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max())


def test_what_is_only_added_up_is_one_sum() -> None:
    """The four sums of a gate's gradient, two readers' and two writers', are one."""
    (gradient,) = [k for k in kernels("gated_deltanet") if k.name == "gradient"]
    fused = fuse_sums(gradient, tile_graph("gated_deltanet").graph)
    assert over_keys(gradient) - over_keys(fused) >= 4
