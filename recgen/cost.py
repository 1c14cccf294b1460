"""What a tile operation costs: flops, bytes, seconds on a card. The schedule's cuts and `explain`'s floors come from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from .hardware import Hardware
from .ops import (
    Along,
    Const,
    Decay,
    Diagonal,
    Dot,
    Expand,
    Inverse,
    Levels,
    Load,
    Map,
    Mask,
    Node,
    Pull,
    Rows,
    Scatter,
    Score,
    Segment,
    Side,
    Sum,
    TakeDiagonal,
    Valid,
    Within,
    split_spec,
)

# Functions of the special function units.
SPECIAL = frozenset({"exp", "log", "log_retention", "sigmoid", "softplus", "tanh", "pow", "quotient"})


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of one chunk and head, and bytes of an operand element."""

    t: int = 64
    k: int = 128
    v: int = 128
    operand: int = 2

    def extent(self, axis: str) -> int:
        return {"t": self.t, "s": self.t, "k": self.k, "v": self.v}[axis]

    def count(self, node: Node) -> int:
        total = 1
        for axis in node.axes:
            total *= self.extent(axis)
        return total

    def bytes(self, node: Node) -> int:
        """Tiles are kept in the operand type, vectors in fp32."""
        return self.count(node) * (self.operand if len(node.axes) == 2 else 4)


def flops(node: Node, sizes: Sizes) -> int:
    """Multiply-adds counted twice, of matrix products alone; the inverse as its block merges, a score per channel as one product."""
    match node.op:
        case Dot(spec=spec):
            left, right, _ = split_spec(spec)
            extent = {**dict(zip(left, node.args[0].axes, strict=True)), **dict(zip(right, node.args[1].axes, strict=True))}
            total = 2
            for axis in extent.values():
                total *= sizes.extent(axis)
            return total
        case Inverse():
            return 4 * sizes.t**3
        case Score() | Pull(gate=False):
            return 2 * sizes.t * sizes.t * sizes.k
        case _:
            return 0


def seconds(node: Node, sizes: Sizes, hardware: Hardware) -> float:
    """Time of the operation on the whole card, per chunk and head, inside a kernel that has its arguments in registers."""
    count = sizes.count(node)
    exchange = hardware.barrier / hardware.multiprocessors
    match node.op:
        case Load() | Const() | Expand() | Along() | Side() | Levels():
            return 0.0
        case Dot():
            return flops(node, sizes) / (hardware.matmul * hardware.chained)
        case Inverse():
            return 8 * flops(node, sizes) / (hardware.matmul * hardware.chained)  # a chain of small products: latency, not rate
        case Map(fn=fn):
            return count / (hardware.special if fn in SPECIAL else hardware.lanes)
        case Rows():
            return 4 * count / (4 * hardware.bandwidth)  # out of the cache
        case Segment() | Scatter():
            return 8 * count / hardware.lanes + exchange
        case Score(decay=decay) | Pull(decay=decay):
            product = flops(node, sizes) / (hardware.matmul * hardware.chained)
            if decay == "scalar":
                return product + sizes.t**2 * (1 / hardware.special + 4 / hardware.lanes)
            return product + 2 * sizes.t * sizes.k / hardware.special + exchange
        case Decay():
            return count / hardware.special + 3 * count / hardware.lanes
        case Sum(axis=axis):
            return count * sizes.extent(axis) / hardware.lanes + exchange
        case Mask() | Valid() | Within() | Diagonal() | TakeDiagonal():
            return count / hardware.lanes
        case _:
            assert_never(node.op)
