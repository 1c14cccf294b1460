"""lower_torch: the forward nodes of a tile graph become statements in the words of torch. Part of emit; the sibling of lower.py.

A statement is made when its value is asked for, in the place where it is computed: for each token, for all chunks at once, in the loop
over the chunks, or after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import assert_never

from .errors import VerifyError
from .graph import (
    Along,
    Axes,
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
    Pull,
    Rows,
    Scatter,
    Score,
    Segment,
    Side,
    Sum,
    TakeDiagonal,
    Valid,
    is_number,
    split_spec,
    topological,
)
from .tile import TileGraph

NUMBER, TOKEN, TILE, CHUNK, LOOP, AFTER = range(6)  # where a value is computed, in order
LEAD = {TOKEN: ("B", "T", "H"), LOOP: ("B", "H")}
CHUNKS = ("B", "H", "N")
EXTENT = {"t": "C", "s": "C", "k": "K", "v": "V"}
_REFERENCE = re.compile(r"§(\d+):(\d+)§")


@dataclass(slots=True)
class Statement:
    """`name = text`; text refers to other statements as §index:binding§. plain: may be written into its only user."""

    name: str
    text: str
    binds: int
    scope: int
    plain: bool
    comment: str


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
    carried: dict[int, tuple[str, str]] = field(default_factory=dict)  # chunk value -> its slice in the loop
    collected: dict[int, tuple[str, str]] = field(default_factory=dict)  # loop value -> list that keeps it
    ends: tuple[str, str] = ("", "")  # the next state, the output
    users: dict[int, list[int]] | None = None

    # ---- where a value is computed

    def place(self) -> None:
        """The scope of every forward node."""
        tile, nodes = self.tile, topological([self.tile.output, self.tile.state])
        for node in nodes:
            self.scopes[node.index] = self._scope(node)
            for arg in node.args:
                self.uses[arg.index] = self.uses.get(arg.index, 0) + 1
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
            case Map() | Valid():
                return inner
            case Expand():
                return max(inner, TOKEN)
            case Sum(axis="k" | "v"):
                return max(inner, TOKEN)
            case _:
                return max(inner, CHUNK)

    # ---- statements

    def emit(self, node: Node, text: str, binds: int, scope: int, *, plain: bool, name: str = "") -> str:
        """A reference to the value of `text`, whose outermost operator binds as strongly as `binds`."""
        if (scope, text) in self.texts:
            return self.texts[scope, text]
        label = name or self.tile.graph.names.get(node.index, "")
        label = self.fresh(label) if label else f"$x{len(self.statements)}"
        lead = LEAD.get(scope, CHUNKS)
        shape = ", ".join((*lead, *(EXTENT[a] for a in self.trail(node, scope))))
        if scope == TOKEN and "t" not in node.axes:
            shape = ", ".join(("H", *(EXTENT[a] for a in node.axes)))
        line = f" {self.tile.form.normal.name}.rec:{node.line}" if node.line else ""
        self.statements.append(Statement(label, text, binds, scope, plain, f"[{shape}]{line}"))
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
            text = self.value(node, TOKEN) if scope != TOKEN else self._compute(node, TOKEN)
            return text if scope in (TOKEN, LOOP) else f"{text}[:, None]"
        if scope == TOKEN:
            return self._compute(node, TOKEN)
        if scope == LOOP:
            return self._carry(node)
        inner = self.value(node, TOKEN)
        name = node.op.name if isinstance(node.op, Load) else self.tile.graph.names.get(node.index, "")
        if isinstance(node.op, Load):
            self.taken.discard(name)
        return self.emit(node, f"_tiles({self.bind(inner, 0)}, $N, $C)", 9, TILE, plain=False, name=name)

    def _carry(self, node: Node) -> str:
        """A chunk value in the loop over chunks."""
        source = self.value(node, CHUNK)
        if node.index not in self.carried:
            label = self.tile.graph.names.get(node.index, "") or (node.op.name if isinstance(node.op, Load) else "")
            self.carried[node.index] = (self.fresh(f"{label}_n") if label else f"$x_n{len(self.carried)}", self.pin(source))
        return self.carried[node.index][0]

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
        def emit(text: str, binds: int, *, plain: bool) -> str:
            return self.emit(node, text, binds, scope, plain=plain)

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
                return emit(f"-{self.spread(node.args[1], node, scope, 3)}", 3, plain=True)
            case Map(fn="mul"):
                x, y = (self.spread(a, node, scope, b) for a, b in zip(node.args, (2, 3), strict=True))
                return emit(f"{x} * {y}", 2, plain=True)
            case Map(fn=fn, exponent=exponent):
                text, binds = _elementwise(fn, [self.spread(a, node, scope, 9) for a in node.args], exponent)
                return emit(text, binds, plain=True)
            case Expand():
                return self._expand(node, scope)
            case Valid():
                return self.value(node.args[0], scope)  # rows behind the end are cut in as zeros
            case Sum(axis=axis):
                trail = self.trail(node.args[0], scope)
                return emit(f"{arg(0, 9)}.sum({trail.index(axis) - len(trail)})", 9, plain=True)
            case Along():
                return self.value(node.args[0], scope)
            case Segment(reverse=reverse, exclusive=exclusive):
                place = node.axes.index("t") - len(node.axes)
                return emit(f"_segment_sum({arg(0)}, {place}, {reverse}, {exclusive})", 9, plain=True)
            case Rows() if isinstance(node.args[0].op, Segment) and not node.args[0].op.exclusive:
                gate = node.args[0].args[0]  # the last of its cumulative sums is its sum
                return emit(f"{self.bind(self.value(gate, scope), 9)}.sum({gate.axes.index('t') - len(gate.axes)})", 9, plain=True)
            case Rows():
                return emit(f"{arg(0, 9)}.select({node.args[0].axes.index('t') - len(node.args[0].axes)}, -1)", 9, plain=True)
            case Score(decay="key", causal=causal):
                a, kappa, read, write, _ = node.args
                rows = ", ".join(self.spread(x, read, scope, 0) for x in (a, kappa, read.args[0]))
                before = ", ".join(str(isinstance(x.op, Segment) and x.op.exclusive) for x in (read, write))
                own = " * ".join(self.spread(x, read, scope, 3) for x in (a, kappa))
                diagonal = f" + torch.diag_embed(({own}).sum(-1))" if causal else ""
                return emit(f"_score({rows}, {before}){diagonal}", 1 if causal else 9, plain=False)
            case Score() | Pull() | Scatter() | Side():
                raise VerifyError(f"{node.op} has no place in plain torch")
            case Mask(kind="strict" | "causal" as kind):
                return emit(f"{arg(0, 9)}.tril({-1 if kind == 'strict' else 0})", 9, plain=True)
            case Mask(kind=kind):
                raise VerifyError(f"a mask {kind} has no place in plain torch")
            case Decay(strict=strict):
                return emit(f"_decay({', '.join(arg(i) for i in range(4))}, {strict})", 9, plain=False)
            case Diagonal():
                return emit(f"torch.diag_embed({arg(0)})", 9, plain=True)
            case TakeDiagonal():
                return emit(f"{arg(0, 9)}.diagonal(dim1=-2, dim2=-1)", 9, plain=True)
            case Inverse():
                return emit(f"_inverse({arg(0)})", 9, plain=False)
            case Dot():
                return emit(self._dot(node, scope), 2, plain=True)
            case _:
                assert_never(node.op)

    def _add(self, node: Node, scope: int) -> str:
        first, second = node.args
        if (
            isinstance(second.op, Map)
            and second.op.fn == "mul"
            and is_number(second.args[0], -1.0)
            and self.scopes[second.index] == self.scopes[node.index]
        ):
            text = f"{self.spread(first, node, scope, 1)} - {self.spread(second.args[1], node, scope, 2)}"
        else:
            text = f"{self.spread(first, node, scope, 1)} + {self.spread(second, node, scope, 1)}"
        return self.emit(node, text, 1, scope, plain=True)

    def spread(self, arg: Node, node: Node, scope: int, binds: int) -> str:
        """The argument of an elementwise operation, broadcast to the axes of `node`."""
        text = self.value(arg, scope)
        if self.scopes[arg.index] == NUMBER:
            return text
        index = _index(self.trail(arg, scope), self.trail(node, scope))
        return f"{self.bind(text, 9)}[{index}]" if index else self.bind(text, binds)

    def _expand(self, node: Node, scope: int) -> str:
        inner = node.args[0]
        extent = {"t": "$C", "s": "$C", "k": "K", "v": "V"}
        lead = (e if e != "N" else "$N" for e in LEAD.get(scope, CHUNKS))
        shape = ", ".join((*lead, *(extent[a] for a in self.trail(node, scope))))
        if self.scopes[inner.index] == NUMBER:
            text = f"torch.full(({shape}), float({self._number(inner)}), dtype=$dtype, device=$device)"
        else:
            text = f"{self.spread(inner, node, scope, 9)}.expand({shape})"
        return self.emit(node, text, 9, scope, plain=True)

    def _dot(self, node: Node, scope: int) -> str:
        assert isinstance(node.op, Dot)
        left, right, out = split_spec(node.op.spec)
        x, y = node.args
        contracted = next(c for c in left if c in right and c not in out)
        if out[0] not in left:
            left, right, x, y = right, left, y, x
        first = self.bind(self.value(x, scope), 2 if left == out[0] + contracted else 9)
        second = self.bind(self.value(y, scope), 3 if right == contracted + out[1] else 9)
        return f"{first}{'' if left == out[0] + contracted else '.mT'} @ {second}{'' if right == contracted + out[1] else '.mT'}"

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
            inner = self.resolve(self.statements[index].text)
            return f"({inner})" if self.statements[index].binds < binds else inner

        return _REFERENCE.sub(replace, text)


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
        case "log" | "finite" | "resets":
            return f"_{fn}({x})", 9
        case "pow":
            named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 2.0: "square"}
            return (f"{x}.{named[exponent]}()", 9) if exponent in named else (f"{x} ** {exponent!r}", 4)
        case _:
            raise ValueError(f"no torch for {fn}")
