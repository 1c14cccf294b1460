"""lower: one kernel of the schedule becomes statements in the words of Triton. Part of emit; templates only lay out what comes from here.

Lowering is on demand: a value is asked for in an orientation (the order of its axes) and in a scope. A product asked for in the
other orientation is computed as the transposed product, never transposed afterwards. In a scan every tile with value channels has them first: an
accumulator is then a matrix operand without leaving registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from .chunk import CHUNK
from .graph import (
    Along,
    Axes,
    Axis,
    Const,
    Decay,
    Diagonal,
    Dot,
    Expand,
    Inverse,
    Load,
    Map,
    Mask,
    Node,
    Segment,
    Sum,
    TakeDiagonal,
    Valid,
    is_number,
    split_spec,
    topological,
)
from .schedule import Buffer, Kernel, varies

EXTENT = {"t": "C", "s": "C", "k": "BK", "v": "BV"}


@dataclass(slots=True)
class Statement:
    """`name = text`; text refers to other statements as §index§. plain: may be written into its only user."""

    index: int
    name: str
    text: str
    scope: int
    plain: bool
    comment: str
    binary: bool = False
    lines: tuple[str, ...] = ()  # instead of an assignment: whole lines, with the same references


@dataclass(frozen=True, slots=True)
class Loop:
    """One pass over the key channels: what is accumulated, and the body."""

    start: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The text of one kernel, ready for the template."""

    kernel: Kernel
    head: tuple[str, ...]      # before any loop
    body: tuple[str, ...]      # of the scan over chunks; empty in a parallel kernel
    loops: tuple[Loop, ...]    # over key tiles, in a parallel kernel
    constants: tuple[str, ...]  # keyword arguments of the op that the kernel reads
    needs_rows: bool
    inverse: bool


