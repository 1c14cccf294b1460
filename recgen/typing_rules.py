"""typing_rules: which shapes an operation takes, the shape it gives, and the advice when they do not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recgen.spec import KEY, SCALAR, STATE, VALUE, Binary, Dim, Eye, Grad, Neg, Node, Shape, Transpose

# function -> number of arguments
FUNCTIONS: dict[str, int] = {
    "exp": 1,
    "log": 1,
    "sigmoid": 1,
    "softplus": 1,
    "silu": 1,
    "tanh": 1,
    "sqrt": 1,
    "dot": 2,
    "norm": 1,
    "norm2": 1,
    "l2norm": 1,
    "grad": 2,
}
OPEN: Shape = ("?", "?")
ROWS = (KEY, VALUE)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why two shapes do not fit; hint may use {x} {y} and their transposes {xt} {yt}."""

    message: str
    expected: str | None
    hint: str | None


def eye(line: int, col: int) -> Node:
    """An `I` whose size is still open."""
    return Eye(shape=OPEN, degree=0, line=line, col=col)


def transpose(x: Node, line: int, col: int) -> Node:
    """x.T; the transpose of a scalar or of I is itself."""
    if x.shape in (SCALAR, OPEN):
        return x
    return Transpose(x, shape=(x.shape[1], x.shape[0]), degree=x.degree, line=line, col=col)


def grad(objective: Node, line: int, col: int) -> Node:
    """The gradient, of the state's shape; one degree less than its objective."""
    return Grad(objective, shape=STATE, degree=objective.degree - 1, line=line, col=col)


def resolve(node: Node, dim: Dim) -> Node:
    """node with every open `I` of size dim."""
    if node.shape != OPEN:
        return node
    shape: Shape = (dim, dim)
    match node:
        case Neg(x=x) | Transpose(x=x):
            return replace(node, x=resolve(x, dim), shape=shape)
        case Binary(x=x, y=y):
            return replace(node, x=resolve(x, dim), y=resolve(y, dim), shape=shape)
    return replace(node, shape=shape)


def unify(op: str, x: Node, y: Node) -> tuple[Node, Node]:
    """Give an open `I` the size that its neighbour asks for."""
    if x.shape == OPEN and y.shape != OPEN and y.shape != SCALAR:
        return resolve(x, y.shape[0]), y
    if y.shape == OPEN and x.shape != OPEN and x.shape != SCALAR:
        return x, resolve(y, x.shape[0] if op == "*" else x.shape[1])
    return x, y


def shape_of(op: str, x: Node, y: Node) -> Shape | Mismatch:
    """The shape of x op y."""
    a, b = x.shape, y.shape
    match op:
        case "@":
            return _matmul(a, b)
        case "*":
            return _times(x, y)
        case "+" | "-":
            return _plus(a, b)
        case "/":
            if b == SCALAR or (a == b and a in ROWS) or (a == SCALAR and b in ROWS):
                return a if b == SCALAR else b
            return Mismatch("these do not divide", "a divisor that is a scalar, or a row of the same kind", None)
    if a in (SCALAR, *ROWS):
        return a
    return Mismatch("a power of a matrix", "a scalar or a row as base", None)


def _matmul(a: Shape, b: Shape) -> Shape | Mismatch:
    if a[1] == b[0]:
        return (a[0], b[1])
    expected = "columns of the left factor = rows of the right one"
    hint: str | None
    match (a, b):
        case (("k" | "v", "1"), ("k" | "v", "1")) if a == b:
            hint = "an inner product is {xt} @ {y}, an outer product is {x} @ {yt}"
        case (("k", "1"), ("v", "1")):
            hint = "the state is value x key: an outer product is written {y} @ {xt}"
        case (("v", "1"), ("k", "1")):
            hint = "the state is value x key: an outer product is written {x} @ {yt}"
        case (("v", "k"), ("v", "1")):
            hint = "the state is value x key: it is read with a key row, S @ k; a value row reads {xt} @ {y}"
        case (("v" | "k", "1"), ("v", "k")):
            hint = "a read stands on the left of its row: S @ k, or S.T @ v"
        case (("1", "k"), ("v", "k")):
            hint = "a read is {y} @ {xt}"
        case (("v", "k"), ("v", "v")) | (("k", "k"), ("v", "k")):
            hint = "value x value matrices stand on the left of the state, key x key matrices on the right"
        case (("v", "k"), ("v", "k")):
            hint = "two states do not multiply: the recurrence must be linear in S"
        case _:
            hint = None
    return Mismatch("these shapes do not multiply", expected, hint)


def _times(x: Node, y: Node) -> Shape | Mismatch:
    a, b = x.shape, y.shape
    if SCALAR in (a, b):
        return b if a == SCALAR else a
    if a == b and a in ROWS:
        return a
    if a in ROWS and isinstance(y, Eye):
        return b
    expected = "a scalar and anything, or two rows of the same kind"
    hint: str | None
    match (a, b):
        case (("k", "1"), ("v", "1")):
            hint = "an outer product is {y} @ {xt}"
        case (("v", "1"), ("k", "1")):
            hint = "an outer product is {x} @ {yt}"
        case (("k", "1"), ("v", "k")):
            hint = "scale the key axis with {y} @ diag({x})"
        case (("v", "k"), ("k", "1")):
            hint = "scale the key axis with {x} @ diag({y})"
        case (("v", "1"), ("v", "k")):
            hint = "scale the value axis with diag({x}) @ {y}"
        case (("v", "k"), ("v", "1")):
            hint = "scale the value axis with diag({y}) @ {x}"
        case _ if "1" not in a and "1" not in b:
            hint = "matrices multiply with @"
        case _:
            hint = None
    return Mismatch("`*` is elementwise, and these differ in kind", expected, hint)


def _plus(a: Shape, b: Shape) -> Shape | Mismatch:
    if a == b:
        return a
    if SCALAR in (a, b) and (a in ROWS or b in ROWS):
        return a if b == SCALAR else b
    expected = "two values of the same kind"
    if SCALAR in (a, b):
        return Mismatch("a scalar added to a matrix", expected, "a multiple of the identity is `x * I`")
    if {a, b} == {KEY, VALUE}:
        return Mismatch("a key row and a value row do not add", expected, None)
    if (a[1], a[0]) == b:
        return Mismatch("one of these is transposed", expected, "the state is value x key: write {yt}" if a == STATE else "write {yt}")
    return Mismatch("these do not add", expected, None)
