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
    """Why two shapes do not fit; hint may use {x} {y}, their transposes {xt} {yt}, and {bare_x} {bare_y} in a call."""

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
    written = outer(a, b)
    hint: str | None
    match (a, b):
        case (("k" | "v", "1"), ("k" | "v", "1")) if a == b:
            hint = "an elementwise product is {x} * {y}, an inner product is {xt} @ {y}, an outer product is {x} @ {yt}"
        case (("1", "k" | "v"), ("1", "k" | "v")) if a == b:
            hint = "an inner product is {x} @ {yt}"
        case _ if written:
            hint = f"the state is value x key: an outer product is written {written}"
        case (("v", "k"), ("v", "1")):
            hint = "the state is value x key: it is read with a key row, S @ k; a value row reads {xt} @ {y}"
        case (("k", "v"), ("k", "1")):
            hint = "the state is value x key: a key row reads {xt} @ {y}"
        case (("k", "1"), ("v", "k")):
            hint = "a key row reads {y} @ {x}; a decay by key channel is {y} @ diag({bare_x})"
        case (("v", "1"), ("v", "k")):
            hint = "a value row reads {yt} @ {x}; a decay by value channel is diag({bare_x}) @ {y}"
        case (("1", "k"), ("v", "k")):
            hint = "a read is {y} @ {xt}"
        case (("v", "k"), ("v", "v")) | (("k", "k"), ("v", "k")):
            hint = "value x value matrices stand on the left of the state, key x key matrices on the right: {y} @ {x}"
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
    written = outer(a, b)
    match (a, b):
        case _ if written:
            hint = f"an outer product is {written}"
        case (("k" | "v", "1"), ("1", "k" | "v")):
            hint = "an outer product is {x} @ {y}"
        case (("1", "k" | "v"), ("k" | "v", "1")):
            hint = "an inner product is {x} @ {y}"
        case (("k", "1"), ("v", "k")):
            hint = "scale the key axis with {y} @ diag({bare_x}); a read is {y} @ {x}"
        case (("v", "k"), ("k", "1")):
            hint = "scale the key axis with {x} @ diag({bare_y}); a read is {x} @ {y}"
        case (("v", "k"), ("1", "k")):
            hint = "scale the key axis with {x} @ diag({yt})"
        case (("1", "k"), ("v", "k")):
            hint = "scale the key axis with {y} @ diag({xt})"
        case (("v", "1"), ("v", "k")):
            hint = "scale the value axis with diag({bare_x}) @ {y}"
        case (("v", "k"), ("v", "1")):
            hint = "scale the value axis with diag({bare_y}) @ {x}"
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
        hint = "the identity matrix is `I`, a multiple of it `x * I`" if STATE not in (a, b) else "a write is an outer product, v @ k.T"
        return Mismatch("a scalar added to a matrix", expected, hint)
    if {a, b} == {KEY, VALUE}:
        return Mismatch("a key row and a value row do not add", expected, None)
    if (a[1], a[0]) == b:
        turned = "write {xt}" if b == STATE else "write {yt}"
        hint = f"the state is value x key: {turned}" if STATE in (a, b) else turned
        return Mismatch("one of these is transposed", expected, hint)
    for matrix, row, name in ((a, b, "y"), (b, a, "x")):
        if matrix == STATE and row in ROWS:
            hint = f"{{{name}}} @ k.T" if row == VALUE else f"v @ {{{name}t}}"
            return Mismatch("a row added to a matrix", expected, f"a write is an outer product, {hint}")
        if matrix in (OPEN, row[:1] * 2) and row in ROWS:
            return Mismatch("a row added to a matrix", expected, f"the diagonal matrix of a row is diag({{bare_{name}}})")
    return Mismatch("these do not add", expected, None)


def outer(a: Shape, b: Shape) -> str | None:
    """How the outer product of a key row and a value row is written, of either orientation; None for other shapes."""
    match (a, b):
        case (("v", "1") | ("1", "v"), ("k", "1") | ("1", "k")):
            value, key, names = a, b, "xy"
        case (("k", "1") | ("1", "k"), ("v", "1") | ("1", "v")):
            value, key, names = b, a, "yx"
        case _:
            return None
    left = names[0] + ("t" if value[0] == "1" else "")
    right = names[1] + ("t" if key[1] == "1" else "")
    return f"{{{left}}} @ {{{right}}}"