@dataclass(slots=True)
class Lowering:
    kernel: Kernel
    names: dict[int, str]
    spec: str
    statements: list[Statement] = field(default_factory=list)
    memo: dict[tuple[int, Axes, int], str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    levels: dict[int, int] = field(default_factory=dict)
    accumulators: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    needs_rows: bool = False
    at: int = 0  # the loop body that asks: a key tile is computed where it is used

    # ---- where a value is available

    @property
    def scan(self) -> bool:
        return self.kernel.walk != "parallel"

    def loaded(self, node: Node) -> Buffer | None:
        return next((b for b in self.kernel.loads if b.node is node), None)

    def prepare(self) -> None:
        """For a parallel kernel: after which loop over the key tiles a value is there (0: before any)."""
        have = {b.node.index for b in self.kernel.loads}
        for node in topological((b.node for b in self.kernel.stores), stop=lambda n: n.index in have):
            args = () if node.index in have else node.args
            level = 0
            for arg in args:
                level = max(level, self.levels[arg.index])
            if "k" in node.axes:
                # a key tile lives in the loop after everything it needs: levels of key tiles count the loops before theirs
                self.levels[node.index] = level
            elif any("k" in a.axes for a in args):
                self.levels[node.index] = 1 + max(self.levels[a.index] for a in args if "k" in a.axes)
                self.levels[node.index] = max(self.levels[node.index], level)
            else:
                self.levels[node.index] = level

    def where(self, node: Node) -> int:
        return self.at if not self.scan and "k" in node.axes else self.scope(node)

    def scope(self, node: Node) -> int:
        """Scopes of a scan: 0 before the loop, 1 the body. Of a parallel kernel: 2 l after loop l, 2 l + 1 the body of loop l + 1."""
        if self.scan:
            return 1 if varies(node) or self._carried(node) else 0
        level = self.levels[node.index]
        return 2 * level + 1 if "k" in node.axes else 2 * level

    def _carried(self, node: Node) -> bool:
        assert self.kernel.carry is not None
        return node is self.kernel.carry[0]

    # ---- statements

    def emit(self, node: Node, text: str, scope: int, *, plain: bool, binary: bool = False, name: str | None = None, axes: Axes = ()) -> str:
        index = len(self.statements)
        shape = ", ".join(EXTENT[a] for a in axes)
        comment = f"[{shape}]" if axes else ""
        if node.line and not plain:
            comment = f"{comment} {self.spec}:{node.line}".strip()
        self.statements.append(Statement(index, self.unique(name or self.label(node, axes)), text, scope, plain, comment, binary))
        return f"§{index}§"

    def unique(self, name: str) -> str:
        candidate, number = name, 2
        while candidate in self.taken:
            candidate, number = f"{name}{number}", number + 1
        self.taken.add(candidate)
        return candidate

    def label(self, node: Node, axes: Axes) -> str:
        known = self.names.get(node.index)
        if known is None:
            match node.op:
                case Load(name=name):
                    known = name
                case Dot():
                    known = "".join(self._short(a) for a in node.args)
                case Segment() | Sum():
                    known = f"sum_{self._short(node.args[0])}"
                case _:
                    known = "x"
        return "b_" + re.sub(r"\W", "_", known)

    def _short(self, node: Node) -> str:
        name = self.names.get(node.index) or (node.op.name if isinstance(node.op, Load) else "")
        return name if 0 < len(name) <= 3 else "x"

    # ---- values

    def order(self, node: Node) -> Axes:
        """The natural orientation: in a scan value channels first."""
        if self.scan and set(node.axes) == {"t", "v"}:
            return ("v", "t")
        return node.axes

    def value(self, node: Node, order: Axes | None = None) -> str:
        """A reference to the node's value in fp32 (a loaded operand tile: as loaded) in orientation `order`."""
        order = order or self.order(node)
        scope = self.where(node)
        key = (node.index, order, scope)
        if key not in self.memo:
            self.memo[key] = self._load(node, order, scope) if self._from_memory(node) else self._compute(node, order, scope)
        return self.memo[key]

    def _from_memory(self, node: Node) -> bool:
        return self.loaded(node) is not None or (self.scan and self._carried(node))

    def number(self, node: Node, order: Axes) -> str:
        """The value in fp32, for elementwise use."""
        buffer = self.loaded(node)
        value = self.value(node, order)
        if buffer is not None and len(node.axes) == 2:
            return self.cast(node, order, value)
        return value

    def cast(self, node: Node, order: Axes, value: str) -> str:
        key = (-1 - node.index, order, self.where(node))
        if key not in self.memo:
            self.memo[key] = self.emit(node, f"{value}.to(tl.float32)", self.where(node), plain=True, axes=order)
        return self.memo[key]

    def operand(self, node: Node, order: Axes) -> str:
        """The value as a matrix operand, in the operands' dtype."""
        value = self.value(node, order)
        buffer = self.loaded(node)
        if buffer is not None and buffer.operand:
            return value
        key = (-(1 << 20) - node.index, order, self.where(node))
        if key not in self.memo:
            if self.scan and set(order) == {"t", "s"} and self._has_dot(node):
                self.memo[key] = self._guarded(node, order, value)
            else:
                self.memo[key] = self.emit(node, f"{value}.to(ED)", self.where(node), plain=True, axes=order)
        return self.memo[key]

    def _has_dot(self, node: Node) -> bool:
        have = {b.node.index for b in self.kernel.loads}
        inside = [n for n in topological([node], stop=lambda n: n.index in have) if n.index not in have]
        return sum(isinstance(n.op, Dot) for n in inside) == 1

    def _guarded(self, node: Node, order: Axes, value: str) -> str:
        """A score in a scan stands behind a condition that always holds: without it the layout pass takes the product for a chained one
        and, with 8 warps, computes it twice (measured: a tenth of the scan)."""
        index = len(self.statements)
        name = self.unique(self.label(node, order) + "_op")
        lines = (f"{name} = tl.zeros((C, C), ED)", "if T > 0:", f"    {name} = {value}.to(ED)")
        self.statements.append(Statement(index, name, "", self.scope(node), False, "", lines=lines))
        return f"§{index}§"

    def _load(self, node: Node, order: Axes, scope: int) -> str:
        if self.scan and self._carried(node):
            return self._transposed(node, order, "b_S")
        buffer = self.loaded(node)
        assert buffer is not None
        natural = node.axes
        key = (node.index, natural, scope)
        if key not in self.memo:
            self.memo[key] = self.emit(node, self.address(buffer), scope, plain=False, axes=natural)
        if order == natural:
            return self.memo[key]
        return self.emit(node, f"tl.trans({self.memo[key]})", scope, plain=True, axes=order)

    def _transposed(self, node: Node, order: Axes, name: str) -> str:
        index = len(self.statements)
        self.statements.append(Statement(index, name, name, self.scope(node), True, ""))
        if order == node.axes:
            return f"§{index}§"
        return self.emit(node, f"tl.trans(§{index}§)", self.scope(node), plain=True, axes=order)

    def address(self, buffer: Buffer) -> str:
        name, axes = buffer.name, buffer.node.axes
        k, v = ("0", "i_v * BV") if self.scan else ("i_k * BK", "0")
        corner = {"t": "i_t * C", "s": "0", "k": k, "v": v}
        shape = ", ".join(EXTENT[a] for a in axes)
        match (buffer.layout, axes):
            case ("token", ("t",)):
                self.needs_rows = True
                return f"tl.load({name} + (i_row + o_t) * H + i_h, mask=m_t, other=0.0).to(tl.float32)"
            case ("token", (_, a)):
                return f"{name}.load([i_b, i_h, i_t * C, {corner[a]}]).reshape({shape})"
            case ("head", ()):
                return f"tl.load({name} + i_h).to(tl.float32)"
            case ("head", (a,)):
                return f"tl.load({name} + i_h * {a.upper()} + o_{a}, mask=o_{a} < {a.upper()}, other=0.0).to(tl.float32)"
            case ("chunk", ()):
                return f"tl.load({name} + i_c)"
            case ("chunk", ("t",)):
                return f"tl.load({name} + i_c * C + o_t)"
            case ("chunk", ("k",)):
                return f"tl.load({name} + i_c * K + o_k, mask=o_k < K, other=0.0)"
            case ("chunk", ("v", "k")):
                return f"{name}.load([i_bh * N + i_t, {v}, {k}]).reshape({shape})"
            case ("chunk", (_, a)):
                return f"{name}.load([i_bh, i_t * C, {corner[a]}]).reshape({shape})"
            case _:
                raise ValueError(f"no address for {buffer}")

    # ---- computing

    def _compute(self, node: Node, order: Axes, scope: int) -> str:
        if not self.scan and self._reduces_keys(node):
            return self._accumulate(node, order)
        return self._expression(node, order, scope)

    def _reduces_keys(self, node: Node) -> bool:
        """Whether the value is a sum over key tiles: a reduction, or sums, level masks and diagonals of such."""
        if "k" in node.axes or self._from_memory(node):
            return False
        match node.op:
            case Dot() | Sum():
                return any("k" in a.axes for a in node.args)
            case Map(fn="add"):
                first, second = node.args
                both = self._reduces_keys(first) and self._reduces_keys(second)
                return both and self.levels[first.index] == self.levels[second.index]
            case Mask(kind="level") | Diagonal():
                return self._reduces_keys(node.args[0])
            case _:
                return False

    def _accumulate(self, node: Node, order: Axes) -> str:
        """Adds the node's share of a key tile in the loop's body; the total is there after the loop."""
        body, asked = self.scope(node) - 1, self.at
        self.at = body
        name = self.unique(self.label(node, order))
        shape = ", ".join(EXTENT[a] for a in order) + ("," if len(order) == 1 else "")
        init = f"{name} = tl.zeros(({shape}), tl.float32)" if order else f"{name} = 0.0"
        self.accumulators.setdefault(body, []).append((name, init))
        if isinstance(node.op, Dot):
            self.line(body, f"{name} = {self._dot(node, order, name)}", node, order)
        else:
            self.line(body, f"{name} += {self._share(node, order, body)}", node, order)
        self.at = asked
        index = len(self.statements)
        self.statements.append(Statement(index, name, name, self.scope(node), True, ""))
        return f"§{index}§"

    def _share(self, node: Node, order: Axes, body: int) -> str:
        """The share of one key tile, inside the loop's body."""
        match node.op:
            case Map(fn="add"):
                return " + ".join(self._share(a, order, body) for a in node.args)
            case Mask() | Diagonal():
                inner = node.args[0]
                inner_order = order if isinstance(node.op, Mask) else ("t",)
                return self._masked(node, order, self._share(inner, inner_order, body))
            case Dot():
                return self._dot(node, order, None)
            case Sum(axis=axis):
                return self._sum(node, axis)
            case _:
                raise ValueError(f"{node.op} does not add up over key tiles")

    def line(self, scope: int, text: str, node: Node, order: Axes) -> None:
        shape = ", ".join(EXTENT[a] for a in order)
        place = f" {self.spec}:{node.line}" if node.line else ""
        self.statements.append(Statement(len(self.statements), "", "", scope, False, f"[{shape}]{place}" if order else place, lines=(text,)))

    def _expression(self, node: Node, order: Axes, scope: int) -> str:
        match node.op:
            case Const(value=value):
                if isinstance(value, str) and value not in ("K", "V"):
                    self.constants.add(value)
                return self.emit(node, value if isinstance(value, str) else _literal(value), scope, plain=True)
            case Map(fn="add"):
                return self._add(node, order, scope)
            case Map(fn="mul") if is_number(node.args[0], -1.0):
                return self.emit(node, f"-{self.spread(node.args[1], order)}", scope, plain=True, binary=True, axes=order)
            case Map(fn=fn, exponent=exponent):
                args = [self.spread(a, order) for a in node.args]
                text, binary = _elementwise(fn, args, exponent)
                return self.emit(node, text, scope, plain=True, binary=binary, axes=order)
            case Expand():
                text = f"{self.spread(node.args[0], order)} + tl.zeros(({', '.join(EXTENT[a] for a in order)},), tl.float32)"
                return self.emit(node, text, scope, plain=True, binary=True, axes=order)
            case Sum(axis=axis):
                return self.emit(node, self._sum(node, axis), scope, plain=False, axes=order)
            case Along():
                inner = node.args[0]
                flip: dict[Axis, Axis] = {"t": "s", "s": "t"}
                return self.value(inner, tuple(flip.get(a, a) for a in order))
            case Segment(size=size, reverse=reverse, exclusive=exclusive):
                text = f"segment_sum({self.number(node.args[0], node.axes)}, {'C' if size == CHUNK else size}, {reverse}, {exclusive})"
                natural = self.emit(node, text, scope, plain=False, axes=node.axes)
                return natural if order == node.axes else self.emit(node, f"tl.trans({natural})", scope, plain=True, axes=order)
            case Mask() | Diagonal() | TakeDiagonal() | Valid():
                return self._select(node, order, scope)
            case Decay():
                read, read_resets, write, write_resets = (self.value(a) for a in node.args)
                seen = _seen("causal", 0, order)
                t, s = (("[:, None]", "[None, :]") if order == ("t", "s") else ("[None, :]", "[:, None]"))
                text = f"tl.exp(tl.where({seen} & ({read_resets}{t} == {write_resets}{s}), {read}{t} - {write}{s}, -float('inf')))"
                return self.emit(node, text, scope, plain=False, axes=order)
            case Inverse():
                text = f"unit_lower_inverse({self.number(node.args[0], ('t', 's'))}, XD, PRECISION)"
                natural = self.emit(node, text, scope, plain=False, axes=("t", "s"))
                return natural if order == ("t", "s") else self.emit(node, f"tl.trans({natural})", scope, plain=True, axes=order)
            case Dot():
                return self.emit(node, self._dot(node, order, None), scope, plain=False, axes=order)
            case Load():
                raise ValueError(f"{node.op.name} is not loaded by {self.kernel.name}")
            case _:
                assert_never(node.op)

    def _select(self, node: Node, order: Axes, scope: int) -> str:
        inner = node.args[0]
        if isinstance(node.op, TakeDiagonal):
            text = f"tl.sum(tl.where(o_t[:, None] == o_t[None, :], {self.number(inner, ('t', 's'))}, 0.0), 1)"
            return self.emit(node, text, scope, plain=False, axes=order)
        inner_order = ("t",) if isinstance(node.op, Diagonal) else order
        return self.emit(node, self._masked(node, order, self.number(inner, inner_order)), scope, plain=True, axes=order)

    def _masked(self, node: Node, order: Axes, value: str) -> str:
        match node.op:
            case Mask(kind=kind, size=size):
                return f"tl.where({_seen(kind, size, order)}, {value}, 0.0)"
            case Diagonal():
                return f"tl.where(o_t[:, None] == o_t[None, :], ({value})[:, None], 0.0)"
            case Valid():
                self.needs_rows = True
                return f"tl.where({_broadcast('m_t', ('t',), order)}, {value}, 0.0)"
            case _:
                raise ValueError(str(node.op))

    def spread(self, node: Node, order: Axes) -> str:
        """The argument of an elementwise operation, broadcast to `order`."""
        own = tuple(a for a in order if a in node.axes)
        value = self.number(node, own)
        if len(own) == len(order) or not own:
            return value
        return _broadcast(value, own, order)

    def _add(self, node: Node, order: Axes, scope: int) -> str:
        """A sum with a product in it is the product with the rest as its accumulator."""
        first, second = node.args
        for product, rest in ((second, first), (first, second)):
            fits = isinstance(product.op, Dot) and not self._from_memory(product) and rest.axes == node.axes == product.axes
            if fits and (self.scan or not self._reduces_keys(product)) and self._uses(product) == 1:
                text = self._dot(product, order, self.number(rest, order))
                return self.emit(node, text, scope, plain=False, axes=order)
        if _is_negative(second):
            text = f"{self.spread(first, order)} - {self.spread(second.args[1], order)}"
        else:
            text = f"{self.spread(first, order)} + {self.spread(second, order)}"
        return self.emit(node, text, scope, plain=True, binary=True, axes=order)

    def _uses(self, node: Node) -> int:
        have = {b.node.index for b in self.kernel.loads}
        inside = topological((b.node for b in self.targets()), stop=lambda n: n.index in have)
        return sum(n.args.count(node) for n in inside if n.index not in have) + sum(b.node is node for b in self.kernel.stores)

    def targets(self) -> Iterable[Buffer]:
        yield from self.kernel.stores
        if self.kernel.carry is not None:
            yield Buffer("carry", self.kernel.carry[1], "state", False)

    def _sum(self, node: Node, axis: Axis) -> str:
        inner = node.args[0]
        inner_order = self.order(inner)
        return f"tl.sum({self.number(inner, inner_order)}, {inner_order.index(axis)})"

    def _dot(self, node: Node, order: Axes, accumulator: str | None) -> str:
        assert isinstance(node.op, Dot)
        left, right, out = split_spec(node.op.spec)
        x, y = node.args
        contracted = next(c for c in left if c in right and c not in out)
        if order != node.axes:
            out = out[::-1]
        if out[0] not in left:
            left, right, x, y = right, left, y, x
        first = self._axes_in(x, left, (out[0], contracted))
        second = self._axes_in(y, right, (contracted, out[1]))
        rest = f", {accumulator}" if accumulator else ""
        return f"tl.dot({self.operand(x, first)}, {self.operand(y, second)}{rest}, input_precision=PRECISION)"

    @staticmethod
    def _axes_in(node: Node, naming: str, wanted: tuple[str, str]) -> Axes:
        local = dict(zip(naming, node.axes, strict=True))
        return tuple(local[c] for c in wanted)


def _is_negative(node: Node) -> bool:
    return isinstance(node.op, Map) and node.op.fn == "mul" and is_number(node.args[0], -1.0)


def _literal(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "float('inf')" if value > 0 else "-float('inf')"
    return repr(value)


def _broadcast(value: str, own: Axes, order: Axes) -> str:
    index = ", ".join(":" if a in own else "None" for a in order)
    return f"{value}[{index}]"


def _seen(kind: str, size: int, order: Axes) -> str:
    t, s = ("o_t[:, None]", "o_t[None, :]") if order == ("t", "s") else ("o_t[None, :]", "o_t[:, None]")
    match kind:
        case "strict":
            return f"({t} > {s})"
        case "causal":
            return f"({t} >= {s})"
        case _:
            return f"across_middle({t}, {s}, {size})"


def _elementwise(fn: str, args: list[str], exponent: float) -> tuple[str, bool]:
    x = args[0]
    match fn:
        case "mul":
            return f"{x} * {args[1]}", True
        case "exp":
            return f"tl.exp({x})", False
        case "log":
            return f"tl.log({x})", False
        case "sigmoid":
            return f"tl.sigmoid({x})", False
        case "softplus" | "tanh":
            return f"{fn}({x})", False
        case "pow":
            return f"power({x}, {exponent!r})", False
        case "quotient":
            return f"quotient({x}, {args[1]})", False
        case "finite":
            return f"log_decay_finite({x})", False
        case "resets":
            return f"log_decay_resets({x})", False
        case _:
            raise ValueError(f"no Triton for {fn}")


def lower(kernel: Kernel, names: dict[int, str], spec: str) -> Lowered:
    """The statements of one kernel."""
    work = Lowering(kernel, names, spec, taken={b.name for b in (*kernel.loads, *kernel.stores)} | {"b_S"})
    if not work.scan:
        work.prepare()
    else:
        _solves_first(work)
    for buffer in kernel.stores:
        _store(work, buffer)
    if kernel.carry is not None:
        value = work.number(kernel.carry[1], kernel.carry[1].axes)
        work.line(1, f"b_S = {value}", kernel.carry[1], kernel.carry[1].axes)
    return assemble(work)


def _solves_first(work: Lowering) -> None:
    """The rows that the next state waits for come first: the chain from state to state is what a scan's time is made of."""
    have = {b.node.index for b in work.kernel.loads}
    for node in topological((b.node for b in work.targets()), stop=lambda n: n.index in have):
        if isinstance(node.op, Dot) and node.op.solve and node.index not in have and "v" in node.axes:
            work.value(node)


def _store(work: Lowering, buffer: Buffer) -> None:
    node, name = buffer.node, buffer.name
    work.at = work.scope(node)
    carried = work.kernel.carry is not None and node is work.kernel.carry[0]
    value = work.value(node) if carried else work.number(node, work.order(node))
    scope = work.scope(node)
    k, v = ("0", "i_v * BV") if work.scan else ("i_k * BK", "0")
    corner = {"t": "i_t * C", "s": "0", "k": k, "v": v}
    if len(node.axes) == 2:
        natural = node.axes if node.axes != ("v", "t") else ("t", "v")
        cast = f"{value}.to({name}.dtype)"
        if work.order(node) != natural:
            cast = f"tl.trans({cast})"
        a, b = natural
        if buffer.layout == "token":
            text = f"{name}.store([i_b, i_h, i_t * C, {corner[b]}], {cast}.reshape(1, 1, {EXTENT[a]}, {EXTENT[b]}))"
        elif natural == ("v", "k"):
            text = f"{name}.store([i_bh * N + i_t, {v}, {k}], {cast}.reshape(1, BV, BK))"
        else:
            text = f"{name}.store([i_bh, i_t * C, {corner[b]}], {cast}.reshape(1, {EXTENT[a]}, {EXTENT[b]}))"
        work.line(scope, text, node, natural)
        return
    match (buffer.layout, node.axes):
        case ("token", ("t",)):
            work.needs_rows = True
            text = f"tl.store({name} + (i_row + o_t) * H + i_h, {value}, mask=m_t)"
        case ("share" | "chunk", ()):
            text = f"tl.store({name} + i_c, {value})"
        case ("share" | "chunk", ("t",)):
            text = f"tl.store({name} + i_c * C + o_t, {value})"
        case ("share" | "chunk", (a,)):
            text = f"tl.store({name} + i_c * {a.upper()} + o_{a}, {value}, mask=o_{a} < {a.upper()})"
        case _:
            raise ValueError(f"no place for {buffer}")
    work.line(scope, text, node, node.axes)


_REFERENCE = re.compile(r"§(\d+)§")


def assemble(work: Lowering) -> Lowered:
    """Writes plain values into their only user and lays the statements out by scope."""
    statements = work.statements
    uses: dict[int, list[Statement]] = {}
    for statement in statements:
        for reference in _REFERENCE.findall(" ".join((statement.text, *statement.lines))):
            uses.setdefault(int(reference), []).append(statement)

    def inlined(statement: Statement) -> bool:
        if statement.text == statement.name or re.fullmatch(r"-?[\w.]+", statement.text):
            return True  # an accumulator, a number or a keyword argument
        users = uses.get(statement.index, [])
        alone = len(users) == 1 and users[0].scope == statement.scope
        guarded = alone and len(users[0].lines) > 1 and not statement.text.startswith(("tl.load", "segment_sum")) and ".load(" not in statement.text
        return (statement.plain and alone) or guarded

    def resolve(text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            target = statements[int(match.group(1))]
            if not inlined(target):
                return target.name
            inner = resolve(target.text)
            whole = match.start() == 0 and match.end() == len(text)
            return f"({inner})" if (target.binary or inner.startswith("-")) and not whole else inner

        return _REFERENCE.sub(replace, text)

    scopes: dict[int, list[str]] = {}
    for statement in statements:
        lines = scopes.setdefault(statement.scope, [])
        comment = f"  # {statement.comment.strip()}" if statement.comment.strip() else ""
        if statement.lines:
            lines += [resolve(line) + (comment if i == len(statement.lines) - 1 else "") for i, line in enumerate(statement.lines)]
        elif statement.index in uses and not inlined(statement):
            lines.append(f"{statement.name} = {resolve(statement.text)}{comment}")
    constants = tuple(sorted(work.constants))
    text = "\n".join(line for lines in scopes.values() for line in lines)
    if work.scan:
        return Lowered(work.kernel, tuple(scopes.get(0, ())), tuple(scopes.get(1, ())), (), constants, work.needs_rows, "unit_lower_inverse" in text)
    last = max([*scopes, 0])
    loops = tuple(
        Loop(tuple(init for _, init in work.accumulators.get(s, ())), tuple(scopes.get(s, ())), tuple(scopes.get(s + 1, ())))
        for s in range(1, last + 1, 2)
    )
    return Lowered(work.kernel, tuple(scopes.get(0, ())), (), loops, constants, work.needs_rows, "unit_lower_inverse" in text)
