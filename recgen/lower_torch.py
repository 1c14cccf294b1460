"""lower_torch: the forward nodes of a tile graph become statements in the words of torch. Part of emit; the sibling of lower.py.

A statement is made when its value is asked for, in the place where it is computed: for each token, for all chunks at once, in the loop
over the chunks, or after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import assert_never

from .errors import VerifyError
from .ops import (
    Along,
    Axes,
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
    is_number,
    order_axes,
    split_spec,
    topological,
)
from .tile import TileGraph

NUMBER, TOKEN, TILE, CHUNK, LOOP, AFTER = range(6)  # where a value is computed, in order
LEAD = {TOKEN: ("B", "T", "H"), LOOP: ("B * H",)}
CHUNKS = ("B", "H", "N")
EXTENT = {"t": "C", "s": "C", "k": "K", "v": "V"}
_REFERENCE = re.compile(r"§(\d+):(\d+)§")


@dataclass(slots=True)
class Statement:
    """`name = text`; text refers to other statements as §index:binding§. plain: may be written into its only user.

    fresh: a tensor of its own that no gradient looks at, so its only user may overwrite it. overwrites: operands that have the result's
    shape, and the text that puts the result in their place.
    """

    name: str
    text: str
    binds: int
    scope: int
    plain: bool
    comment: str
    fresh: bool = False
    overwrites: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class TorchLowering:
    """Values on demand, and where each is computed."""

    tile: TileGraph
    size: int
    scopes: dict[int, int] = field(default_factory=dict)
    loop: set[int] = field(default_factory=set)
    uses: dict[int, int] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    texts: dict[tuple[int, str], str] = field(default_factory=dict)  # equal text in one place is one value
    memo: dict[tuple[object, ...], str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    carried: dict[str, tuple[str, str]] = field(default_factory=dict)  # chunk value -> its slice in the loop, and the value
    scores: dict[int, list[Node]] = field(default_factory=dict)  # gate -> the scores under it
    own_decays: dict[int, Node] = field(default_factory=dict)  # decay before a token's own -> the decay with it
    below: set[int] = field(default_factory=set)  # of what only the entries below the diagonal are looked at
    collected: dict[int, tuple[str, str]] = field(default_factory=dict)  # loop value -> list that keeps it
    ends: tuple[str, str] = ("", "")  # the next state, the output
    users: dict[int, list[int]] | None = None

    # ---- where a value is computed

    def place(self) -> None:
        """The scope of every forward node."""
        tile, nodes = self.tile, topological([self.tile.output, self.tile.state])
        for node in nodes:
            self.scopes[node.index] = self._scope(node)
            if isinstance(node.op, Score):
                self.scores.setdefault(node.args[2].args[0].index, []).append(node)
            for arg in node.args:
                self.uses[arg.index] = self.uses.get(arg.index, 0) + 1
        for node in reversed(nodes):
            masked = node.index in self.below and isinstance(node.op, Map) and node.op.fn == "mul"
            masked |= node.index in self.below and isinstance(node.op, Mask)
            if masked or isinstance(node.op, Inverse):
                self.below |= {x.index for x in node.args if x.axes == node.axes and self.uses[x.index] == 1}
        segments = {n.args[0]: n for n in nodes if isinstance(n.op, Map) and n.op.fn == "exp" and isinstance(n.args[0].op, Segment)}
        for x, node in segments.items():
            assert isinstance(x.op, Segment)
            own = [y for y in segments if y.args == x.args and y.op == replace(x.op, exclusive=False)]
            if own and x.op.exclusive and not x.op.reverse and x.axes == ("t", "k"):
                self.own_decays[node.index] = segments[own[0]]
        early = {tile.output.index, tile.state.index}  # what a value of one token still has to be there for
        for node in reversed(nodes):
            product = isinstance(node.op, Map) and node.op.fn == "mul" and "t" in node.axes and node.index not in early
            if self.scopes[node.index] == TOKEN and product:
                self.scopes[node.index] = CHUNK  # a product with a zero row is a zero row: cut its factors
            elif self.scopes[node.index] == TOKEN:
                early |= {a.index for a in node.args}
        for node in topological([tile.state]):
            if self.scopes[node.index] == AFTER:
                self.loop.add(node.index)
        for index in self.loop:
            self.scopes[index] = LOOP

    def _scope(self, node: Node) -> int:
        inner = max((self.scopes[a.index] for a in node.args), default=NUMBER)
        match node.op:
            case Const():
                return NUMBER
            case Load(role=role):
                return TOKEN if role == "input" else AFTER
            case Map() | Valid() | Within():
                return inner
            case Expand():
                return max(inner, TOKEN)
            case Sum(axis="k" | "v"):
                return max(inner, TOKEN)
            case _:
                return max(inner, CHUNK)

    # ---- statements

    def emit(
        self,
        node: Node,
        text: str,
        binds: int,
        scope: int,
        *,
        plain: bool,
        name: str = "",
        fresh: bool = False,
        overwrites: tuple[tuple[str, str], ...] = (),
    ) -> str:
        """A reference to the value of `text`, whose outermost operator binds as strongly as `binds`."""
        if (scope, text) in self.texts:
            return self.texts[scope, text]
        label = name or self.tile.graph.names.get(node.index, "")
        label = self.fresh(label) if label.strip("$") else f"$x{len(self.statements)}"
        lead = LEAD.get(scope, CHUNKS)
        shape = ", ".join((*lead, *(EXTENT[a] for a in self.trail(node, scope))))
        if scope == TOKEN and "t" not in node.axes:
            shape = ", ".join(("H", *(EXTENT[a] for a in node.axes)))
        line = f" {self.tile.form.normal.name}.rec:{node.line}" if node.line else ""
        places = tuple((int(m.group(1)), other) for x, other in overwrites if (m := _REFERENCE.fullmatch(x)))
        self.statements.append(Statement(label, text, binds, scope, plain, f"[{shape}]{line}", fresh, places))
        self.texts[scope, text] = self.reference(len(self.statements) - 1)
        return self.texts[scope, text]

    @staticmethod
    def reference(index: int, binds: int = 0) -> str:
        return f"§{index}:{binds}§"

    def fresh(self, name: str) -> str:
        number, label = 1, name
        while label in self.taken:
            number += 1
            label = f"{name}_{number}" if name[-1:].isdigit() else f"{name}{number}"
        self.taken.add(label)
        return label

    @staticmethod
    def bind(text: str, binds: int) -> str:
        """The text as an operand of something that binds as strongly as `binds`."""
        return re.sub(r"^§(\d+):\d+§$", rf"§\1:{binds}§", text)

    @staticmethod
    def trail(node: Node, scope: int) -> Axes:
        return tuple(a for a in node.axes if a != "t") if scope == TOKEN else node.axes

    # ---- values

    def value(self, node: Node, scope: int) -> str:
        """The node as it is seen from `scope`."""
        seen = scope if scope in (TOKEN, LOOP) or self.scopes[node.index] in (LOOP, AFTER) else CHUNK
        key = (node.index, seen)
        if key not in self.memo:
            self.memo[key] = self._value(node, scope)
        return self.memo[key]

    def _value(self, node: Node, scope: int) -> str:
        own = self.scopes[node.index]
        if own == NUMBER:
            return self._number(node)
        if own == TOKEN:
            return self._token(node, scope)
        if own == LOOP and scope == AFTER:
            return self._collect(node)
        if own in (LOOP, AFTER):
            return "S" if isinstance(node.op, Load) else self._compute(node, own)
        if scope == LOOP:
            return self._carry(node)
        return self._compute(node, own)

    def _number(self, node: Node) -> str:
        match node.op:
            case Const(value=str(name)):
                return name
            case Const(value=value):
                return repr(value) if value != int(value) else repr(int(value))
            case Map():
                args = [self._number(a) for a in node.args]
                if node.op.fn in ("add", "mul"):
                    return f"({args[0]} {'+' if node.op.fn == 'add' else '*'} {args[1]})"
                text, binds = _elementwise(node.op.fn, [f"torch.tensor({args[0]}, dtype=torch.float64)"], node.op.exponent)
                return f"{text}.item()" if binds == 9 else f"({text}).item()"
            case _:
                raise ValueError(f"{node.op} is not a number")

    def _token(self, node: Node, scope: int) -> str:
        """A value of one token: as it is, without a token axis, or cut into chunks."""
        if "t" not in node.axes:
            if scope == LOOP:
                return self._carry(node)
            text = self.value(node, TOKEN) if scope != TOKEN else self._compute(node, TOKEN)
            return text if scope == TOKEN else f"{text}[:, None]"
        if scope == TOKEN:
            return self._compute(node, TOKEN)
        if scope == LOOP:
            return self._carry(node)
        inner = self.value(node, TOKEN)
        name = node.op.name if isinstance(node.op, Load) else self.tile.graph.names.get(node.index, "")
        if isinstance(node.op, Load):
            self.taken.discard(name)
        return self.emit(node, f"_tiles({self.bind(inner, 0)}, $N, $C)", 9, TILE, plain=False, name=name)

    def _carry(self, node: Node, index: str = "") -> str:
        """A chunk value in the loop over chunks, with axes of length one where `index` puts them."""
        source = self.value(node, CHUNK)
        if "t" not in node.axes and self.scopes[node.index] == TOKEN:  # of a head: the same for every sequence and chunk
            source += f".expand({', '.join(('B', 'H', '$N', *(EXTENT[a] for a in node.axes)))})"
        label = self.tile.graph.names.get(node.index, "") or (node.op.name if isinstance(node.op, Load) else "")
        return self._slices(source, label, index)

    def _slices(self, source: str, label: str, index: str = "") -> str:
        """What the loop calls one chunk's part of a value."""
        key = f"{source}[{index}]"
        if key not in self.carried:
            name = self.fresh(f"{label}_n") if label else f"$x_n{len(self.carried)}"
            self.carried[key] = (name, f"{self.bind(self.pin(source), 9)}[{index}]" if index else self.pin(source))
        return self.carried[key][0]

    def _collect(self, node: Node) -> str:
        """A value of the loop, for all chunks."""
        if node.index not in self.collected:
            inner = self.value(node, LOOP)
            name = "states" if isinstance(node.op, Load) else f"{self.tile.graph.names.get(node.index, 'row')}s"
            self.collected[node.index] = (self.fresh(name), self.pin(inner))
        return self.collected[node.index][0]

    def pin(self, reference: str) -> str:
        """A value that must have a name."""
        match = re.fullmatch(r"§(\d+):\d+§", reference)
        if match:
            self.statements[int(match.group(1))].plain = False
        return reference

    # ---- operations

    def _compute(self, node: Node, scope: int) -> str:
        def emit(text: str, binds: int, *, plain: bool, fresh: bool = False) -> str:
            return self.emit(node, text, binds, scope, plain=plain, fresh=fresh)

        def arg(i: int, binds: int = 0) -> str:
            return self.bind(self.value(node.args[i], scope), binds)

        match node.op:
            case Load(name=name):
                return name
            case Const():
                return self._number(node)
            case Map(fn="add"):
                return self._add(node, scope)
            case Map(fn="mul") if is_number(node.args[0], -1.0):
                return self._in_place(node, scope, f"-{self.spread(node.args[1], node, scope, 3)}", 3, ((node.args[1], "neg_()"),))
            case Map(fn="mul"):
                return self._mul(node, scope)
            case Map(fn=fn, exponent=exponent):
                if fn == "exp" and isinstance(node.args[0].op, Segment | Rows | Sum) and scope == CHUNK:
                    own = self.own_decays.get(node.index)  # what is left until the token before is that, a token later
                    return emit(f"_exp({arg(0)})" if own is None else f"_later({self.value(own, scope)})", 9, plain=True)
                text, binds = _elementwise(fn, [self.spread(a, node, scope, 9) for a in node.args], exponent)
                return emit(text, binds, plain=True)  # not fresh: many functions need their result for the gradient
            case Expand():
                return self._expand(node, scope)
            case Valid() | Within():
                return self.value(node.args[0], scope)  # rows behind the end are cut in as zeros
            case Sum(axis=axis):
                trail = self.trail(node.args[0], scope)
                return emit(f"{arg(0, 9)}.sum({trail.index(axis) - len(trail)})", 9, plain=True)
            case Along():
                return self.value(node.args[0], scope)
            case Segment(reverse=reverse, exclusive=exclusive):
                place = node.axes.index("t") - len(node.axes)
                return emit(f"_segment_sum({arg(0)}, {place}, {reverse}, {exclusive})", 9, plain=True)
            case Rows():
                return emit(f"{arg(0, 9)}.select({node.args[0].axes.index('t') - len(node.args[0].axes)}, -1)", 9, plain=True)
            case Score():
                return self._score(node)
            case Pull() | Decay() | Scatter() | Side() | Levels():
                raise VerifyError(f"{node.op} has no place in plain torch")
            case Mask(kind="strict") if node.index in self.below:
                return self.value(node.args[0], scope)
            case Mask(kind="strict" | "causal" as kind):
                below = -1 if kind == "strict" else 0
                return self._in_place(node, scope, f"{arg(0, 9)}.tril({below})", 9, ((node.args[0], f"tril_({below})"),))
            case Mask(kind=kind):
                raise VerifyError(f"a mask {kind} has no place in plain torch")
            case Diagonal():
                return emit(f"torch.diag_embed({arg(0)})", 9, plain=True)
            case TakeDiagonal():
                return emit(f"{arg(0, 9)}.diagonal(dim1=-2, dim2=-1)", 9, plain=True)
            case Inverse():
                return self._inverse(node, scope)
            case Dot():
                left, right = self._factors(node, scope)
                return emit(f"{left} @ {right}", 2, plain=True, fresh=True)
            case _:
                assert_never(node.op)

    def _in_place(self, node: Node, scope: int, text: str, binds: int, methods: tuple[tuple[Node, str], ...]) -> str:
        """An elementwise operation; `methods` are its forms that overwrite an argument."""
        places = tuple(
            (self.value(x, scope), f"{self.bind(self.value(x, scope), 9)}.{method}")
            for x, method in methods
            if scope in (CHUNK, LOOP, AFTER) and x.axes == node.axes and self.scopes[x.index] == self.scopes[node.index]
        )
        return self.emit(node, text, binds, scope, plain=True, fresh=scope != TOKEN, overwrites=places)

    def _mul(self, node: Node, scope: int) -> str:
        x, y = node.args
        for factor, product in ((x, y), (y, x)):
            if scope == LOOP and self._scales(factor, product):
                left, right = self._factors(product, scope, factor)
                return self.emit(node, f"{left} @ {right}", 2, scope, plain=True, fresh=True)
        text = f"{self.spread(x, node, scope, 2)} * {self.spread(y, node, scope, 3)}"
        methods = tuple((a, f"mul_({self.spread(b, node, scope, 0)})") for a, b in ((x, y), (y, x)))
        return self._in_place(node, scope, text, 2, methods)

    def _scales(self, factor: Node, product: Node) -> bool:
        """Whether a product in the loop can be scaled by scaling, for all chunks at once, what does not depend on the state."""
        if not isinstance(product.op, Dot) or self.uses[product.index] > 1 or self.scopes[factor.index] == LOOP:
            return False
        return any(self._takes(product, i, factor) for i in (0, 1))

    def _takes(self, product: Node, i: int, factor: Node) -> bool:
        """Whether an operand of a product does not depend on the state, and has the rows or columns that the factor scales."""
        assert isinstance(product.op, Dot)
        left, right, out = split_spec(product.op.spec)
        own = set(right if i else left) & set(out)
        return self.scopes[product.args[i].index] != LOOP and set(factor.axes) <= own

    def _add(self, node: Node, scope: int) -> str:
        """A sum: what can be overwritten first; in the loop, products are added as they are made."""
        number = self._number_factor(node) if scope == AFTER else None
        terms = self._terms(node, scope, number)
        if number is not None:
            total = self.bind(self._sum(terms, node, scope), 9)
            return self.emit(
                node,
                f"{total} * {self._number(number)}",
                2,
                scope,
                plain=True,
                fresh=True,
                overwrites=((total, f"{total}.mul_({self._number(number)})"),),
            )
        return self._sum(terms, node, scope)

    def _number_factor(self, node: Node) -> Node | None:
        """The number that every term of a sum is multiplied by."""
        if not isinstance(node.op, Map) or node.op.fn not in ("add", "mul"):
            return None
        if node.op.fn == "mul":
            return node.args[0] if self.scopes[node.args[0].index] == NUMBER and not is_number(node.args[0], -1.0) else None
        first, second = (self._number_factor(x) for x in node.args)
        return first if first is second else None

    def _terms(self, node: Node, scope: int, number: Node | None) -> list[tuple[Node, bool]]:
        """The terms of a sum without the number, each with whether it is subtracted."""
        if isinstance(node.op, Map) and node.op.fn == "add":
            return [
                (term, minus)
                for x in node.args
                for term, minus in (
                    self._terms(x, scope, number)
                    if number is not None or (self.scopes[x.index] == scope and self.uses[x.index] == 1)
                    else [self._negated(x) if scope != LOOP or self.scopes[x.index] == LOOP else (x, False)]
                )
            ]
        return [(node.args[1], False)] if number is not None else [self._negated(node)]

    def _sum(self, terms: list[tuple[Node, bool]], node: Node, scope: int) -> str:
        total, axes, terms = self._first(terms, node, scope)
        for x, minus in terms:
            inner = self._product(x) if scope == LOOP and axes is not None else None
            if inner is not None:
                left, right = self._factors(inner[0], scope, inner[1])
                rest = f"{left}, {right}{', alpha=-1' if minus else ''})"
                text, binds, own = f"torch.baddbmm({total}, {rest}", 9, f"{self.bind(total, 9)}.baddbmm_({rest}"
            else:
                other = self.spread(x, node, scope, 2 if minus else 1)
                text, binds = f"{self.bind(total, 1)} {'-' if minus else '+'} {other}", 1
                own = f"{self.bind(total, 9)}.{'sub' if minus else 'add'}_({self.bind(other, 0)})"
            places = ((total, own),) if axes == node.axes and scope != TOKEN else ()
            axes = order_axes((*(axes or ()), *x.axes))
            total = self.emit(node, text, binds, scope, plain=True, fresh=scope != TOKEN, overwrites=places)
        return total

    def _first(self, terms: list[tuple[Node, bool]], node: Node, scope: int) -> tuple[str, Axes | None, list[tuple[Node, bool]]]:
        """What a sum begins with, its axes (None for a number), and what is added to it: whole tiles before what is broadcast, in the loop
        products last."""

        def rank(term: tuple[Node, bool]) -> tuple[bool, ...]:
            x, minus = term
            number, product = self.scopes[x.index] == NUMBER, scope == LOOP and self._product(x) is not None
            return (minus, number, x.axes != node.axes, product, self.scopes[x.index] != scope)

        ordered = sorted(terms, key=rank)
        fixed = next((t for t in ordered if self.scopes[t[0].index] not in (LOOP, NUMBER) and not t[1]), None)
        scaled = next((t for t in ordered if scope == LOOP and self._is_scaled(t[0])), None)
        if fixed is not None and scaled is not None:
            start, x, y = (self.spread(z, node, scope, 0) for z in (fixed[0], *scaled[0].args))
            total = self.emit(
                node, f"torch.addcmul({start}, {x}, {y}{', value=-1' if scaled[1] else ''})", 9, scope, plain=True, fresh=True
            )
            return total, node.axes, [t for t in ordered if t not in (fixed, scaled)]
        (first, minus), *rest = ordered
        text = self.spread(first, node, scope, 9 if minus else 0)
        axes = None if self.scopes[first.index] == NUMBER else first.axes
        return self.emit(node, f"-{text}", 3, scope, plain=True, fresh=scope != TOKEN) if minus else text, axes, rest

    def _is_scaled(self, x: Node) -> bool:
        """Whether x is an elementwise product of this place alone, and of tensors."""
        alone = isinstance(x.op, Map) and x.op.fn == "mul" and self.uses[x.index] == 1 and self.scopes[x.index] == LOOP
        return alone and self._product(x) is None and all(self.scopes[a.index] != NUMBER for a in x.args)

    def _product(self, x: Node) -> tuple[Node, Node | None] | None:
        """The product that x is, of this place alone, and what scales it."""
        if isinstance(x.op, Dot) and self.uses[x.index] == 1 and self.scopes[x.index] == LOOP:
            return x, None
        if isinstance(x.op, Map) and x.op.fn == "mul" and self.uses[x.index] == 1:
            for factor, product in (x.args, x.args[::-1]):
                if self._scales(factor, product):
                    return product, factor
        return None

    def _negated(self, x: Node) -> tuple[Node, bool]:
        """What x is, or what it is the negative of."""
        if isinstance(x.op, Map) and x.op.fn == "mul" and is_number(x.args[0], -1.0):
            return x.args[1], True
        return x, False

    def _score(self, node: Node) -> str:
        """Scores under a decay per channel are computed together; one decay for all channels scales the product of the rows."""
        assert isinstance(node.op, Score)
        a, kappa, *decays = node.args
        group = self.scores[decays[0].args[0].index]
        if node.op.decay == "scalar":
            left, right = (self._rows(x) for x in (a, kappa))
            causal = any(isinstance(x.op, Score) and x.op.causal and list(x.args[2:]) == decays for x in group)
            sums = ", ".join(self.value(x, CHUNK) for x in decays)
            decay = self.emit(node, f"_decay({sums}, {not causal}, {node.op.touching})", 9, CHUNK, plain=False, name="decay")
            if causal and not node.op.causal and node.index not in self.below:
                decay = f"{decay}.tril(-1)"
            return self.emit(node, f"({left} @ {right}.mT).mul_({decay})", 9, CHUNK, plain=True, fresh=True)
        sides: tuple[list[str], list[str]] = ([], [])
        pairs = []
        for score in group:
            assert isinstance(score.op, Score)
            which = []
            for side, row, place in zip(sides, score.args[:2], score.args[2:4], strict=True):
                text = f"({self.spread(row, place, CHUNK, 0)}, {isinstance(place.op, Segment) and place.op.exclusive})"
                if text not in side:
                    side.append(text)
                which.append(str(side.index(text)))
            pairs.append(f"({', '.join(which)}, {score.op.causal})")
        gate, total = self.value(decays[0].args[0], CHUNK), self.value(decays[2], CHUNK)
        reads, writes = (", ".join(side) for side in sides)
        text = f"_scores({gate}, {total}, [{reads}], [{writes}], [{', '.join(pairs)}])"
        together = self.emit(node, text, 9, CHUNK, plain=False, name="scores")
        return self.emit(node, f"{self.bind(together, 9)}[{group.index(node)}]", 9, CHUNK, plain=True, fresh=True)

    def _rows(self, x: Node) -> str:
        """A key row for every token."""
        text = self.bind(self.value(x, CHUNK), 9)
        return text if "t" in x.axes else f"{text}[..., None, :].expand(B, H, $N, $C, K)"

    def _inverse(self, node: Node, scope: int) -> str:
        """(I - L)^-1; only what is below the diagonal is looked at."""
        lower = node.args[0]
        while isinstance(lower.op, Mask) and lower.index in self.below:
            lower = lower.args[0]
        lower, negative = self._negated(lower)
        text = self.value(lower, scope)
        return self.emit(node, f"_inverse({text if negative else '-' + self.bind(text, 3)})", 9, scope, plain=False)

    def spread(self, arg: Node, node: Node, scope: int, binds: int) -> str:
        """The argument of an elementwise operation, broadcast to the axes of `node`."""
        index = _index(self.trail(arg, scope), self.trail(node, scope))
        if self.scopes[arg.index] == NUMBER:
            return self.value(arg, scope)
        if scope == LOOP and index and self.scopes[arg.index] not in (LOOP, AFTER):
            return self._carry(arg, index)
        text = self.value(arg, scope)
        return f"{self.bind(text, 9)}[{index}]" if index else self.bind(text, binds)

    def _expand(self, node: Node, scope: int) -> str:
        inner = node.args[0]
        extent = {"t": "$C", "s": "$C", "k": "K", "v": "V"}
        lead = ("$N" if e == "N" else e for e in LEAD.get(scope, CHUNKS))
        shape = ", ".join((*lead, *(extent[a] for a in self.trail(node, scope))))
        if self.scopes[inner.index] == NUMBER:
            text = f"torch.full(({shape}), float({self._number(inner)}), dtype=$dtype, device=$device)"
        else:
            text = f"{self.spread(inner, node, scope, 9)}.expand({shape})"
        return self.emit(node, text, 9, scope, plain=True)

    def _factors(self, node: Node, scope: int, factor: Node | None = None) -> tuple[str, str]:
        """The operands of a matrix product. What scales a row or a column of both, or comes as `factor`, goes to the one that does not
        depend on the state."""
        assert isinstance(node.op, Dot)
        left, right, out = split_spec(node.op.spec)
        x, y = node.args
        contracted = next(c for c in left if c in right and c not in out)
        if out[0] not in left:
            left, right, x, y = right, left, y, x
        factors: dict[int, Node | None] = {0: None, 1: None}
        if factor is not None:
            taker = next(node.args[i] for i in (0, 1) if self._takes(node, i, factor))
            factors[0 if taker is x else 1] = factor
        operands = [x, y]
        for i, other in ((0, 1), (1, 0)) if scope == LOOP else ():
            scaled = operands[i]
            if self.scopes[operands[other].index] == LOOP or not isinstance(scaled.op, Map) or scaled.op.fn != "mul":
                continue
            for scale, rest in (scaled.args, scaled.args[::-1]):
                moves = self.scopes[scale.index] != LOOP and set(scale.axes) <= {contracted} and rest.axes == scaled.axes
                if moves and self.uses[scaled.index] == 1 and factors[other] is None and self.scopes[scaled.index] == LOOP:
                    operands[i], factors[other] = rest, scale
                    break
        first, second = (self._operand(operands[i], factors[i], scope) for i in (0, 1))
        plain = (left == out[0] + contracted, right == contracted + out[1])
        return (
            self.bind(first, 2) if plain[0] else f"{self.bind(first, 9)}.mT",
            self.bind(second, 3) if plain[1] else f"{self.bind(second, 9)}.mT",
        )

    def _operand(self, x: Node, factor: Node | None, scope: int) -> str:
        if factor is None:
            return self.value(x, scope)
        text = f"{self.value(x, CHUNK)} * {self.spread(factor, x, CHUNK, 3)}"
        return self._slices(self.emit(x, text, 2, CHUNK, plain=False, name="$"), "")

    # ---- text

    def inlined(self, index: int) -> bool:
        """Plain values with one user in the same place are written into it."""
        if self.users is None:
            self.users = {}
            texts = [(s.text, s.scope) for s in self.statements]
            texts += [(self.ends[0], LOOP), (self.ends[1], AFTER)]
            for text, scope in texts:
                for reference in _REFERENCE.findall(text):
                    self.users.setdefault(int(reference[0]), []).append(TOKEN if scope == TILE else scope)
        statement = self.statements[index]
        users = self.users.get(index, [])
        return statement.plain and users == [statement.scope]

    def resolve(self, text: str) -> str:
        """References replaced by names, or by what they stand for."""

        def replace(match: re.Match[str]) -> str:
            index, binds = int(match.group(1)), int(match.group(2))
            if not self.inlined(index):
                return self.statements[index].name
            inner, own = self.words(index)
            return f"({inner})" if own < binds else inner

        return _REFERENCE.sub(replace, text)

    def words(self, index: int) -> tuple[str, int]:
        """The text of a statement, in the place of an operand where that may be overwritten, and how strongly it binds."""
        statement = self.statements[index]
        for operand, text in statement.overwrites:
            if self.statements[operand].fresh and self.inlined(operand):
                return self.resolve(text), 9
        return self.resolve(statement.text), statement.binds


def _index(own: Axes, target: Axes) -> str:
    """The index that puts axes of length one where `own` lacks an axis of `target`."""
    marks = [":" if a in own else "None" for a in target]
    while marks and marks[0] == ":":
        marks.pop(0)
    return ", ".join(("...", *marks)) if marks else ""


def _elementwise(fn: str, args: list[str], exponent: float) -> tuple[str, int]:
    x = args[0]
    match fn:
        case "exp" | "tanh" | "sigmoid" | "abs":
            return f"{x}.{fn}()", 9
        case "softplus":
            return f"F.softplus({x})", 9
        case "floor":  # exp(-87) is the smallest normal number of fp32
            return f"{x}.clamp_min(-87.0)", 9
        case "log" | "log_retention" | "finite" | "resets":
            return f"_{fn}({x})", 9
        case "pow":
            named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 2.0: "square"}
            return (f"{x}.{named[exponent]}()", 9) if exponent in named else (f"{x} ** {exponent!r}", 4)
        case _:
            raise ValueError(f"no torch for {fn}")
