"""lower: one kernel of the schedule becomes statements in the words of Triton. Part of emit; templates only lay out what comes from here.

Lowering is on demand: a value is asked for in an orientation (the order of its axes) and in a scope. A product asked for in the
other orientation is computed as the transposed product, never transposed afterwards. In a scan every tile with value channels has them
first: an accumulator is then a matrix operand without leaving registers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from .chunk import CHUNK
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
    levelled,
    product_factors,
    split_spec,
    topological,
)
from .schedule import Buffer, Kernel, varies
from .statements import BEHIND, BODY, EACH_LEVEL, SCOPES, Lowered, Statement, assemble

WIDE: tuple[Axes, ...] = (("t", "s"), ("t", "v"))  # tiles without key channels
EXTENT = {"t": "C", "s": "C", "k": "BK", "v": "BV"}
ROW = "((K + 3) // 4 * 4)"  # elements from row to row of a tile in fp32 that is read row by row: padded to 16 bytes


@dataclass(slots=True)
class Lowering:
    kernel: Kernel
    names: dict[int, str]
    spec: str
    statements: list[Statement] = field(default_factory=list)
    memo: dict[tuple[int, Axes, int], str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    loops: dict[int, int] = field(default_factory=dict)  # over key tiles, that have to come before a value
    accumulators: dict[int, list[str]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    levelled: frozenset[int] = frozenset()  # what differs from level to level of a steep chunk
    behind: set[int] = field(default_factory=set)  # the key tiles that a sum over levels goes into
    rows_of: set[str] = field(default_factory=set)
    steps_of: set[str] = field(default_factory=set)
    loaded_rows: dict[tuple[str, int], str] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)  # how often a value is used in this kernel
    at: int = 0  # the loop over key tiles that asks, counted from 0: a key tile is computed where it is used

    # ---- where a value is available

    @property
    def scan(self) -> bool:
        return self.kernel.walk != "parallel"

    def loaded(self, node: Node) -> Buffer | None:
        return next((b for b in self.kernel.loads if b.node is node), None)

    def prepare(self) -> None:
        """For a parallel kernel: behind how many loops over the key tiles a value is there."""
        have = {b.node.index for b in self.kernel.loads}
        inside = topological((b.node for b in self.kernel.stores), stop=lambda n: n.index in have)
        later = 1 if self._apart([n for n in inside if n.index not in have]) else 0
        self.levelled = levelled(inside)
        for node in inside:
            args = () if node.index in have else node.args
            loops = max((self.loops[a.index] for a in args), default=0)
            if "k" in node.axes:
                self.loops[node.index] = loops  # it is made in the loop behind them
                if isinstance(node.op, Levels) or self._is_behind(args):
                    self.behind.add(node.index)
            elif any("k" in a.axes for a in args):
                first = 0 if node.axes in WIDE else later
                self.loops[node.index] = max(loops, 1 + max(first, *(self.loops[a.index] for a in args if "k" in a.axes)))
            else:
                self.loops[node.index] = loops

        assert not self.levelled & self.behind, "a sum over levels inside of another"
        for buffer in self.kernel.stores:
            if "k" in buffer.node.axes:
                self.loops[buffer.node.index] = max(self.loops[buffer.node.index], later)

    @staticmethod
    def _apart(inside: list[Node]) -> bool:
        """Whether sums over key channels that are tiles get a loop of their own: beside products that make key tiles they would not fit in
        registers."""
        wide = any(isinstance(n.op, Dot) and n.axes in WIDE and any("k" in a.axes for a in n.args) for n in inside)
        return wide and sum(isinstance(n.op, Dot) and "k" in n.axes for n in inside) > 2

    def _is_behind(self, args: Iterable[Node]) -> bool:
        return any(a.index in self.behind for a in args)

    def where(self, node: Node) -> int:
        """The scope in which a use finds the value: in the loop that asks, if it is a key tile or differs from level to level."""
        inside = not self.scan and ("k" in node.axes or node.index in self.levelled)
        return self._in_loop(node, self.at) if inside else self.scope(node)

    def scope(self, node: Node) -> int:
        """The scope in which the value is first there: see statements.py."""
        if self.scan:
            return 1 if varies(node) or self._carried(node) else 0
        loops = self.loops[node.index]
        return self._in_loop(node, loops) if "k" in node.axes else SCOPES * loops

    def _in_loop(self, node: Node, loop: int) -> int:
        """The part of a loop over key tiles that makes the value."""
        if node.index in self.levelled:
            return SCOPES * loop + EACH_LEVEL
        return SCOPES * loop + (BEHIND if node.index in self.behind else BODY)

    def _carried(self, node: Node) -> bool:
        assert self.kernel.carry is not None
        return node is self.kernel.carry[0]

    # ---- statements

    def emit(
        self,
        node: Node,
        text: str,
        scope: int,
        *,
        plain: bool,
        binary: bool = False,
        name: str | None = None,
        axes: Axes = (),
        rank: int = 0,
    ) -> str:
        index = len(self.statements)
        shape = ", ".join(EXTENT[a] for a in axes)
        comment = f"[{shape}]" if axes else ""
        if node.line and not plain:
            comment = f"{comment} {self.spec}:{node.line}".strip()
        self.statements.append(
            Statement(
                index,
                self.unique(name or self.label(node, axes)),
                text,
                scope,
                plain,
                comment,
                binary,
                rank=rank,
            )
        )
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
        if _is_rounded(node):
            return self.cast(node, order, self.operand(node, order))
        value = self.value(node, order)
        if buffer is not None and len(node.axes) == 2:
            return self.cast(node, order, value)
        return value

    def cast(self, node: Node, order: Axes, value: str) -> str:
        key = (-1 - node.index, order, self.where(node))
        if key not in self.memo:
            self.memo[key] = self.emit(node, f"{value}.to(tl.float32)", self.where(node), plain=True, axes=order)
            self.statements[-1].ends = _is_rounded(node) and not self.scan
        return self.memo[key]

    def operand(self, node: Node, order: Axes) -> str:
        """The value as a matrix operand, in the operands' dtype."""
        buffer = self.loaded(node)
        if buffer is not None and buffer.operand:
            return self.value(node, order)
        key = (-(1 << 20) - node.index, order, self.where(node))
        if key not in self.memo:
            begin = len(self.statements)
            natural = self.order(node)
            if _is_rounded(node):
                return self.operand(node.args[0], order)
            if order != natural and (not self.scan or self._products(node) == 0):
                self.memo[key] = self.emit(node, f"tl.trans({self.operand(node, natural)})", self.where(node), plain=True, axes=order)
            elif isinstance(node.op, Mask) and not self._reduces_keys(node) and self._products(node) == 0:
                inner = self.operand(node.args[0], order)
                self.memo[key] = self.emit(node, self._masked(node, order, inner), self.where(node), plain=True, axes=order)
            elif self._is_guarded(node, order):
                self.memo[key] = self._guarded(node, order, self.value(node, order), begin)
            else:
                self.memo[key] = self.emit(node, f"{self.value(node, order)}.to(ED)", self.where(node), plain=True, axes=order)
        return self.memo[key]

    def _products(self, node: Node) -> int:
        """How many matrix products this kernel does for the value."""
        have = {b.node.index for b in self.kernel.loads}
        inside = topological([node], stop=lambda n: n.index in have)
        return sum(isinstance(n.op, Dot) for n in inside if n.index not in have)

    def _is_guarded(self, node: Node, order: Axes) -> bool:
        return self.scan and set(order) == {"t", "s"} and self._products(node) == 1

    def _guarded(self, node: Node, order: Axes, value: str, begin: int) -> str:
        """A score in a scan stands behind a condition that always holds: without it the layout pass takes the product for a chained one
        and, with 8 warps, computes it twice (measured: a tenth of the scan). Tiles that nothing used before it are loaded at the head
        of the loop: Triton 3.6 cannot pipeline a load whose first use is conditional."""
        for statement in self.statements[begin:]:
            if ".load(" in statement.text:
                statement.rank = -1
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
            early = self.scan and len(natural) < 2  # their latencies overlap at the head of the loop
            self.memo[key] = self.emit(node, self.address(buffer), scope, plain=False, axes=natural, rank=-1 if early else 0)
        return self._turned(node, self.memo[key], order, scope)

    def _transposed(self, node: Node, order: Axes, name: str) -> str:
        return self._turned(node, self._result(name, self.scope(node)), order, self.scope(node))

    def _turned(self, node: Node, value: str, order: Axes, scope: int) -> str:
        """The value, which has the node's axes, in orientation `order`."""
        return value if order == node.axes else self.emit(node, f"tl.trans({value})", scope, plain=True, axes=order)

    def address(self, buffer: Buffer) -> str:
        name, axes = buffer.name, buffer.node.axes
        k, v = ("0", "i_v * BV") if self.scan else ("i_k * BK", "0")
        corner = {"t": "i_t * C", "s": "0", "k": k, "v": v}
        shape = ", ".join(EXTENT[a] for a in axes)
        if by_pointer(self.kernel, buffer):
            offsets, width = {"s": ("o_t", "C"), "k": ("o_k", "K"), "v": ("o_v", "V")}[axes[1]]
            if buffer.layout == "chunk":
                return f"load_rows({name}, i_c * C + o_t, {offsets}, {width})"
            self.steps_of.add(name)
            steps = ", ".join(f"{name}_step_{a}" for a in "bth")
            return f"load_tokens({name}, {steps}, i_b, i_t * C + o_t, i_h, {offsets}, T, {width})"
        if by_row(self.kernel, buffer):
            place = "i_bh, i_t * C" if axes == ("t",) else f"i_bh * N + i_t, {corner[axes[0]]}"
            return f"{name}.load([{place}]).reshape({shape})"
        match (buffer.layout, axes):
            case ("token", ("t",)):
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
            case ("chunk", (a,)):
                return f"load_row({name}, i_c, o_{a}, {a.upper()})"
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
        """Whether the value is a sum over key tiles: a reduction, or sums of such and of what they are at each level."""
        if "k" in node.axes or self._from_memory(node):
            return False
        match node.op:
            case Dot() | Sum():
                return any("k" in a.axes for a in node.args)
            case Map(fn="add"):
                first, second = node.args
                both = self._reduces_keys(first) and self._reduces_keys(second)
                return both and self.loops[first.index] == self.loops[second.index]
            case Levels() | Mask(kind="across"):
                return self._reduces_keys(node.args[0])
            case _:
                return False

    def _accumulate(self, node: Node, order: Axes) -> str:
        """Adds the node's share of a key tile in the loop's body; the total is there after the loop."""
        loop, asked = self.loops[node.index] - 1, self.at
        self.at = loop
        name = self._accumulator(node, order, SCOPES * loop + BODY)
        for term in _terms(node):
            share = term.args[0] if isinstance(term.op, Levels) else term  # of each level
            part = EACH_LEVEL if share.index in self.levelled else (BEHIND if self._is_behind(share.args) else BODY)
            added = f"{name} = {self._dot(share, order, name)}" if isinstance(share.op, Dot) else f"{name} += {self._share(share, order)}"
            self.line(SCOPES * loop + part, added, share, order)
        self.at = asked
        return self._result(name, self.scope(node))

    def _share(self, node: Node, order: Axes) -> str:
        """The share of one key tile."""
        match node.op:
            case Mask():
                return self._masked(node, order, self._share(node.args[0], order))
            case Dot():
                return self._dot(node, order, None)
            case Sum(axis=axis):
                return self._sum(node, axis)
            case _:
                raise ValueError(f"{node.op} does not add up over key tiles")

    def _add_levels(self, node: Node, order: Axes) -> str:
        """A key tile that every level of a steep chunk adds to; the total is there behind the loop over the levels."""
        if order != node.axes:
            return self._turned(node, self.value(node, node.axes), order, self.where(node))
        (term,) = node.args
        name = self._accumulator(node, order, self.where(term))
        self.line(self.where(term), f"{name} += {self.number(term, order)}", term, order)
        return self._result(name, self.where(node))

    def _accumulator(self, node: Node, order: Axes, scope: int) -> str:
        """What the loop of this scope adds up in."""
        name = self.unique(self.label(node, order))
        shape = ", ".join(EXTENT[a] for a in order) + ("," if len(order) == 1 else "")
        self.accumulators.setdefault(scope, []).append(f"{name} = tl.zeros(({shape}), tl.float32)" if order else f"{name} = 0.0")
        return name

    def _result(self, name: str, scope: int) -> str:
        index = len(self.statements)
        self.statements.append(Statement(index, name, name, scope, True, ""))
        return f"§{index}§"

    def line(self, scope: int, text: str | tuple[str, ...], node: Node, order: Axes, *, last: bool = False) -> None:
        shape = ", ".join(EXTENT[a] for a in order)
        place = f" {self.spec}:{node.line}" if node.line else ""
        self.statements.append(
            Statement(
                len(self.statements),
                "",
                "",
                scope,
                False,
                f"[{shape}]{place}" if order else place,
                lines=(text,) if isinstance(text, str) else text,
                rank=int(last),
                ends=not self.scan,
            )
        )

    def _expression(self, node: Node, order: Axes, scope: int) -> str:
        match node.op:
            case Const(value=value):
                if isinstance(value, str) and value not in ("K", "V"):
                    self.constants.add(value)
                text = f"({value} * 1.0)" if value in ("K", "V") else value  # functions take floats alone
                return self.emit(node, text if isinstance(text, str) else _literal(text), scope, plain=True)
            case Map(fn="add"):
                return self._add(node, order, scope)
            case Map(fn="mul") if is_number(node.args[0], -1.0):
                return self.emit(node, f"-{self.spread(node.args[1], order)}", scope, plain=True, binary=True, axes=order)
            case Map(fn="mul"):
                return self.emit(node, self._multiply(node, order), scope, plain=True, binary=True, axes=order)
            case Map(fn=fn, exponent=exponent):
                args = [self.spread(a, order) for a in node.args]
                text, binary = _elementwise(fn, args, exponent)
                return self.emit(node, text, scope, plain=True, binary=binary, axes=order)
            case Expand():
                text = f"{self.spread(node.args[0], order)} + tl.zeros(({', '.join(EXTENT[a] for a in order)},), tl.float32)"
                return self.emit(node, text, scope, plain=True, binary=True, axes=order)
            case Sum(axis=axis):
                return self.emit(node, self._sum(node, axis), scope, plain=False, axes=order)
            case Levels():
                assert "k" in node.axes
                return self._add_levels(node, order)
            case Along():
                inner = node.args[0]
                flip: dict[Axis, Axis] = {"t": "s", "s": "t"}
                return self.value(inner, tuple(flip.get(a, a) for a in order))
            case Segment():
                return self._turned(node, self.emit(node, self._segment(node), scope, plain=False, axes=node.axes), order, scope)
            case Side(upper_zero=upper_zero, lower_zero=lower_zero):
                return self.emit(node, f"side_of_middle(o_t, i_l, {upper_zero}, {lower_zero})", scope, plain=True, axes=order)
            case Rows() | Scatter():
                return self._rows(node, order, scope)
            case Mask() | Diagonal() | TakeDiagonal() | Valid() | Within():
                return self._select(node, order, scope)
            case Decay():
                read, read_resets, write, write_resets = (self.value(a) for a in node.args)
                seen = _seen("strict" if node.op.strict else "causal", order)
                t, s = ("[:, None]", "[None, :]") if order == ("t", "s") else ("[None, :]", "[:, None]")
                text = f"tl.exp(tl.where({seen} & ({read_resets}{t} == {write_resets}{s}), {read}{t} - {write}{s}, -float('inf')))"
                return self.emit(node, text, scope, plain=False, axes=order)
            case Inverse():
                text = f"unit_lower_inverse({self.number(node.args[0], ('t', 's'))}, XD, PRECISION)"
                return self._turned(node, self.emit(node, text, scope, plain=False, axes=node.axes), order, scope)
            case Dot():
                return self.emit(node, self._dot(node, order, None), scope, plain=False, axes=order)
            case Load():
                raise ValueError(f"{node.op.name} is not loaded by {self.kernel.name}")
            case Score() | Pull():
                raise ValueError(f"{node.op} stands for matrix products: scores.py")
            case _:
                assert_never(node.op)

    def _segment(self, node: Node) -> str:
        """A cumulative sum over the chunk. What is left to the chunk's end is a difference of two places, where those are in memory."""
        op = node.op
        assert isinstance(op, Segment) and op.size == CHUNK
        difference = self.kernel.difference(node)
        if difference is not None:
            end, place = difference
            return f"tl.minimum({self.row(end, 'C - 1', node)}[None, :] - {self.number(place.node, node.axes)}, 0.0)"
        return f"chunk_sum({self.number(node.args[0], node.axes)}, {op.reverse}, {op.exclusive})"

    def rows(self, buffer: Buffer) -> str:
        """A pointer to the rows of a tile in memory."""
        if not by_pointer(self.kernel, buffer):
            self.rows_of.add(buffer.name)
        return rows_name(self.kernel, buffer)

    def row(self, buffer: Buffer, row: str, node: Node) -> str:
        """One row of a tile in memory, [BK]; loaded once."""
        scope = self.where(node)
        text = f"tl.load({self.rows(buffer)} + (i_c * C + {row}) * {ROW} + o_k, mask=o_k < K, other=0.0)"
        if (text, scope) not in self.loaded_rows:
            self.loaded_rows[text, scope] = self.emit(node, text, scope, plain=False, name=f"b_{buffer.name}_row", axes=("k",))
        return self.loaded_rows[text, scope]

    def _rows(self, node: Node, order: Axes, scope: int) -> str:
        """Rows are read from memory, where the tile lies with its width padded to 16 bytes."""
        match node.op:
            case Rows(kind=kind):
                buffer = self.loaded(node.args[0])
                assert buffer is not None and buffer.layout == "chunk"
                if kind != "middle":
                    return self.row(buffer, "C - 1" if kind == "last" else "C // 2 - 1", node)
                text = f"load_rows({self.rows(buffer)}, i_c * C + middle_of_block(o_t, i_l), o_k, K)"
                return self._turned(node, self.emit(node, text, scope, plain=False, axes=node.axes), order, scope)
            case Scatter():
                value = self.number(node.args[0], node.args[0].axes)
                return self.emit(node, f"tl.where(o_t[:, None] == C - 1, {value}[None, :], 0.0)", scope, plain=True, axes=node.axes)
            case _:
                raise ValueError(str(node.op))

    def _select(self, node: Node, order: Axes, scope: int) -> str:
        inner = node.args[0]
        if isinstance(node.op, TakeDiagonal):
            text = f"tl.sum(tl.where(o_t[:, None] == o_t[None, :], {self.number(inner, ('t', 's'))}, 0.0), 1)"
            return self.emit(node, text, scope, plain=False, axes=order)
        inner_order = ("t",) if isinstance(node.op, Diagonal) else order
        return self.emit(node, self._masked(node, order, self.number(inner, inner_order)), scope, plain=True, axes=order)

    def _masked(self, node: Node, order: Axes, value: str) -> str:
        match node.op:
            case Mask(kind=kind):
                return f"tl.where({_seen(kind, order)}, {value}, 0.0)"
            case Diagonal():
                return f"tl.where(o_t[:, None] == o_t[None, :], ({value})[:, None], 0.0)"
            case Valid():
                return f"tl.where({_broadcast('m_t', ('t',), order)}, {value}, 0.0)"
            case Within(axis=axis):
                inside = _broadcast(f"(o_{axis} < {axis.upper()})", (axis,), order) if len(order) > 1 else f"o_{axis} < {axis.upper()}"
                return f"tl.where({inside}, {value}, 0.0)"
            case _:
                raise ValueError(str(node.op))

    def spread(self, node: Node, order: Axes) -> str:
        """The argument of an elementwise operation, broadcast to `order`."""
        own = tuple(a for a in order if a in node.axes)
        value = self.number(node, own)
        if len(own) == len(order) or not own:
            return value
        return _broadcast(value, own, order)

    def _multiply(self, node: Node, order: Axes, numbers: Sequence[str] = ()) -> str:
        """A product, its factors with the fewest axes first: what scales a tile is one number a row before it meets the tile."""
        groups: dict[Axes, list[str]] = {(): [*numbers]} if numbers else {}
        for factor in self._factors(node):
            own = tuple(a for a in order if a in factor.axes)
            groups.setdefault(own, []).append(self.number(factor, own))
        vectors = [own for own in sorted(groups, key=len) if own and own != order]
        if vectors and () in groups:  # numbers go to a vector
            groups[vectors[0]] = [*groups.pop(()), *groups[vectors[0]]]
        texts: list[str] = []
        for own in sorted(groups, key=len):
            text = " * ".join(groups[own])
            whole = own == order or not own
            if len(groups[own]) > 1 and (texts or not whole):
                text = f"({text})"
            texts.append(text if whole else _broadcast(text, own, order))
        return " * ".join(texts)

    def _factors(self, node: Node) -> list[Node]:
        """The factors of a product; a product inside is opened where nothing else uses it."""
        found: list[Node] = []
        for arg in node.args:
            nested = isinstance(arg.op, Map) and arg.op.fn == "mul" and not self._from_memory(arg) and not is_number(arg.args[0], -1.0)
            opens = nested and self._uses(arg) == 1 and self.where(arg) == self.where(node)
            found += self._factors(arg) if opens else [arg]
        return found

    def _add(self, node: Node, order: Axes, scope: int) -> str:
        """A sum, term by term; in a loop over key tiles a product is dropped as soon as it is added. A product takes the sum so far as its
        accumulator."""
        terms = sorted(self._summands(node), key=lambda t: self._product(t, node) is not None)
        value = self.spread(terms[0], order)
        for term in terms[1:]:
            product = self._product(term, node)
            if product is not None:
                dot, factors = product
                value = self.emit(node, self._dot(dot, order, value, factors), scope, plain=False, axes=order)
                continue
            negative = _is_negative(term)
            text = f"{value} - {self.spread(term.args[1], order)}" if negative else f"{value} + {self.spread(term, order)}"
            drops = not self.scan and "k" in node.axes and self._products(term) > 0
            value = self.emit(node, text, scope, plain=term is terms[-1] or not drops, binary=True, axes=order)
            self.statements[-1].ends = drops
        return value

    def _product(self, term: Node, node: Node) -> tuple[Node, list[Node]] | None:
        """The term as a product that can take the sum so far as its accumulator, with the numbers in front of it: they go to an
        operand that has to be computed anyway."""
        factors = list(product_factors(term))
        dots = [f for f in factors if isinstance(f.op, Dot)]
        if term.axes != node.axes or len(dots) != 1 or self._from_memory(term):
            return None
        dot, numbers = dots[0], [f for f in factors if f is not dots[0]]
        if any(f.axes for f in numbers) or self._from_memory(dot) or self._uses(dot) != 1 or self._uses(term) != 1:
            return None
        if not self.scan and self._reduces_keys(dot):
            return None
        if numbers and all(self.loaded(a) is not None or (self.scan and self._carried(a)) for a in dot.args):
            return None
        return dot, numbers

    def _summands(self, node: Node) -> list[Node]:
        """The terms of a sum; a sum inside is opened when nothing else uses it."""
        found: list[Node] = []
        for arg in node.args:
            nested = isinstance(arg.op, Map) and arg.op.fn == "add" and not self._from_memory(arg)
            opens = nested and arg.axes == node.axes and self._uses(arg) == 1 and self.where(arg) == self.where(node)
            opens = opens and (self.scan or not self._reduces_keys(arg))
            found += self._summands(arg) if opens else [arg]
        return found

    def _uses(self, node: Node) -> int:
        if not self.counts:
            have = {b.node.index for b in self.kernel.loads}
            inside = topological((b.node for b in self.targets()), stop=lambda n: n.index in have)
            self.counts.update(a.index for n in inside if n.index not in have for a in n.args)
            self.counts.update(b.node.index for b in self.kernel.stores)
        return self.counts[node.index]

    def targets(self) -> Iterable[Buffer]:
        yield from self.kernel.stores
        if self.kernel.carry is not None:
            yield Buffer("carry", self.kernel.carry[1], "state", False)

    def _sum(self, node: Node, axis: Axis) -> str:
        inner = node.args[0]
        if isinstance(inner.op, Sum) and not node.axes and self._uses(inner) == 1 and not self._from_memory(inner):
            return f"tl.sum({self.number(inner.args[0], self.order(inner.args[0]))})"  # over both axes at once
        if not node.axes:  # of a matrix of one row: Triton's pass over the tensor memory of Blackwell fails on sums of vectors
            return f"tl.sum({self.number(inner, self.order(inner))}[None, :])"
        inner_order = self.order(inner)
        return f"tl.sum({self.number(inner, inner_order)}, {inner_order.index(axis)})"

    def _dot(self, node: Node, order: Axes, accumulator: str | None, numbers: Sequence[Node] = ()) -> str:
        """The product in this orientation; `numbers` multiply the operand that is computed here."""
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
        smaller = y.axes == ("t", "s") != x.axes and self.loaded(y) is None
        x_scaled = bool(numbers) and self.loaded(x) is None and not smaller
        a = self._scaled(x, first, numbers) if x_scaled else self.operand(x, first)
        b = self._scaled(y, second, numbers) if numbers and not x_scaled else self.operand(y, second)
        return f"tl.dot({a}, {b}{rest}, input_precision=PRECISION)"

    def _scaled(self, node: Node, order: Axes, numbers: Sequence[Node]) -> str:
        begin = len(self.statements)
        factors = [self.value(n) for n in numbers if not is_number(n, -1.0)]
        sign = "-" if sum(is_number(n, -1.0) for n in numbers) % 2 else ""
        alone = isinstance(node.op, Map) and node.op.fn == "mul" and not self._from_memory(node) and self._uses(node) == 1
        product = self._multiply(node, order, factors) if alone else " * ".join([*factors, self.number(node, order)])
        text = f"{sign}{product}"
        scaled = self.emit(node, text, self.where(node), plain=True, binary=True, axes=order)
        if self._is_guarded(node, order):
            return self._guarded(node, order, scaled, begin)
        return self.emit(node, f"{scaled}.to(ED)", self.where(node), plain=True, axes=order)

    @staticmethod
    def _axes_in(node: Node, naming: str, wanted: tuple[str, str]) -> Axes:
        local = dict(zip(naming, node.axes, strict=True))
        return tuple(local[c] for c in wanted)


