"""show: the text of a TileGraph and of a Schedule: what `explain` prints of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import assert_never

from .chunk_text import columns
from .cost import Sizes, flops
from .graph import (
    Along,
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
    product_factors,
    split_spec,
    topological,
)
from .schedule import Buffer, Kernel, Schedule
from .tile import TileGraph

B, T, H = 8, 4096, 16  # of the costs of a schedule; K and V are its sizes
OPERAND, FP32 = 2, 4  # bytes
WIDTH = 88  # of an operation; a longer sum goes on on the next line
FOLD = 44  # a value that is used once and has no name is written into its user when it is at most this long
SUM, PRODUCT, MATMUL, ATOM = range(4)  # how strongly the outermost operation of a text binds

_LEAVES = {"state": "S0", "dstate": "dS1", "do": "dO"}
_PHASES = (
    ("chunk-local", "what the inputs of a chunk alone decide: all chunks at once"),
    ("carried", "what needs the state S0 that enters the chunk: from the first chunk to the last"),
    ("reverse", "what the gradient of S0 needs of dO and of the gradient dS1 of the chunk's end: from the last chunk to the first"),
    ("gradients", "the rest of the inputs' gradients, each under the first input that needs it: all chunks at once"),
)


class Names:
    """What every node is called, and its operation in readable maths."""

    def __init__(self, tile: TileGraph) -> None:
        self.tile = tile
        self.targets = _targets(tile)
        self.nodes = topological(self.targets)
        self.uses: dict[int, int] = {}
        for node in self.nodes:
            for arg in node.args:
                self.uses[arg.index] = self.uses.get(arg.index, 0) + 1
        self.phase = {n.index: p for p, n in _phases(tile, self.nodes)}
        self.names = self._names()
        self.folded: dict[int, tuple[str, int]] = {}
        for node in self.nodes:
            self._fold(node)

    def _names(self) -> dict[int, str]:
        """The graph's names, told apart where two nodes share one by a _ behind the later."""
        names: dict[int, str] = {}
        taken = {i.name for i in self.tile.form.normal.inputs} | set(_LEAVES.values())
        for node in self.nodes:
            if isinstance(node.op, Load):
                names[node.index] = _LEAVES.get(node.op.name, node.op.name) if node.op.role != "input" else node.op.name
                continue
            name = self.tile.graph.names.get(node.index, f"x{node.index}")
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
                self.folded[node.index] = f"{self.paren(node.args[0], ATOM)}^T", ATOM
            case _:
                if self.uses.get(node.index, 0) != 1 or node.index in self.tile.graph.names or node in self.targets:
                    return
                user = next(n for n in self.nodes if node in n.args)
                text, binds = self.maths(node)
                chain = isinstance(node.op, Map) and node.op.fn == "add" and isinstance(user.op, Map) and user.op.fn == "add"
                if (chain or len(text) <= FOLD) and self.phase[user.index] == self.phase[node.index]:
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
                return f"segment sum over {size} tokens{marks}, of {self.paren(first, PRODUCT)}", SUM
            case Mask(kind="level", size=size):
                return f"{self.paren(first, PRODUCT)}, t in the second and s in the first half of {2 * size} tokens", SUM
            case Mask(kind=kind):
                return f"{self.paren(first, PRODUCT)}, s {'<' if kind == 'strict' else '<='} t", SUM
            case Valid():
                return f"valid({self.bound(first)[0]})", ATOM
            case Decay():
                read, read_resets, write, write_resets = (self.names[a.index] for a in node.args)
                return f"exp({read}_t - {write}_s), s <= t, {read_resets}_t = {write_resets}_s", SUM
            case Diagonal():
                return f"diag({self.bound(first)[0]})", ATOM
            case TakeDiagonal():
                return f"diagonal({self.bound(first)[0]})", ATOM
            case Inverse():
                return f"(I - {self.paren(first, PRODUCT)})^-1", ATOM
            case Expand():
                return self.bound(first)
            case Along():
                return f"{self.paren(first, ATOM)}^T", ATOM
            case Load() | Const():
                return self.bound(node)
            case _:
                assert_never(node.op)

    def _map(self, node: Node, fn: str, exponent: float) -> tuple[str, int]:
        match fn:
            case "add":
                left, right = (self.bound(a)[0] for a in node.args)
                return (f"{left} - {right[1:]}" if right.startswith("-") and not _is_sum(right) else f"{left} + {right}"), SUM
            case "mul":
                factors = [self.paren(a, PRODUCT) for a in node.args]
                sign = sum(f.startswith("-") for f in factors) % 2
                text = " * ".join(f for f in (f.removeprefix("-") for f in factors) if f != "1")
                return f"{'-' if sign else ''}{text}", PRODUCT
            case "quotient":
                return f"{self.paren(node.args[0], PRODUCT)} / {self.paren(node.args[1], ATOM)}", PRODUCT
            case "pow":
                return f"{self.paren(node.args[0], ATOM)} ** {exponent:g}", MATMUL
            case _:
                return f"{fn}({self.bound(node.args[0])[0]})", ATOM

    def _dot(self, node: Node, spec: str) -> tuple[str, int]:
        """x y^T and the like: an operand is transposed where the contracted axis does not stand in the middle."""
        left, right, out = split_spec(spec)
        inner = next(c for c in left if c in right and c not in out)
        x, y = (self.paren(a, ATOM) for a in node.args)
        return f"({x}{'^T' if left[0] == inner else ''} {y}{'^T' if right[-1] == inner else ''})", ATOM


