"""fuse: sums that a kernel only adds up become one sum of what they add. Part of emit.

Over key channels: one exchange between threads. Over the levels of a steep chunk: one tile to add up in, not one each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .graph import Graph
from .ops import Levels, Map, Node, Op, Sum, product_factors, topological
from .schedule import Kernel


def fuse_sums(kernel: Kernel, graph: Graph) -> Kernel:
    """The kernel with c1 sum x + c2 sum y as sum (c1 x + c2 y), for numbers c and sums of one kind that nothing else uses."""
    uses = Counter(a.index for n in kernel.computed() for a in n.args)
    uses.update(b.node.index for b in kernel.stores)
    have = frozenset(b.node.index for b in kernel.loads)
    work = _Fusion(graph, uses, have)
    found = graph.rewrite((b.node for b in kernel.stores), lambda n: n.index in have, work.rebuilt)
    return replace(kernel, stores=tuple(replace(b, node=found[b.node.index]) for b in kernel.stores))


@dataclass(frozen=True, slots=True)
class _Fusion:
    graph: Graph
    uses: Counter[int]
    have: frozenset[int]

    def rebuilt(self, node: Node, found: Mapping[int, Node]) -> Node:
        terms = self.terms(node, ()) if self.is_add(node) else []
        counts = Counter(core.op for _, core in terms if self.joins(node, core))
        fused: dict[Op, list[Node]] = {op: [] for op, count in counts.items() if count > 1}
        if not fused:
            return self.graph.again(node, found)
        rest = []
        for numbers, core in terms:
            if core.op in fused and self.joins(node, core):
                fused[core.op].append(self.graph.mul(*numbers, found[core.args[0].index]))
            else:
                rest.append(self.graph.mul(*numbers, found[core.index]))
        return self.graph.add(*(self.graph.make(op, (self.graph.add(*inside),), node.axes) for op, inside in fused.items()), *rest)

    def is_add(self, node: Node) -> bool:
        return isinstance(node.op, Map) and node.op.fn == "add" and node.index not in self.have

    def terms(self, node: Node, numbers: tuple[Node, ...]) -> list[tuple[tuple[Node, ...], Node]]:
        """The terms of a sum with the numbers before each; a sum inside is opened where nothing else uses it."""
        found: list[tuple[tuple[Node, ...], Node]] = []
        for arg in node.args:
            factors = list(product_factors(arg)) if arg.index not in self.have else [arg]
            before = tuple(f for f in factors if not f.axes and not self.over_keys(f))
            cores = [f for f in factors if f not in before]
            alone = self.uses[arg.index] == 1 and len(cores) == 1 and self.uses[cores[0].index] == 1
            if alone and self.is_add(cores[0]) and cores[0].axes == node.axes:
                found += self.terms(cores[0], (*numbers, *before))
            elif alone and self.is_sum(cores[0]):
                found.append(((*numbers, *before), cores[0]))
            else:
                found.append((numbers, arg))
        return found

    def joins(self, node: Node, core: Node) -> bool:
        """Whether the term of a sum can share the sum of others."""
        return self.is_sum(core) and core.axes == node.axes

    def is_sum(self, node: Node) -> bool:
        """Whether the node is a sum over key channels, or of key tiles over levels, that nothing else uses. Scores over levels add up over
        key tiles as well, each in its own loop."""
        sums = node.op == Sum("k") or (isinstance(node.op, Levels) and "k" in node.axes)
        return sums and node.index not in self.have and self.uses[node.index] == 1

    @staticmethod
    def over_keys(node: Node) -> bool:
        """Whether a number is made in the loop over key tiles, after which alone it is known."""
        return any(isinstance(n.op, Sum) for n in topological([node]))
