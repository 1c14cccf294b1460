"""show_maths: what the values of a tile graph are called, and their operations in readable maths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from .meaning import RESET
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
    topological,
)
from .tile import TileGraph

FOLD = 44  # a value that is used once and has no name is written into its user when it is at most this long
PHRASE, SUM, MATMUL, PRODUCT, ATOM = range(5)  # how strongly the outermost operation of a text binds
LEAVES = {"state": "S0", "dstate": "dS1", "do": "dO"}


class Names:
    """What every node is called, and its operation in readable maths."""

    def __init__(self, tile: TileGraph) -> None:
        self.tile = tile
        self.targets = _targets(tile)
        self.nodes = topological(self.targets)
        self.users: dict[int, list[Node]] = {n.index: [] for n in self.nodes}
        for node in self.nodes:
            for arg in node.args:
                self.users[arg.index].append(node)
        self.phase = {n.index: p for p, n in _phases(tile, self.nodes)}
        self.names = self._names()
        self.folded: dict[int, tuple[str, int]] = {}
        for node in self.nodes:
            self._fold(node)

    def _names(self) -> dict[int, str]:
        """The graph's names, told apart where two nodes share one by a _ behind the later."""
        given = self.tile.graph.names
        names = {n.index: _leaf(n.op) for n in self.nodes if isinstance(n.op, Load)}
        names |= {n.index: given[n.index] for n in self.targets if n.index in given}
        taken = set(names.values()) | {i.name for i in self.tile.form.normal.inputs}
        for node in self.nodes:
            if node.index in names:
                continue
            name = given.get(node.index, f"x{node.index}")
            while name in taken:
                name += "_"
            taken.add(name)
            names[node.index] = name
        return names

    def _fold(self, node: Node) -> None:
        """Decides whether the node is written inside what uses it."""
        match node.op:
            case Load():
                self.folded[node.index] = self.names[node.index], ATOM
            case Const(value=value):
                self.folded[node.index] = (value if isinstance(value, str) else f"{value:g}"), ATOM
            case Expand() if node not in self.targets:
                self.folded[node.index] = self.bound(node.args[0])
            case Along() if node not in self.targets:
                self.folded[node.index] = _transposed(*self.bound(node.args[0]))
            case _:
                if len(self.users[node.index]) != 1 or node.index in self.tile.graph.names or node in self.targets:
                    return
                (user,) = self.users[node.index]
                text, binds = self.maths(node)
                chain = _is_map(node, "add") and _is_map(user, "add")
                if (chain or _is_map(user, "exp") or len(text) <= FOLD) and self.phase[user.index] == self.phase[node.index]:
                    self.folded[node.index] = text, binds

    def shown(self) -> list[Node]:
        """The nodes with a line of their own."""
        return [n for n in self.nodes if n.index not in self.folded]

    def parts(self, node: Node) -> list[Node]:
        """The node and all that is written inside its line."""
        own = [node]
        for arg in node.args:
            if arg.index in self.folded and not isinstance(arg.op, Load | Const):
                own += self.parts(arg)
        return own

    # maths

    def bound(self, node: Node) -> tuple[str, int]:
        """How the value of a node is written where it is used, and how strongly that binds."""
        return self.folded.get(node.index) or (self.names[node.index], ATOM)

    def paren(self, node: Node, least: int) -> str:
        text, binds = self.bound(node)
        return text if binds >= least else f"({text})"

    def maths(self, node: Node) -> tuple[str, int]:
        """The operation of a node."""
        first = node.args[0] if node.args else node
        match node.op:
            case Map(fn=fn, exponent=exponent):
                return self._map(node, fn, exponent)
            case Dot(spec=spec):
                return self._dot(node, spec)
            case Sum(axis=axis):
                return f"sum_{axis}({self.bound(first)[0]})", ATOM
            case Segment(size=size, reverse=reverse, exclusive=exclusive):
                marks = (", backwards" if reverse else "") + (", without the own token" if exclusive else "")
                return f"segment sum over {size} tokens{marks}, of {self.paren(first, MATMUL)}", PHRASE
            case Rows():
                return f"{self.paren(first, MATMUL)} at the last token", PHRASE
            case Scatter():
                return f"{self.paren(first, MATMUL)}, in the row of the last token", PHRASE
            case Score(decay=decay, causal=causal):
                a, kappa = (self.paren(x, ATOM) for x in node.args[:2])
                seen = f"s {'<=' if causal else '<'} t"
                if decay == "scalar":
                    return f"({a} {kappa}^T) * {self._between(decay, node)}, {seen}", PHRASE
                return f"sum_k({a}_t * {kappa}_s * {self._between(decay, node)}), {seen}", PHRASE
            case Pull():
                return self._pull(node, node.op), PHRASE
            case Mask(kind=kind):
                return f"{self.paren(first, MATMUL)}, s {'<=' if kind == 'causal' else '<'} t", PHRASE
            case Within():
                return self.bound(first)
            case Valid():
                return f"valid({self.bound(first)[0]})", ATOM
            case Diagonal():
                return f"diag({self.bound(first)[0]})", ATOM
            case TakeDiagonal():
                return f"diagonal({self.bound(first)[0]})", ATOM
            case Inverse():
                return f"(I - {self.paren(first, MATMUL)})^-1", ATOM
            case Expand():
                return self.bound(first)
            case Along():
                return _transposed(*self.bound(first))
            case Load() | Const() | Side() | Levels() | Decay():  # of the last three there are none before kernels are written
                return self.bound(node)
            case _:
                assert_never(node.op)

    def _map(self, node: Node, fn: str, exponent: float) -> tuple[str, int]:
        match fn:
            case "add":
                left, right = (self.paren(a, SUM) for a in node.args)
                return (f"{left} - {right[1:]}" if right.startswith("-") and not _is_sum(right) else f"{left} + {right}"), SUM
            case "mul":
                if self.bound(node.args[0])[0] == "-1" and self.bound(node.args[1])[1] == MATMUL:
                    return f"-{self.bound(node.args[1])[0]}", MATMUL
                factors = [self.paren(a, PRODUCT) for a in node.args]
                sign = sum(f.startswith("-") for f in factors) % 2
                text = " * ".join(f for f in (f.removeprefix("-") for f in factors) if f != "1")
                return f"{'-' if sign else ''}{text}", PRODUCT
            case "quotient":
                return f"{self.paren(node.args[0], PRODUCT)} / {self.paren(node.args[1], ATOM)}", PRODUCT
            case "floor":
                return f"max({self.bound(node.args[0])[0]}, {RESET:g})", ATOM
            case "pow":
                return f"{self.paren(node.args[0], ATOM)} ** {exponent:g}", PRODUCT
            case _:
                return f"{fn}({self.bound(node.args[0])[0]})", ATOM

    def _between(self, decay: str, node: Node) -> str:
        """The decay between t and s."""
        read, write = (self.paren(x, ATOM) for x in (node.args[-4:-1:2] if decay == "scalar" else node.args[-3:-1]))
        return f"exp({read}_t - {write}_s)"

    def _pull(self, node: Node, op: Pull) -> str:
        rows = [self.paren(x, ATOM) for x in node.args[1 : 2 + op.gate]]
        own, other = (rows[0], rows[-1]) if op.side == "read" else (rows[-1], rows[0])
        c, between, seen = self.paren(node.args[0], PRODUCT), self._between(op.decay, node), f"s < t{' - 1' if op.touching else ''}"
        over = "s" if op.side == "read" else "t"
        text = f"sum_{over}({c} * {other}_{over} * {between})"
        if op.gate:
            text = f"sum_k({own} * {text})" if op.decay == "scalar" else f"{own} * {text}"
        return f"{text}, {seen}"

    def _dot(self, node: Node, spec: str) -> tuple[str, int]:
        """x y^T and the like: an operand is transposed where the contracted axis does not stand in the middle."""
        left, right, out = split_spec(spec)
        inner = next(c for c in left if c in right and c not in out)
        x, y = (self.paren(a, ATOM) for a in node.args)
        return f"{x}{'^T' if left[0] == inner else ''} {y}{'^T' if right[-1] == inner else ''}", MATMUL


