"""ops: the tile operations: what a node of the tile graph can be.

Axes: t (token of the chunk), s (a second, earlier token of the same chunk), k (key channel), v (value channel).
A node says what is computed; which kernel computes it, in which layout and from which memory, is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Axis = Literal["t", "s", "k", "v"]
Axes = tuple[Axis, ...]
MaskKind = Literal["strict", "causal", "gapped", "across"]
ORDER: Axes = ("t", "s", "v", "k")  # canonical order of the axes of a tile


@dataclass(frozen=True, slots=True)
class Load:
    """A tile that comes from memory: an input, the state at the start, or a cotangent from outside."""

    name: str
    role: Literal["input", "state", "cotangent"]


@dataclass(frozen=True, slots=True)
class Const:
    """A number, or a keyword argument of the op (`scale`)."""

    value: float | str


@dataclass(frozen=True, slots=True)
class Map:
    """An elementwise function of its arguments, broadcast over the axes that they lack."""

    fn: str
    exponent: float = 1.0  # of fn "pow" alone


@dataclass(frozen=True, slots=True)
class Expand:
    """The same value along further axes."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum over one axis."""

    axis: Axis


@dataclass(frozen=True, slots=True)
class Along:
    """A vector over t seen as a vector over s, or back."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The cumulative sum over t inside blocks of `size` tokens: no sum ever crosses a block, so nothing has to be subtracted."""

    size: int
    reverse: bool  # from the block's end backward
    exclusive: bool  # without the own token


@dataclass(frozen=True, slots=True)
class Rows:
    """The row of x at another token: for each token the last of its block's lower half (middle), or one for all, without a t axis: the last
    of the chunk's first half (half), the last of the chunk (last).

    x has to be in memory: rows are read there.
    """

    kind: Literal["middle", "half", "last"]


@dataclass(frozen=True, slots=True)
class Scatter:
    """A row as the chunk's last, zeros above it: the adjoint of Rows."""


@dataclass(frozen=True, slots=True)
class Side:
    """+1 for tokens in the upper half of their block, -1 in the lower; 0 for the first of the upper half (upper_zero) or the last of the
    lower half (lower_zero) where nothing can lie between the token and the middle."""

    upper_zero: bool
    lower_zero: bool


@dataclass(frozen=True, slots=True)
class Mask:
    """Keeps entries (t, s) with s < t (strict), s <= t (causal), s < t - 1 (gapped), or t in the upper and s in the lower half of one block
    (across)."""

    kind: MaskKind


@dataclass(frozen=True, slots=True)
class Levels:
    """The sum of its argument over the levels of a chunk: its blocks of 2, 4, 8, ... tokens, up to the chunk itself. Every pair s < t is
    across the middle of one block of one level. `Rows` of a middle, `Side` and a mask `across` speak of the blocks of the level at hand,
    and stand below a Levels."""


@dataclass(frozen=True, slots=True)
class Valid:
    """Zero on the padding rows of a ragged last chunk."""


@dataclass(frozen=True, slots=True)
class Within:
    """Zero on the padding of a tile behind the last channel, where inputs load as 0 but not every function of them is."""

    axis: Axis


@dataclass(frozen=True, slots=True)
class Decay:
    """exp(read_t - write_s) where s <= t (strict: s < t) and no reset lies between; arguments: read sum, read resets, write sum, write
    resets."""

    strict: bool


