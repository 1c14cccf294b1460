"""graph: builds the tile graph, hash-consed so that equal work is one node, and simplifies on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from .ops import (
    Along,
    Axes,
    Axis,
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
    MaskKind,
    Node,
    Op,
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
    is_number,
    order_axes,
    product_factors,
    split_spec,
    topological,
)


@dataclass(slots=True)
class Graph:
    """Builds nodes; simplifies on the way, and only lets valid ones through."""

    table: dict[tuple[object, ...], Node] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    line: int = 0  # the spec line that is being translated

    def make(self, op: Op, args: tuple[Node, ...], axes: Axes) -> Node:
        key = (op, tuple(a.index for a in args), axes)
        node = self.table.get(key)
        if node is None:
            node = Node(op, args, axes, self.line, len(self.table))
            self.table[key] = node
            self.nodes.append(node)
        return node

    @contextmanager
    def at(self, line: int) -> Iterator[None]:
        """Inside, nodes are made for this line of the spec."""
        before, self.line = self.line, line
        yield
        self.line = before

    def rewrite(
        self, targets: Iterable[Node], stop: Callable[[Node], bool], rule: Callable[[Node, Mapping[int, Node]], Node]
    ) -> dict[int, Node]:
        """What stands for each node that the targets need, by index: what `rule` makes of the node and of what stands for those before it.
        A node where `stop` holds stays. Lines and names carry over, and what two nodes share stays one."""
        found: dict[int, Node] = {}
        for node in topological(targets, stop=stop):
            with self.at(node.line):
                made = found[node.index] = node if stop(node) else rule(node, found)
            if made is not node and node.index in self.names:
                self.name(made, self.names[node.index])
        return found

    def again(self, node: Node, found: Mapping[int, Node]) -> Node:
        """The node's operation on what stands for its arguments."""
        args = tuple(found[a.index] for a in node.args)
        return node if args == node.args else self.make(node.op, args, node.axes)

    def name(self, node: Node, name: str) -> Node:
        """Suggests how the value is called where it is printed; the first suggestion stays."""
        if not isinstance(node.op, Load | Const):
            self.names.setdefault(node.index, name)
        return node

    # leaves

    def load(self, name: str, axes: Axes, role: Literal["input", "state", "cotangent"] = "input") -> Node:
        return self.make(Load(name, role), (), axes)

    def const(self, value: float | str) -> Node:
        return self.make(Const(float(value) if not isinstance(value, str) else value), (), ())

    # elementwise

    def map(self, fn: str, *args: Node, exponent: float = 1.0) -> Node:
        axes = order_axes(a for arg in args for a in arg.axes)
        args = tuple(a.args[0] if isinstance(a.op, Expand) and _covered(a, args, axes) else a for a in args)
        return self.make(Map(fn, exponent), args, axes)

    def add(self, *args: Node) -> Node:
        terms = [a for a in args if not is_number(a, 0.0)]
        if not terms:
            return self.const(0.0)
        total = terms[0]
        for term in terms[1:]:
            total = self.map("add", total, term)
        return total

    def neg(self, x: Node) -> Node:
        return self.mul(self.const(-1.0), x)

    def mul(self, *args: Node) -> Node:
        """A product; numbers are collected in front, and a product that already exists is used again."""
        number, rest = 1.0, []
        for factor in (f for a in args for f in _open_numbers(a)):
            if is_number(factor):
                assert isinstance(factor.op, Const) and isinstance(factor.op.value, float)
                number *= factor.op.value
            else:
                rest.append(factor)
        if number == 0.0:
            return self.const(0.0)
        rest.sort(key=lambda n: (len(n.axes), n.index))
        result = rest[0] if rest else self.const(number)
        for factor in rest[1:]:
            result = self._mul(result, factor)
        return result if number == 1.0 or not rest else self._mul(self.const(number), result)

    def _mul(self, x: Node, y: Node) -> Node:
        if isinstance(x.op, Map) and x.op.fn == "mul":
            for kept, other in (x.args, x.args[::-1]):
                known = self.table.get(_product_key(kept, y))
                if known is not None and not isinstance(kept.op, Const):
                    return self.map("mul", known, other)
        first = (not is_number(x), x.index) <= (not is_number(y), y.index)
        return self.map("mul", x, y) if first else self.map("mul", y, x)

    def pow(self, x: Node, exponent: float) -> Node:
        return x if exponent == 1.0 else self.map("pow", x, exponent=exponent)

    def exp(self, x: Node) -> Node:
        return self.const(1.0) if is_number(x, 0.0) else self.map("exp", x)

    def expand(self, x: Node, axes: Axes) -> Node:
        axes = order_axes((*x.axes, *axes))
        return x if axes == x.axes else self.make(Expand(), (x,), axes)

    # along an axis

    def sum(self, x: Node, axis: Axis, *, rotate: bool = True) -> Node:
        """The sum over an axis; factors without the axis come out of it.

        With `rotate`, sum_v c (x y) is turned into sum_k x (c y) and the like, until the sum runs over key channels: the product that then
        stands inside is one that the gradients of x and y need anyway.
        """
        if axis not in x.axes:
            raise ValueError(f"no axis {axis} in {x.axes}")
        factors = list(product_factors(x))
        inside = [f for f in factors if axis in f.axes]
        outside = [f for f in factors if axis not in f.axes]
        covered = {a for f in (*inside, *outside) for a in f.axes} - {axis} == {a for f in inside for a in f.axes if a != axis} | {
            a for f in outside for a in f.axes
        }
        if outside and covered:
            return self.mul(*outside, self.sum(self.mul(*inside), axis, rotate=rotate))
        if rotate and axis != "k":
            turned = self._rotate(inside, axis)
            if turned is not None:
                return turned
        return self.make(Sum(axis), (x,), tuple(a for a in x.axes if a != axis))

    def _rotate(self, factors: list[Node], axis: Axis, fixed: int = 0) -> Node | None:
        """sum over `axis` of c * Dot(x, y), as a sum over the axis that the Dot contracts; the first `fixed` factors belong to c."""
        for i, factor in enumerate(factors):
            others = factors[:i] + factors[i + 1 :]
            if not others or i < fixed or not _has_product(factor):
                continue
            if isinstance(factor.op, Map) and factor.op.fn == "add":
                return self.add(*(self.sum(self.mul(*others, self.expand(term, factor.axes)), axis) for term in factor.args))
            if isinstance(factor.op, Diagonal):
                own = self.mul(self.take_diagonal(self.mul(*others)), factor.args[0])
                return own if axis == "s" else self.along(own)
            if isinstance(factor.op, Mask):  # the mask may stand on c as well
                masked = self.mask(self.mul(*others), factor.op.kind)
                turned = self._rotate([masked, *product_factors(factor.args[0])], axis, fixed=1)
                if turned is not None:
                    return turned
                continue
            if isinstance(factor.op, Score):
                c, (a, kappa) = self.expand(self.mul(*others), factor.axes), factor.args[:2]
                diagonal = self.own(factor, c, self.sum(self.mul(a, kappa), "k"))
                if axis == "s":
                    return self.add(self.sum(self.mul(a, self.pull("read", factor, c)), "k"), diagonal)
                return self.along(self.add(self.sum(self.mul(kappa, self.pull("write", factor, c)), "k"), diagonal))
            if not isinstance(factor.op, Dot) or factor.op.solve or "k" in factor.axes:
                continue
            if axis != "v" and not any("k" in a.axes for a in factor.args):
                continue
            left, right, out = split_spec(factor.op.spec)
            summed = out[factor.axes.index(axis)]
            stay, mine, moved, theirs = (
                (factor.args[0], left, factor.args[1], right) if summed in right else (factor.args[1], right, factor.args[0], left)
            )
            rest = self.expand(self.mul(*others), factor.axes)
            contracted = next(c for c in left if c in right and c not in out)
            product = self.dot(f"{out},{theirs}->{mine}", rest, moved)
            result = self.sum(self.mul(stay, product), stay.axes[mine.index(contracted)])
            want = tuple(a for a in factor.axes if a != axis)
            return result if result.axes == want else self.along(result)
        return None

    def along(self, x: Node) -> Node:
        """A vector over t as one over s, or back; a tile without either stays as it is."""
        if isinstance(x.op, Along):
            return x.args[0]
        if isinstance(x.op, Map) and x.op.fn == "mul" and all(isinstance(a.op, Along) or not {"t", "s"} & set(a.axes) for a in x.args):
            return self.mul(*(self.along(a) for a in x.args))
        swap: dict[Axis, Axis] = {"t": "s", "s": "t"}
        axes = order_axes(swap.get(a, a) for a in x.axes)
        return x if axes == x.axes else self.make(Along(), (x,), axes)

    def segment(self, x: Node, size: int, *, reverse: bool = False, exclusive: bool = False) -> Node:
        if size == 1:
            return self.const(0.0) if exclusive else x
        return self.make(Segment(size, reverse, exclusive), (x,), x.axes)

    def rows(self, x: Node, kind: Literal["middle", "half", "last"]) -> Node:
        return self.make(Rows(kind), (x,), x.axes if kind == "middle" else tuple(a for a in x.axes if a != "t"))

    def scatter(self, x: Node) -> Node:
        return self.make(Scatter(), (x,), order_axes(("t", *x.axes)))

    def side(self, *, upper_zero: bool, lower_zero: bool) -> Node:
        return self.make(Side(upper_zero, lower_zero), (), ("t",))

    def mask(self, x: Node, kind: MaskKind) -> Node:
        if x.op == Mask(kind) or is_number(x, 0.0) or (isinstance(x.op, Score) and kind in ("strict", "causal")):
            return x
        if kind == "across" and isinstance(x.op, Mask) and x.op.kind in ("strict", "causal"):
            return self.mask(x.args[0], kind)  # what is across a middle is below the diagonal
        core, scales = self.split_scales(x) if kind == "across" else (x, [])
        if scales:  # one masked tile serves however it is scaled
            return self.mul(*scales, self.mask(core, kind))
        return self.make(Mask(kind), (x,), ("t", "s"))

    def levels(self, x: Node) -> Node:
        return self.make(Levels(), (x,), x.axes)

    def valid(self, x: Node) -> Node:
        return self.make(Valid(), (x,), x.axes)

    def within(self, x: Node, axis: Axis) -> Node:
        return self.make(Within(axis), (x,), x.axes)

    def decay(self, read: tuple[Node, Node], write: tuple[Node, Node], *, strict: bool) -> Node:
        apart = strict and read != write  # at s = t the exponent is positive then; otherwise it is 0, and one matrix serves both masks
        weight = self.make(Decay(apart), (*read, *write), ("t", "s"))
        return self.mask(weight, "strict") if strict and not apart else weight

    def score(self, a: Node, kappa: Node, read: tuple[Node, ...], write: tuple[Node, ...], *sums: Node, causal: bool = False) -> Node:
        """read, write: a log decay [t] and its resets, or a log decay [t, k]; then `sums` as well."""
        before, after = (isinstance(x[0].op, Segment) and x[0].op.exclusive for x in (read, write))
        op = Score("key" if sums else "scalar", causal, before and not after)
        return self.make(op, (a, kappa, *read, *write, *sums), ("t", "s"))

    def pull(self, side: Literal["read", "write"], score: Node, c: Node, *, gate: bool = False) -> Node:
        """What the cotangent c of a Score gives back. A scale of c over t goes to the reader's rows and one over s to the writer's, and
        comes out where those are what is asked for: both sides then share one c."""
        assert isinstance(score.op, Score)
        a, kappa, *decays = score.args
        core, scales = self.split_scales(c)
        if isinstance(core.op, Mask) and core.op.kind in ("strict", "causal"):
            core = core.args[0]
        numbers = [f for f in scales if not f.axes]
        over_t, over_s = [f for f in scales if f.axes == ("t",)], [self.along(f) for f in scales if f.axes == ("s",)]
        a, kappa = self.mul(*over_t, a), self.mul(*over_s, kappa)
        rows = (a, kappa) if gate else ((kappa,) if side == "read" else (a,))
        own = [] if gate else (over_t if side == "read" else over_s)
        op = Pull(score.op.decay, side, gate, gate and score.op.touching)
        axes: Axes = ("t",) if gate and op.decay == "scalar" else ("t", "k")
        return self.mul(*numbers, *own, self.make(op, (core, *rows, *decays), axes))

    def own(self, score: Node, c: Node, row: Node) -> Node:
        """What the cotangent of a causal Score gives back through s = t, where `row` is the other of the two rows that meet."""
        assert isinstance(score.op, Score)
        return self.mul(self.take_diagonal(c), row) if score.op.causal else self.const(0.0)

    def diagonal(self, x: Node) -> Node:
        return self.make(Diagonal(), (x,), ("t", "s"))

    def take_diagonal(self, x: Node) -> Node:
        core, scales = self.split_scales(x)
        if scales:
            return self.mul(*(self.along(f) if f.axes == ("s",) else f for f in scales), self.take_diagonal(core))
        return self.make(TakeDiagonal(), (x,), ("t",))

    # matrices

    def inverse(self, x: Node) -> Node:
        return self.make(Inverse(), (x,), ("t", "s"))

    def solve(self, inverse: Node, y: Node) -> Node:
        """(I - L)^-1 y."""
        return self.dot("tr,rs->ts" if y.axes == ("t", "s") else "ts,sv->tv", inverse, y, solve=True)

    def dot(self, spec: str, x: Node, y: Node, *, solve: bool = False) -> Node:
        """The matrix product `spec`. Row and column scales are moved out of the operands, so that loaded tiles meet the tensor cores
        as they are.

        A scale over result axes goes to the result; one over the contracted axis goes to the operand that has to be computed anyway,
        or to the one with value channels.
        """
        if is_number(x, 0.0) or is_number(y, 0.0):
            return self.const(0.0)
        left, right, out = _canonical(spec)
        if out[0] not in left:
            left, right, x, y = right, left, y, x
        x_core, x_scales = self.split_scales(x)
        y_core, y_scales = self.split_scales(y) if not solve else (y, [])
        if solve:
            x_core, x_scales = x, []
        outer: list[Node] = []
        inner: list[tuple[Node, str]] = []
        for scales, mine, node in ((x_scales, left, x), (y_scales, right, y)):
            for scale in scales:
                local = "".join(mine[node.axes.index(a)] for a in scale.axes)
                if all(c in out for c in local):
                    outer.append(self._relabel(scale, local, out))
                else:
                    inner.append((scale, local))
        for scale, local in inner:
            contracted = next(c for c in left if c in right and c not in out)
            if local == contracted and _carries_scale(y_core, x_core):
                y_core = self.mul(self._relabel(scale, local, right), y_core)
            elif local == contracted:
                x_core = self.mul(self._relabel(scale, local, left), x_core)
            elif all(c in left for c in local):
                x_core = self.mul(scale, x_core)
            else:
                y_core = self.mul(scale, y_core)
        axes = _result_axes(out)
        return self.mul(*outer, self.make(Dot(f"{left},{right}->{out}", solve), (x_core, y_core), axes))

    def split_scales(self, x: Node) -> tuple[Node, list[Node]]:
        """x as a tile times factors that vary along fewer axes."""
        factors = list(product_factors(x))
        whole = [f for f in factors if f.axes == x.axes]
        part = [f for f in factors if f.axes != x.axes]
        return (self.mul(*whole), part) if whole else (x, [])

    def _relabel(self, scale: Node, local: str, target: str) -> Node:
        """The scale in the naming of `target`, where a lone token axis is t and the second of two is s."""
        token = [c for c in target if c in "tsr"]
        if not local or local not in token:
            return scale
        want = ("t", "s")[token.index(local)]
        return scale if want in scale.axes else self.along(scale)


