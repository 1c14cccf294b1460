"""levels: the scores with a decay per key channel, and what they give back, as matrix products. Part of emit.

exp(read_t - write_s) is exp(read_t - G_m) exp(G_m - write_s) for any token m; with both factors inside the operands, a score is a matrix
product. Which m is right depends on the chunk, and each kernel that has such scores is emitted twice:

even: the decay over either half of the chunk is within what the operands can hold. One product, anchored at the chunk's middle; of the
two exponents one is positive.
steep: halves of halves. The pairs across the middle of a block are anchored at that middle, in each of the blocks of 64, 32, ... 2 tokens:
both exponents are sums of log decays, never positive, and every gate is exact.

A program whose chunk is not of its kind does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .chunk import CHUNK
from .graph import Graph, Node, Pull, Score, Segment, topological
from .schedule import Kernel

Falls = Literal["even", "steep"]


def falls(kernel: Kernel) -> tuple[Falls | None, ...]:
    """The kinds of chunk that a kernel is emitted for, one by one: None where it makes no difference."""
    return ("even", "steep") if any(isinstance(n.op, Score | Pull) for n in kernel.computed()) else (None,)


def expand(kernel: Kernel, graph: Graph, kind: Falls | None) -> Kernel:
    """The kernel with every score and pull as matrix products for chunks of this kind."""
    if kind is None:
        return kernel
    have = {b.node.index for b in kernel.loads}
    work = _Expansion(graph, kind)
    found = work.expand((b.node for b in kernel.stores), lambda n: n.index in have)
    return replace(kernel, stores=tuple(replace(b, node=found[b.node.index]) for b in kernel.stores))


@dataclass(slots=True)
class _Expansion:
    graph: Graph
    kind: Falls

    def expand(self, targets: Iterable[Node], stop: Callable[[Node], bool]) -> dict[int, Node]:
        """What stands for each node, by index."""
        graph, found, line = self.graph, dict[int, Node](), self.graph.line
        for node in topological(targets, stop=stop):
            args = () if stop(node) else tuple(found[a.index] for a in node.args)
            graph.line = node.line
            match node.op:
                case Score() if not stop(node):
                    made = self.score(*args)
                case Pull() if not stop(node):
                    made = self.pull(node.op, *args)
                case _:
                    made = node if stop(node) or args == node.args else graph.make(node.op, args, node.axes)
            if made is not node and node.index in graph.names:
                graph.name(made, graph.names[node.index])
            found[node.index] = made
        graph.line = line
        return found

    def score(self, a: Node, kappa: Node, read: Node, write: Node, sums: Node) -> Node:
        graph, terms = self.graph, []
        for size in self.sizes():
            to_read, to_write = self.decays(read, write, sums, size)
            product = graph.dot("tk,sk->ts", self.rounded(a, to_read), self.rounded(kappa, to_write))
            terms.append(self.mask(product, size))
        return graph.add(*terms)

    def pull(self, op: Pull, c: Node, *rest: Node) -> Node:
        graph, terms = self.graph, []
        *rows, read, write, sums = rest
        a, kappa = rows[0], rows[-1]  # one of them alone, where the other is not needed
        reads = op.side == "read"
        for size in self.sizes():
            to_read, to_write = self.decays(read, write, sums, size)
            seen = self.mask(graph.mask(c, "gapped") if op.touching and self.kind == "steep" else c, size)
            if reads:
                given, own, decay = graph.dot("ts,sk->tk", seen, self.rounded(kappa, to_write)), a, to_read
            else:
                given, own, decay = graph.dot("ts,tk->sk", seen, self.rounded(a, to_read)), kappa, to_write
            terms.append(graph.mul(self.rounded(own, decay) if op.gate else decay, given))
        return graph.add(*terms)

    def sizes(self) -> list[int]:
        """Half the sizes of the blocks: the chunk alone, or all from the chunk to two tokens."""
        return [CHUNK // 2 >> i for i in range(CHUNK.bit_length() - 1)] if self.kind == "steep" else [0]

    def mask(self, x: Node, size: int) -> Node:
        return self.graph.mask(x, "level", size) if size else self.graph.mask(x, "strict")

    def rounded(self, row: Node, decay: Node) -> Node:
        """A decayed row, as precise as matrix operands are."""
        return self.graph.map("round", self.graph.mul(row, decay))

    def decays(self, read: Node, write: Node, sums: Node, size: int) -> tuple[Node, Node]:
        """exp(read - G_m) and exp(G_m - write) for m the middle of the blocks of 2 size tokens; size 0: of the chunk."""
        graph = self.graph
        if not size:
            middle = graph.rows(sums, "half")
            to_read = graph.exp(graph.add(read, graph.neg(middle)))
            to_write = graph.exp(graph.add(middle, graph.neg(write)))
            return graph.name(to_read, "decay_read"), graph.name(to_write, "decay_write")
        both = "decay" if read is write else ""
        to_read, to_write = self.to_middle(read, sums, size), self.to_middle(write, sums, size)
        return graph.name(to_read, f"{both or 'read'}_{size}"), graph.name(to_write, f"{both or 'write'}_{size}")

    def to_middle(self, place: Node, sums: Node, size: int) -> Node:
        """The decay between a token and the middle of its block: down from it in the upper half, up to it in the lower. Where a place
        stands alike to its own token's decay when it reads and when it is written to, one tile serves both halves."""
        graph = self.graph
        assert isinstance(place.op, Segment)
        after = not place.op.exclusive
        side = graph.side(size, upper_zero=not after, lower_zero=after)
        apart = graph.add(place, graph.neg(graph.rows(sums, "middle", size)))
        return graph.exp(graph.map("at_most_zero", graph.mul(side, apart)))