@dataclass(frozen=True, slots=True)
class Score:
    """(a_t . kappa_s) under the decay between t and s, at the pairs s < t; causal: and a_t . kappa_t at s = t.

    decay "scalar": exp(read_t - write_s) where no reset lies between, one for all channels. Arguments: a, kappa, the cumulative log decay
    and the resets where a reads, and those where kappa is written. "key": exp(read_t - write_s) in every key channel. Arguments: a, kappa,
    the log decay where a reads, where kappa is written, and at the end of each token. Kernels compute both as matrix products; how many,
    with a decay per channel, depends on how steeply it falls (scores.py).
    touching: no decay lies between a token and the next, for a reader before its own and a writer after.
    """

    decay: Literal["scalar", "key"]
    causal: bool
    touching: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """What the cotangent c of a Score gives back through its pairs s < t: to a (read), sum_s c_ts exp(read_t - write_s) kappa_s, [t, k]; to
    kappa (write) likewise.

    gate: times the reader's or the writer's own row, over the channels that share a decay: the gradient of `read`, or of `write` but for
    its sign. Then every pair stands in both with one value, bit by bit: what they give each other leaves nothing in a sum over both.
    touching: pairs of neighbours, which no decay lies between, do not count. Arguments: c, the rows (kappa; a; with gate both), and the log
    decays of the Score.
    """

    decay: Literal["scalar", "key"]
    side: Literal["read", "write"]
    gate: bool
    touching: bool


@dataclass(frozen=True, slots=True)
class Diagonal:
    """A vector over t as the diagonal of a (t, s) matrix."""


@dataclass(frozen=True, slots=True)
class TakeDiagonal:
    """The diagonal of a (t, s) matrix, as a vector over t."""


@dataclass(frozen=True, slots=True)
class Inverse:
    """(I - L)^-1 of a strictly lower triangular L."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A matrix product; letters name the axes of the two operands and of the result, e.g. "ts,sv->tv"."""

    spec: str
    solve: bool = False  # the first operand is an Inverse: its gradient goes to L, through dL = dY E^T


Op = (
    Load
    | Const
    | Map
    | Expand
    | Sum
    | Along
    | Segment
    | Rows
    | Scatter
    | Side
    | Mask
    | Levels
    | Valid
    | Within
    | Decay
    | Score
    | Pull
    | Diagonal
    | TakeDiagonal
    | Inverse
    | Dot
)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One tile value. Compared by identity: the Graph that made it keeps equal nodes one."""

    op: Op
    args: tuple[Node, ...]
    axes: Axes
    line: int
    index: int  # order of creation: arguments come before what uses them

    def __repr__(self) -> str:
        return f"%{self.index}"


def letters(node: Node) -> str:
    return "".join(node.axes)


def order_axes(axes: Iterable[Axis]) -> Axes:
    present = set(axes)
    return tuple(a for a in ORDER if a in present)


def topological(targets: Iterable[Node], stop: Callable[[Node], bool] = lambda n: False) -> tuple[Node, ...]:
    """Everything that `targets` need, arguments first, in order of creation; nothing behind a node where `stop` holds."""
    seen: dict[int, Node] = {}
    pending = list(targets)
    while pending:
        node = pending.pop()
        if node.index in seen:
            continue
        seen[node.index] = node
        if not stop(node):
            pending.extend(node.args)
    return tuple(seen[i] for i in sorted(seen))


def levelled(nodes: Iterable[Node]) -> frozenset[int]:
    """Which of the nodes, arguments first, differ from level to level."""
    found: set[int] = set()
    for node in nodes:
        match node.op:
            case Side() | Rows(kind="middle") | Mask(kind="across"):
                found.add(node.index)
            case Levels():
                pass
            case _ if any(a.index in found for a in node.args):
                found.add(node.index)
    return frozenset(found)


def product_factors(node: Node) -> Iterator[Node]:
    """The factors of a product, nested products opened."""
    if isinstance(node.op, Map) and node.op.fn == "mul":
        for arg in node.args:
            yield from product_factors(arg)
    else:
        yield node


def split_spec(spec: str) -> tuple[str, str, str]:
    operands, out = spec.split("->")
    left, right = operands.split(",")
    return left, right, out


def per_channel(node: Node) -> bool:
    """Whether it is a score, or a gradient through one, with a decay of its own in every key channel."""
    return isinstance(node.op, Score | Pull) and node.op.decay == "key"


def is_number(node: Node, value: float | None = None) -> bool:
    if not isinstance(node.op, Const) or isinstance(node.op.value, str):
        return False
    return value is None or node.op.value == value