def _terms(node: Node) -> list[Node]:
    """The terms of a sum, nested sums opened."""
    if isinstance(node.op, Map) and node.op.fn == "add":
        return [t for a in node.args for t in _terms(a)]
    return [node]


def by_pointer(kernel: Kernel, buffer: Buffer) -> bool:
    """Whether a tile is loaded by pointer: outside of a loop in stages every load of a descriptor would be waited for before the next
    begins. The loop over key tiles is none where another stands in it, over the levels of a steep chunk."""
    axes = buffer.node.axes
    tile = axes[:1] == ("t",) and len(axes) == 2 and ("k" not in axes or kernel.falls == "steep")
    return kernel.walk == "parallel" and tile and buffer in kernel.loads


def rows_name(kernel: Kernel, buffer: Buffer) -> str:
    """The pointer to a tile's rows: the tile itself, or one beside its descriptor."""
    return buffer.name if by_pointer(kernel, buffer) else f"{buffer.name}_rows"


def by_row(kernel: Kernel, buffer: Buffer) -> bool:
    """Whether a vector is loaded through a descriptor: in a scan. Loads by pointer are made there by every warp, in each layout that the
    vector is used in, and took a third of the time of a scan with six vectors (0.29 -> 0.20 ms)."""
    return kernel.walk != "parallel" and buffer.layout == "chunk" and len(buffer.node.axes) == 1 and buffer in kernel.loads


