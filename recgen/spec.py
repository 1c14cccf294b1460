"""spec: the typed syntax of a recurrence, what `parse` returns.

    Spec  = inputs: Input*, consts: (name, Node)*, lines: Line*
    Line  = target "=" Node
    Node  = Number | Name | Eye | Neg | Transpose | Binary | Call | Grad

Every node knows its shape (rows x columns, each 1, k or v) and its degree in the state: 0 (free of S), 1 (reads S),
and 2 only inside the objective of a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from recgen.elementwise import Input
from recgen.errors import VerifyError

Dim = Literal["1", "k", "v", "?"]  # "?": the size of an `I` that is not known yet
Shape = tuple[Dim, Dim]

SCALAR: Shape = ("1", "1")
KEY: Shape = ("k", "1")
VALUE: Shape = ("v", "1")
STATE: Shape = ("v", "k")

_SHAPE_NAMES: dict[Shape, str] = {
    SCALAR: "a scalar",
    KEY: "a key row",
    VALUE: "a value row",
    STATE: "a state (value x key)",
    ("k", "v"): "a transposed state (key x value)",
    ("k", "k"): "a key x key matrix",
    ("v", "v"): "a value x value matrix",
    ("1", "k"): "a transposed key row (key.T)",
    ("1", "v"): "a transposed value row (value.T)",
    ("?", "?"): "a multiple of I",
}


def describe(shape: Shape) -> str:
    """The shape in words, with its article."""
    return _SHAPE_NAMES[shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An expression; line and col count from 1."""

    shape: Shape
    degree: int
    line: int
    col: int

    def __str__(self) -> str:
        return show(self)


@dataclass(frozen=True, slots=True)
class Number(Node):
    value: int | float


@dataclass(frozen=True, slots=True)
class Name(Node):
    """An input, a const, a local, the state S, or a size K, V."""

    name: str


@dataclass(frozen=True, slots=True)
class Eye(Node):
    """The identity matrix; its shape says of which size."""


@dataclass(frozen=True, slots=True)
class Neg(Node):
    x: Node


@dataclass(frozen=True, slots=True)
class Transpose(Node):
    x: Node


@dataclass(frozen=True, slots=True)
class Binary(Node):
    """op is one of + - * / ** @. `x * I` with a row x is the diagonal matrix of x."""

    op: str
    x: Node
    y: Node


@dataclass(frozen=True, slots=True)
class Call(Node):
    """An elementwise function, or dot, norm, norm2, l2norm."""

    fn: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Grad(Node):
    """The gradient of a scalar objective with respect to the state."""

    objective: Node


