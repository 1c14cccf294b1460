"""fuse: sums over key channels that a kernel only adds up become one sum of what they add: one exchange between threads. Part of emit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .graph import Graph
from .ops import Map, Node, Sum, product_factors, topological
from .schedule import Kernel


def fuse_sums(kernel: Kernel, graph: Graph) -> Kernel:
    """The kernel with c1 sum_k x + c2 sum_k y as sum_k (c1 x + c2 y), for numbers c and sums that nothing else uses."""
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
        sums = [(numbers, self.only_sum(core)) for numbers, core in terms]
        if sum(x is not None and x.axes == node.axes for _, x in sums) <= 1:
            return self.graph.again(node, found)
        inside = [self.graph.mul(*numbers, found[x.args[0].index]) for numbers, x in sums if x is not None and x.axes == node.axes]
        total = self.graph.make(Sum("k"), (self.graph.add(*inside),), node.axes)
        rest = [(n, core) for (n, core), (_, x) in zip(terms, sums, strict=True) if x is None or x.axes != node.axes]
        return self.graph.add(total, *(self.graph.mul(*numbers, found[core.index]) for numbers, core in rest))

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
            elif alone and self.only_sum(cores[0]) is not None:
                found.append(((*numbers, *before), cores[0]))
            else:
                found.append((numbers, arg))
        return found

    def only_sum(self, node: Node) -> Node | None:
        """The node, where it is a sum over key channels that nothing else uses."""
        is_sum = isinstance(node.op, Sum) and node.op.axis == "k" and node.index not in self.have
        return node if is_sum and self.uses[node.index] == 1 else None

    @staticmethod
    def over_keys(node: Node) -> bool:
        """Whether a number is made in the loop over key tiles, after which alone it is known."""
        return any(isinstance(n.op, Sum) for n in topological([node]))