def _is_sum(text: str) -> bool:
    """Whether a + or - stands outside of all brackets, behind the sign."""
    depth = 0
    for before, c in zip(text, text[1:], strict=False):
        depth += (c in "([") - (c in ")]")
        if depth == 0 and before == " " and c in "+-":
            return True
    return False


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


# the tile graph


def show_graph(tile: TileGraph) -> str:
    """Every value of one chunk, forward then backward, by phase."""
    sizes, names = Sizes(t=tile.chunk), Names(tile)
    shown = [n for n in names.shown() if not isinstance(n.op, Load)]
    out = [f"tile graph of {tile.form.normal.name}: one chunk of {sizes.t} tokens, one head, K = {sizes.k}, V = {sizes.v}", ""]
    out += [*_graph_legend(tile, names), ""]
    out += _leaves(names, sizes)
    for phase, what in _PHASES:
        nodes = [n for n in shown if names.phase[n.index] == phase]
        if not nodes:
            continue
        count = sum(flops(n, sizes) for n in names.nodes if names.phase[n.index] == phase)
        out += ["", f"{phase}: {what}; {_count(count)} flops"]
        groups = _by_input(tile, nodes) if phase == "gradients" else [("", nodes)]
        rows = [_line(n, names, sizes) for _, group in groups for n in group]
        lines = iter(_table(rows))
        for label, group in groups:
            out += [f"  {label}"] if label else []
            out += [line for _ in group for line in next(lines)]
    return "\n".join(out)


def _graph_legend(tile: TileGraph, names: Names) -> list[str]:
    ops = [n.op for n in names.nodes]
    rows = [
        ("[t, k]", "axes: t the token that reads, s the one that wrote, k a key channel, v a value channel"),
        ("x y^T, x * y", "matrix product; product entry by entry, a vector repeated along the axes that it lacks; x^T of a vector: over s"),
        ("dx", "the gradient of x: reverse mode over the lines above it"),
    ]
    if any(isinstance(op, Segment) for op in ops):
        rows.append(("segment sum", "cumulative inside blocks of tokens: nothing is subtracted, so exp of a sum of log decays is at most 1"))
    if any(isinstance(op, Inverse) for op in ops):
        rows.append(("(I - L)^-1", "never differentiated: with U = (I - L)^-1 Y, dY = (I - L)^-T dU and dL = dY U^T"))
    if any(isinstance(op, Decay) for op in ops):
        rows.append(("finite, resets", "a log decay without its resets (exp of them is 0), and their count: a reset between s and t makes the decay 0"))
        rows.append(("Z", "ddecay * decay: row sums less column sums of it are the gradient of G"))
    if any(isinstance(op, Valid) for op in ops):
        rows.append(("valid(x)", "x, and 0 on the padding of a ragged last chunk"))
    if any(isinstance(op, Map) and op.fn == "quotient" for op in ops):
        rows.append(("x / y", "0 where x is 0"))
    return columns(rows)


def _leaves(names: Names, sizes: Sizes) -> list[str]:
    rows = []
    for role, what in (("input", "inputs"), ("state", "state"), ("cotangent", "gradients from outside")):
        leaves = [n for n in names.nodes if isinstance(n.op, Load) and n.op.role == role]
        rows.append((what, ", ".join(f"{names.names[n.index]} {_shape(n, sizes)}" for n in leaves)))
    return columns(rows)


def _by_input(tile: TileGraph, nodes: list[Node]) -> list[tuple[str, list[Node]]]:
    left, groups = dict.fromkeys(nodes), list[tuple[str, list[Node]]]()
    for name, target in tile.d_inputs:
        needed = [n for n in topological([target]) if n in left]
        for n in needed:
            del left[n]
        if needed:
            groups.append((f"for {name}", needed))
    return groups


def _line(node: Node, names: Names, sizes: Sizes) -> tuple[str, list[str], str, str, str]:
    """name, operation on one or several lines, shape, flops, spec line."""
    count = sum(flops(n, sizes) for n in names.parts(node))
    line = f"# {names.tile.form.normal.name}.rec:{node.line}" if node.line else ""
    return names.names[node.index], _wrap(names.maths(node)[0]), _shape(node, sizes), _count(count) if count else "", line


def _table(rows: list[tuple[str, list[str], str, str, str]]) -> list[list[str]]:
    """The lines of each row, aligned."""
    left, wide, shapes, counts = (max((len(cell) for cell in cells), default=0) for cells in (
        (r[0] for r in rows), (line for r in rows for line in r[1]), (r[2] for r in rows), (r[3] for r in rows)))
    table = []
    for name, (first, *more), shape, count, line in rows:
        head = f"  {name.ljust(left)} = {first.ljust(wide)}   {shape.ljust(shapes)}   {count.rjust(counts)}   {line}".rstrip()
        table.append([head, *(f"  {' ' * left}   {part}" for part in more)])
    return table


def _wrap(text: str) -> list[str]:
    """A long sum, cut before a + or -."""
    lines = [""]
    for part in re.split(r" (?=[+-] )", text):
        if lines[-1] and len(lines[-1]) + len(part) >= WIDTH:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return lines


def _shape(node: Node, sizes: Sizes) -> str:
    if not node.axes:
        return "a number"
    return f"[{', '.join(node.axes)}] {' x '.join(str(sizes.extent(a)) for a in node.axes)}"


def _count(value: float) -> str:
    """1.05M and the like."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