def _is_rounded(node: Node) -> bool:
    return isinstance(node.op, Map) and node.op.fn == "round"


def _is_negative(node: Node) -> bool:
    return isinstance(node.op, Map) and node.op.fn == "mul" and is_number(node.args[0], -1.0)


def _literal(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "float('inf')" if value > 0 else "-float('inf')"
    return repr(value)


def _broadcast(value: str, own: Axes, order: Axes) -> str:
    index = ", ".join(":" if a in own else "None" for a in order)
    return f"{value}[{index}]"


def _seen(kind: MaskKind, order: Axes) -> str:
    t, s = ("o_t[:, None]", "o_t[None, :]") if order == ("t", "s") else ("o_t[None, :]", "o_t[:, None]")
    match kind:
        case "strict":
            return f"({t} > {s})"
        case "causal":
            return f"({t} >= {s})"
        case "gapped":
            return f"({t} > {s} + 1)"
        case "across":
            return f"across_middle({t}, {s}, i_l)"
        case _:
            assert_never(kind)


def _elementwise(fn: str, args: list[str], exponent: float) -> tuple[str, bool]:
    x = args[0]
    match fn:
        case "exp":
            return f"tl.exp({x})", False
        case "log" | "log_retention":
            return f"tl.log({x})", False
        case "sigmoid":
            return f"tl.sigmoid({x})", False
        case "softplus" | "tanh" | "sign":
            return f"{fn}({x})", False
        case "abs":
            return f"tl.abs({x})", False
        case "pow" if exponent.is_integer() and abs(exponent) > 3:
            whole = f"integer_power({x}, {abs(int(exponent))})"
            return (whole, False) if exponent > 0 else (f"1.0 / {whole}", True)
        case "pow":
            return f"power({x}, {exponent!r})", False
        case "quotient":
            return f"quotient({x}, {args[1]})", False
        case "floor":
            return f"log_decay_floor({x})", False
        case "at_most_zero":
            return f"tl.minimum({x}, 0.0)", False
        case "finite":
            return f"log_decay_finite({x})", False
        case "resets":
            return f"log_decay_resets({x})", False
        case _:
            raise ValueError(f"no Triton for {fn}")


def lower(kernel: Kernel, names: dict[int, str], spec: str) -> Lowered:
    """The statements of one kernel."""
    taken = {f"{b.name}{part}" for b in (*kernel.loads, *kernel.stores) for part in ("", "_step_b", "_step_t", "_step_h")}
    work = Lowering(kernel, names, spec, taken=taken | {"b_S"})
    if not work.scan:
        work.prepare()
    else:
        _solves_first(work)
    for buffer in kernel.stores:
        _store(work, buffer)
    if kernel.carry is not None:
        value = work.number(kernel.carry[1], kernel.carry[1].axes)
        work.line(1, f"b_S = {value}", kernel.carry[1], kernel.carry[1].axes, last=True)
    return assemble(work)


def _solves_first(work: Lowering) -> None:
    """The rows that the next state waits for come first: the chain from state to state is what a scan's time is made of."""
    have = {b.node.index for b in work.kernel.loads}
    for node in topological((b.node for b in work.targets()), stop=lambda n: n.index in have):
        if isinstance(node.op, Dot) and node.op.solve and node.index not in have and "v" in node.axes:
            work.value(node)


def _store(work: Lowering, buffer: Buffer) -> None:
    node, name = buffer.node, buffer.name
    work.at = work.loops.get(node.index, 0)
    carried = work.kernel.carry is not None and node is work.kernel.carry[0]
    value = work.value(node) if carried else work.number(node, work.order(node))
    scope = work.scope(node)
    k, v = ("0", "i_v * BV") if work.scan else ("i_k * BK", "0")
    corner = {"t": "i_t * C", "s": "0", "k": k, "v": v}
    if len(node.axes) == 2:
        natural = node.axes if node.axes != ("v", "t") else ("t", "v")
        if work.order(node) != natural:
            value = f"tl.trans({value})"
        a, b = natural
        cast = f"{value}.to({name}.dtype)"
        if buffer.layout == "token":
            place, rows, inside = f"i_b, i_h, i_t * C, {corner[b]}", "(i_row + o_t) * H + i_h", "m_t"
            text = f"{name}.store([{place}], {cast}.reshape(1, 1, {EXTENT[a]}, {EXTENT[b]}))"
        elif natural == ("v", "k"):
            place, rows, inside = f"i_bh * N + i_t, {v}, {k}", "(i_bh.to(tl.int64) * N + i_t) * V + o_v", "o_v < V"
            text = f"{name}.store([{place}], {cast}.reshape(1, BV, BK))"
        else:
            rows, inside = "i_c * C + o_t", "o_t < C"
            text = f"{name}.store([i_bh, i_t * C, {corner[b]}], {cast}.reshape(1, {EXTENT[a]}, {EXTENT[b]}))"
        if not work.scan:
            work.line(scope, text, node, natural)
            return
        direct = f"store_rows({name}, {rows}, {inside}, o_{b}, {b.upper()}, {value})"
        work.line(scope, ("if DIRECT:", f"    {direct}", "else:", f"    {text}"), node, natural)
        return
    match (buffer.layout, node.axes):
        case ("token", ("t",)):
            text = f"tl.store({name} + (i_row + o_t) * H + i_h, {value}, mask=m_t)"
        case ("share" | "chunk", ()):
            text = f"tl.store({name} + i_c, {value})"
        case ("share" | "chunk", ("t",)):
            text = f"tl.store({name} + i_c * C + o_t, {value})"
        case ("share", (a,)):
            text = f"tl.store({name} + i_c * {a.upper()} + o_{a}, {value}, mask=o_{a} < {a.upper()})"
        case ("chunk", (a,)):
            text = f"store_row({name}, i_c, o_{a}, {a.upper()}, {value})"
        case _:
            raise ValueError(f"no place for {buffer}")
    work.line(scope, text, node, node.axes)