def _result_axes(out: str) -> Axes:
    tokens = iter(("t", "s"))
    names: list[str] = [next(tokens) if c in "tsr" else c for c in out]
    return tuple(names)  # type: ignore[arg-type]


def _canonical(spec: str) -> tuple[str, str, str]:
    """The same product with its token axes called t and s in the result's order, the contracted one after them: equal products are one
    node."""
    left, right, out = split_spec(spec)
    tokens = [c for c in dict.fromkeys(out + left + right) if c in "tsr"]
    rename = str.maketrans(dict(zip(tokens, "tsr", strict=False)))
    return left.translate(rename), right.translate(rename), out.translate(rename)


def is_raw(node: Node) -> bool:
    """Whether the tile comes from memory; a masked one is kept as it is there."""
    return isinstance(node.op, Load) or (isinstance(node.op, Mask) and node.op.kind == "across")


def _has_product(node: Node) -> bool:
    """Whether a sum over `node` can be turned: a product, or a masked or summed one."""
    match node.op:
        case Dot(solve=solve):
            return not solve
        case Diagonal() | Score():
            return True
        case Map(fn="add") | Mask():
            return any(_has_product(f) for a in node.args for f in product_factors(a))
        case _:
            return False


def _carries_scale(candidate: Node, other: Node) -> bool:
    """Whether a scale over the contracted axis should go to `candidate` rather than to `other`."""
    if is_raw(candidate) != is_raw(other):
        return is_raw(other)
    return "v" in candidate.axes and not _made_in_place(other)


def _made_in_place(node: Node) -> bool:
    """Whether it is a score that every kernel makes for itself, of rows as they are in memory: the smaller tile to scale. One with a decay
    per channel passes through memory, without scales that others could not use."""
    match node.op:
        case Score(decay=decay):
            return decay == "scalar"
        case Mask(kind="strict" | "causal"):
            return isinstance(node.args[0].op, Dot)
        case _:
            return False


def _open_numbers(node: Node) -> Iterator[Node]:
    """A product with a number in front is opened, so that numbers meet."""
    if isinstance(node.op, Map) and node.op.fn == "mul" and is_number(node.args[0]):
        yield from node.args
    else:
        yield node


def _product_key(x: Node, y: Node) -> tuple[object, ...]:
    x, y = (x, y) if x.index <= y.index else (y, x)
    return (Map("mul"), (x.index, y.index), order_axes((*x.axes, *y.axes)))


def _covered(expanded: Node, args: tuple[Node, ...], axes: Axes) -> bool:
    others = {a for arg in args if arg is not expanded for a in arg.axes} | set(expanded.args[0].axes)
    return others == set(axes)
