"""scores: scores under a decay, and what they give back, as matrix products. Part of emit.

A decay for all channels scales the product of the rows, entry by entry. A decay per channel stands inside the operands:
exp(read_t - write_s) is exp(read_t - G_m) exp(G_m - write_s) for any token m. Which m is right depends on the chunk, and each kernel that
has such scores is emitted twice:

even: the decay over either half of the chunk is within what the operands can hold. One product, anchored at the chunk's middle; of the
two exponents one is positive.
steep: halves of halves. The pairs across the middle of a block are anchored at that middle, in each of the blocks of 64, 32, ... 2 tokens:
both exponents are sums of log decays, never positive, and every gate is exact.

A program whose chunk is not of its kind does nothing. A kernel too large for the even form is emitted for steep chunks alone and takes
all for such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from .graph import Graph
from .ops import Node, Pull, Score, Segment, per_channel
from .schedule import Buffer, Falls, Kernel

HELD = 20  # products of cotangents: an even chunk's, [C, C], stay in shared memory through the loop over key tiles, 8 KB each


def kinds(kernel: Kernel) -> tuple[Kernel, ...]:
    """The kernel for each kind of chunk, where it makes a difference. A kernel with more products of cotangents than shared memory holds
    is written for steep chunks alone, and takes every chunk for one."""
    inside = kernel.computed()
    if not any(map(per_channel, inside)):
        return (kernel,)
    steep = replace(kernel, falls="steep")
    held = sum(isinstance(n.op, Pull) and not n.op.gate for n in inside)
    return (replace(kernel, falls="even"), steep) if held <= HELD else (steep,)


def expand(kernel: Kernel, graph: Graph) -> Kernel:
    """The kernel with every score and pull as matrix products, for chunks of its kind."""
    have = kernel.held()
    found = Expansion(graph, kernel.falls).expand(kernel.targets(), lambda n: n.index in have)

    def made(buffer: Buffer) -> Buffer:
        return replace(buffer, node=found[buffer.node.index])

    carry = None if kernel.carry is None else (kernel.carry[0], found[kernel.carry[1].index])
    last = kernel.last and (made(kernel.last) if kernel.last.node.index in found else kernel.last)
    return replace(kernel, stores=tuple(map(made, kernel.stores)), carry=carry, last=last)


@dataclass(slots=True)
class Expansion:
    """Rewrites nodes within one graph, so that what two of them share stays one. Without a kind, scores with a decay per channel stay."""

    graph: Graph
    kind: Falls | None

    def expand(self, targets: Iterable[Node], stop: Callable[[Node], bool]) -> dict[int, Node]:
        """What stands for each node, by index."""
        return self.graph.rewrite(targets, stop, self.expanded)

    def expanded(self, node: Node, found: Mapping[int, Node]) -> Node:
        if self.kind is None and per_channel(node):
            return self.graph.again(node, found)
        match node.op:
            case Score():
                return self.score(node.op, *(found[a.index] for a in node.args))
            case Pull():
                return self.pull(node.op, *(found[a.index] for a in node.args))
            case _:
                return self.graph.again(node, found)

    def score(self, op: Score, a: Node, kappa: Node, *decays: Node) -> Node:
        graph = self.graph
        if op.decay == "scalar":
            between = self.between(decays)
            score = graph.mul(between, graph.dot("tk,sk->ts", a, kappa))
            return score if op.causal or decays[0] is not decays[2] else graph.mask(score, "strict")
        to_read, to_write = self.anchored(decays)
        product = graph.dot("tk,sk->ts", self.rounded(a, to_read), self.rounded(kappa, to_write))
        if self.kind == "even":
            return graph.mask(product, "causal" if op.causal else "strict")
        below = graph.levels(graph.mask(product, "across"))
        return graph.add(below, graph.diagonal(graph.sum(graph.mul(a, kappa), "k"))) if op.causal else below

    def pull(self, op: Pull, c: Node, *rest: Node) -> Node:
        graph = self.graph
        rows, decays = rest[: 1 + op.gate], rest[1 + op.gate :]
        a, kappa = rows[0], rows[-1]  # one of them alone, where the other is not needed
        apart = graph.mask(c, "gapped") if op.touching and self.kind != "even" else c
        if op.decay == "scalar":
            seen = graph.mul(self.between(decays), apart)
            seen = graph.mask(seen, "strict") if decays[0] is decays[2] else seen
            return self.given(op, seen, a, kappa, graph.const(1.0), graph.const(1.0))
        seen = graph.mask(apart, "strict" if self.kind == "even" else "across")
        given = self.given(op, seen, a, kappa, *self.anchored(decays))
        return given if self.kind == "even" else graph.levels(given)

    def given(self, op: Pull, seen: Node, a: Node, kappa: Node, to_read: Node, to_write: Node) -> Node:
        """What one matrix of cotangents gives to a side, through rows that are decayed to an anchor."""
        graph = self.graph
        if op.side == "read":
            product, own, decay = graph.dot("ts,sk->tk", seen, self.rounded(kappa, to_write)), a, to_read
        else:
            product, own, decay = graph.dot("ts,tk->sk", seen, self.rounded(a, to_read)), kappa, to_write
        if not op.gate:
            return graph.mul(decay, product)
        gate = graph.mul(self.rounded(own, decay), product)
        return gate if op.decay == "key" else graph.sum(gate, "k")

    def between(self, decays: tuple[Node, ...]) -> Node:
        """exp(read_t - write_s), with a diagonal of 1 where readers and writers stand alike, and none otherwise."""
        read, read_resets, write, write_resets = decays
        decay = self.graph.decay((read, read_resets), (write, write_resets), strict=read is not write)
        return self.graph.name(decay, "decay")

    def rounded(self, row: Node, decay: Node) -> Node:
        """A decayed row, as precise as matrix operands are."""
        return self.graph.map("round", self.graph.mul(row, decay))

    def anchored(self, decays: tuple[Node, ...]) -> tuple[Node, Node]:
        """exp(read - G_m) and exp(G_m - write) for m the middle of the chunk, or of the blocks of the level at hand."""
        graph, (read, write, sums) = self.graph, decays
        if self.kind == "even":
            middle = graph.rows(sums, "half")
            to_read = graph.exp(graph.add(read, graph.neg(middle)))
            to_write = graph.exp(graph.add(middle, graph.neg(write)))
        else:
            to_read, to_write = self.to_middle(read, sums), self.to_middle(write, sums)
        alike = to_read is to_write
        return graph.name(to_read, "decay" if alike else "decay_read"), graph.name(to_write, "decay" if alike else "decay_write")

    def to_middle(self, place: Node, sums: Node) -> Node:
        """The decay between a token and the middle of its block: down from it in the upper half, up to it in the lower. Where a place
        stands alike to its own token's decay when it reads and when it is written to, one tile serves both halves."""
        graph = self.graph
        assert isinstance(place.op, Segment)
        after = not place.op.exclusive
        side = graph.side(upper_zero=not after, lower_zero=after)
        apart = graph.add(place, graph.neg(graph.rows(sums, "middle")))
        return graph.exp(graph.map("at_most_zero", graph.mul(side, apart)))