@dataclass(frozen=True, slots=True)
class Line:
    """target = value; a target S updates the state, a target o is the output, others are locals (or rebound inputs)."""

    target: str
    value: Node
    line: int
    col: int


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed recurrence: well typed, linear in the state, every name known."""

    name: str
    doc: str
    inputs: tuple[Input, ...]
    consts: tuple[tuple[str, Node], ...]  # the defaults, as they were written
    lines: tuple[Line, ...]
    source: str
    path: str

    def __str__(self) -> str:
        out = [f"spec {self.name}"]
        consts = dict(self.consts)
        for i in self.inputs:
            out.append(f"  {i.name}: {declared(i)}" + (f" = {consts[i.name]}" if i.name in consts else ""))
        for n in self.lines:
            out.append(f"  {n.target} = {n.value}    # {self.name}.rec:{n.line}")
        return "\n".join(out)

    def verify(self) -> None:
        """Names are bound before use, S and o have their shapes, only valid degrees; raises VerifyError."""
        bound = {i.name: (_declared_shape(i), 0) for i in self.inputs}
        bound |= {"S": (STATE, 1), "K": (SCALAR, 0), "V": (SCALAR, 0)}
        if [n.target for n in self.lines].count("o") != 1:
            raise VerifyError(f"{self.name}: not exactly one output")
        for n in self.lines:
            _verify_node(n.value, bound)
            if n.value.degree > 1 or "?" in n.value.shape:
                raise VerifyError(f"{self.name}:{n.line}: not a value: {n.value}")
            if n.value.shape != {"S": STATE, "o": VALUE}.get(n.target, n.value.shape):
                raise VerifyError(f"{self.name}:{n.line}: {n.target} is {describe(n.value.shape)}")
            if n.target != "S":
                bound[n.target] = (n.value.shape, n.value.degree)


def declared(i: Input) -> str:
    """The declaration of an input, as a spec writes it."""
    if i.axes is None:
        return "const"
    kind = "key" if "k" in i.axes else "value" if "v" in i.axes else "scalar"
    domain = {"real": "", "interval": f"{i.domain.low:g}, {i.domain.high:g}"}.get(i.domain.kind, i.domain.kind)
    if "t" in i.axes:
        return kind + (f"[{domain}]" if domain else "")
    inner = ", ".join(x for x in ("" if kind == "scalar" else kind, domain) if x)
    return "head" + (f"[{inner}]" if inner else "")


def children(node: Node) -> tuple[Node, ...]:
    """The operands of a node."""
    match node:
        case Neg(x=x) | Transpose(x=x):
            return (x,)
        case Binary(x=x, y=y):
            return (x, y)
        case Call(args=args):
            return args
        case Grad(objective=objective):
            return (objective,)
    return ()


def names(node: Node) -> frozenset[str]:
    """Every name that occurs in node."""
    if isinstance(node, Name):
        return frozenset({node.name})
    return frozenset().union(*(names(c) for c in children(node)))


def _declared_shape(i: Input) -> Shape:
    axes = i.axes or ()
    return KEY if "k" in axes else VALUE if "v" in axes else SCALAR


def _verify_node(node: Node, bound: dict[str, tuple[Shape, int]]) -> None:
    match node:
        case Name(name=name) if bound.get(name) != (node.shape, node.degree):
            raise VerifyError(f"{name} at {node.line}:{node.col} has shape {node.shape}, bound as {bound.get(name)}")
        case Binary(op="@", x=x, y=y) if x.shape[1] != y.shape[0] or node.shape != (x.shape[0], y.shape[1]):
            raise VerifyError(f"shapes of {node} at {node.line}:{node.col}")
        case Transpose(x=x) if node.shape != x.shape[::-1]:
            raise VerifyError(f"shapes of {node} at {node.line}:{node.col}")
    if "?" in node.shape:
        raise VerifyError(f"size of I in {node} at {node.line}:{node.col}")
    for c in children(node):
        _verify_node(c, bound)


_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "@": 2, "**": 4}


def show(node: Node) -> str:
    """node in the language of the specs, with the fewest parentheses."""
    return _show(node)[0]


def _show(node: Node) -> tuple[str, int]:
    """The text and how strongly its outermost operator binds."""
    match node:
        case Number(value=value):
            return repr(value), 9
        case Name(name=name):
            return name, 9
        case Eye():
            return "I", 9
        case Neg(x=x):
            return "-" + _paren(x, 3), 3
        case Transpose(x=x):
            return _paren(x, 9) + ".T", 9
        case Binary(op=op, x=x, y=y):
            b = _BINDING[op]
            left, right = (b + 1, b) if op == "**" else (b, b + 1)
            return f"{_paren(x, left)} {op} {_paren(y, 3 if op == '**' else right)}", b
        case Call(fn=fn, args=args):
            return f"{fn}({', '.join(show(a) for a in args)})", 9
        case Grad(objective=objective):
            return f"grad({show(objective)}, S)", 9
    raise VerifyError(f"no text for {type(node).__name__} {[f.name for f in fields(node)]}")


def _paren(node: Node, least: int) -> str:
    text, binds = _show(node)
    return text if binds >= least else f"({text})"