def _leaf(op: Load) -> str:
    return op.name if op.role == "input" else LEAVES.get(op.name, op.name)


def _is_map(node: Node, fn: str) -> bool:
    return isinstance(node.op, Map) and node.op.fn == fn


def _outside(text: str) -> str:
    """What stands outside of all brackets."""
    depth, kept = 0, []
    for c in text:
        depth -= c == ")"
        kept.append(c if depth == 0 else "")
        depth += c == "("
    return "".join(kept)


def _is_sum(text: str) -> bool:
    """Whether it has more than one term."""
    return " + " in _outside(text) or " - " in _outside(text)


def _transposed(text: str, binds: int) -> tuple[str, int]:
    """A vector over the other token axis; one that is turned twice is itself."""
    sign, body = ("-", text[1:]) if text.startswith("-") else ("", text)
    if " " in _outside(body) or (binds < PRODUCT and sign):
        return f"({text})^T", ATOM
    return sign + (body.removesuffix("^T") if body.endswith("^T") else f"{body}^T"), PRODUCT if sign else ATOM


def _targets(tile: TileGraph) -> list[Node]:
    return [tile.output, tile.state, tile.d_start, *(n for _, n in tile.d_inputs)]


def _phases(tile: TileGraph, nodes: Iterable[Node]) -> list[tuple[str, Node]]:
    """The phase of each node."""
    forward = {n.index for n in topological([tile.output, tile.state])}
    reverse = {n.index for n in topological([tile.d_start])}
    carried: set[int] = set()
    found: list[tuple[str, Node]] = []
    for node in nodes:
        if node is tile.start or any(a.index in carried for a in node.args):
            carried.add(node.index)
        if node.index in forward:
            found.append(("carried" if node.index in carried else "chunk-local", node))
        else:
            found.append(("reverse" if node.index in reverse else "gradients", node))
    return found
