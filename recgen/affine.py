"""affine: the symbolic execution of a spec's lines.

Every value is a sum of terms that are affine in the state: a constant factor A, or L S_n R (L S_n^T R), where S_n is the
state after n assignments within the token and A, L, R have rank one or are diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import sympy
from sympy import Expr, Integer, Pow

from recgen.elementwise import L2_EPS, apply, number, reduce, symbol
from recgen.errors import SpecError, VerifyError
from recgen.spec import (
    SCALAR,
    STATE,
    Binary,
    Call,
    Dim,
    Eye,
    Grad,
    Line,
    Name,
    Neg,
    Node,
    Number,
    Shape,
    Spec,
    Transpose,
)

ZERO, ONE = Integer(0), Integer(1)
NOT_REAL = (sympy.I, sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)


@dataclass(frozen=True, slots=True)
class Diag:
    """The square matrix with d on its diagonal."""

    dim: Dim
    d: Expr


@dataclass(frozen=True, slots=True)
class Outer:
    """a b^T, a along rows, b along cols; a dimension "1" makes it a row or a scalar."""

    rows: Dim
    cols: Dim
    a: Expr
    b: Expr


Factor = Diag | Outer


@dataclass(frozen=True, slots=True)
class Term:
    """left, or left S_version right, or left S_version^T right."""

    left: Factor
    version: int | None = None
    flipped: bool = False
    right: Factor | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A sum of terms of one shape."""

    shape: Shape
    terms: tuple[Term, ...]

    def static(self) -> Expr:
        """The expression of a scalar or a row that is free of the state."""
        total = ZERO
        for t in self.terms:
            if t.version is not None or not isinstance(t.left, Outer) or self.shape[1] != "1":
                raise VerifyError("not a static row")
            total += t.left.a * t.left.b
        return total


@dataclass(frozen=True, slots=True)
class Step:
    """One assignment of the state (version n -> n + 1), or the output."""

    value: Value
    line: int
    col: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What the lines of a spec do, in order."""

    steps: tuple[Step, ...]
    output: Step


def row(shape: Shape, expr: Expr) -> Value:
    """A static scalar, key row or value row."""
    return Value(shape, () if expr == 0 else (Term(Outer(shape[0], shape[1], expr, ONE)),))


def execute(spec: Spec) -> Trace:
    """Run the lines on symbols."""
    return _Run(spec).lines()


class _Run:
    """The algebra over one table of inputs, and the values of the names so far."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.inputs = spec.inputs
        self.env: dict[str, Value] = {}
        self.steps: list[Step] = []

    def lines(self) -> Trace:
        output: Step | None = None
        self.env["S"] = self.state(0)
        for n in self.spec.lines:
            if n.target == "S":
                value = self.transition(n.value, n.line, n.col)
                self.check(value, n)
                self.steps.append(Step(value, n.line, n.col))
                self.env["S"] = self.state(len(self.steps))
            else:
                value = self.eval(n.value)
                self.check(value, n)
                self.env[n.target] = value
                if n.target == "o":
                    output = Step(value, n.line, n.col)
        if output is None:
            raise VerifyError("no output")
        return Trace(tuple(self.steps), output)

    def check(self, value: Value, line: Line) -> None:
        """Refuse what SymPy finds to be no real number: a division by zero, the root of a negative number."""
        for expr in (x for t in value.terms for f in (t.left, t.right) if f is not None for x in _parts(f)):
            if expr.has(*NOT_REAL):
                source = self.spec.source.split("\n")[line.line - 1]
                hint = "look for a division by zero, or a root or logarithm of a number that is not positive"
                raise SpecError(self.spec.path, line.line, line.col, f"{line.target} is not a real number", hint=hint, source=source)

    @staticmethod
    def state(version: int) -> Value:
        return Value(STATE, (Term(Diag("v", ONE), version, False, Diag("k", ONE)),))

    # a line S = ...

    def transition(self, node: Node, line: int, col: int) -> Value:
        """The new state. S @ M1 @ M2 with several matrices of low rank becomes one assignment for each of them."""
        parts = list(_summands(node, 1))
        chains = [(sign, c) for sign, p in parts if (c := _chain(p)) is not None]
        if len(chains) != 1:
            return self.eval(node)
        sign, (left, right) = chains[0]
        rest = self.sum(STATE, [self.signed(s, self.eval(p)) for s, p in parts if _chain(p) is None])
        now = self.env["S"]
        scale, low_rank = ONE, 0
        for side, factor in [("right", x) for x in right] + [("left", x) for x in reversed(left)]:
            value = self.eval(factor)
            if factor.shape == SCALAR:
                scale *= value.static()
                continue
            if any(isinstance(t.left, Outer) for t in value.terms):
                if low_rank:
                    self.steps.append(Step(now, line, col))
                    now = self.state(len(self.steps))
                low_rank += 1
            now = self.matmul(now, value) if side == "right" else self.matmul(value, now)
        return self.sum(STATE, [self.scale(sign * scale, now), rest])

    def signed(self, sign: int, x: Value) -> Value:
        return x if sign > 0 else self.scale(Integer(-1), x)

    # expressions

    def eval(self, node: Node) -> Value:
        """The value of a node at this point of the spec."""
        match node:
            case Number(value=value):
                return row(SCALAR, number(value))
            case Name(name=name):
                return self.env[name] if name in self.env else row(node.shape, symbol(name))
            case Eye():
                return Value(node.shape, (Term(Diag(node.shape[0], ONE)),))
            case Neg(x=x):
                return self.scale(Integer(-1), self.eval(x))
            case Transpose(x=x):
                return self.transpose(self.eval(x))
            case Call(fn=fn, args=args):
                return self.call(fn, [self.eval(a) for a in args], node.shape)
            case Grad(objective=objective):
                return self.gradient(objective)
            case Binary(op="+" | "-", x=x, y=y):
                parts = [self.eval(x), self.signed(1 if node.op == "+" else -1, self.eval(y))]
                return self.sum(node.shape, [self.broadcast(p, node.shape) for p in parts])
            case Binary(op="@", x=x, y=y):
                return self.matmul(self.eval(x), self.eval(y))
            case Binary(op="*", x=x, y=y):
                return self.times(self.eval(x), self.eval(y))
            case Binary(op="/", x=x, y=y):
                return self.times(self.eval(x), row(y.shape, Pow(self.eval(y).static(), -1)))
            case Binary(op="**", x=x, y=y):
                return row(node.shape, Pow(self.eval(x).static(), self.eval(y).static()))
        raise VerifyError(f"no value for {node}")

    def call(self, fn: str, args: list[Value], shape: Shape) -> Value:
        """An elementwise function or a reduction."""
        if fn == "dot":
            return self.matmul(self.transpose(args[0]), args[1])
        x, axis = args[0].static(), args[0].shape[0]
        if fn in ("norm", "norm2", "l2norm"):
            square = reduce("k" if axis == "k" else "v", x * x, self.inputs)
            if fn == "norm2":
                return row(shape, square)
            return row(shape, Pow(square, number(0.5)) if fn == "norm" else x * Pow(square + L2_EPS, number(-0.5)))
        return row(shape, apply(fn, x))

    def sum(self, shape: Shape, parts: list[Value]) -> Value:
        """The sum; static rows are collected into one term."""
        terms = [t for p in parts for t in p.terms]
        if shape[1] != "1":
            return Value(shape, tuple(terms))
        static = Value(shape, tuple(t for t in terms if t.version is None)).static()
        return Value(shape, row(shape, static).terms + tuple(t for t in terms if t.version is not None))

    def broadcast(self, x: Value, shape: Shape) -> Value:
        """A scalar beside a row stands for the row that repeats it."""
        if x.shape == shape:
            return x
        return self.matmul(row(shape, ONE), x)

    def transpose(self, x: Value) -> Value:
        terms = [Term(_turn(t.left)) if t.right is None else Term(_turn(t.right), t.version, not t.flipped, _turn(t.left)) for t in x.terms]
        return Value((x.shape[1], x.shape[0]), tuple(terms))

    def matmul(self, x: Value, y: Value) -> Value:
        """x y; at most one of each pair of terms reads the state."""
        shape = (x.shape[0], y.shape[1])
        terms = [self.product(a, b) for a in x.terms for b in y.terms]
        return self.sum(shape, [Value(shape, tuple(t for t in terms if t is not None))])

    def product(self, x: Term, y: Term) -> Term | None:
        if x.right is None and y.right is None:
            left = self.compose(x.left, y.left)
            return None if left is None else Term(left)
        if x.right is None:
            left = self.compose(x.left, y.left)
            return None if left is None else replace(y, left=left)
        if y.right is not None:
            raise VerifyError("a product of two reads")
        right = self.compose(x.right, y.left)
        return None if right is None else replace(x, right=right)

    def compose(self, x: Factor, y: Factor) -> Factor | None:
        """The product of two factors; None when it is zero."""
        match (x, y):
            case (Diag(dim=dim, d=d), Diag(d=e)):
                return Diag(dim, d * e) if d * e != 0 else None
            case (Diag(d=d), Outer(rows=r, cols=c, a=a, b=b)):
                return Outer(r, c, d * a, b) if d * a != 0 else None
            case (Outer(rows=r, cols=c, a=a, b=b), Diag(d=d)):
                return Outer(r, c, a, b * d) if b * d != 0 else None
            case (Outer(rows=r, cols=mid, a=a, b=b), Outer(cols=c, a=a2, b=b2)):
                inner = b * a2 if mid == "1" else reduce("k" if mid == "k" else "v", b * a2, self.inputs)
                return Outer(r, c, a * inner, b2) if inner * a != 0 else None
        raise VerifyError("factors that do not compose")

    def scale(self, c: Expr, x: Value) -> Value:
        """A static scalar times anything."""
        left: Callable[[Factor], Factor] = lambda f: replace(f, d=c * f.d) if isinstance(f, Diag) else replace(f, a=c * f.a)  # noqa: E731
        return Value(x.shape, tuple(replace(t, left=left(t.left)) for t in x.terms) if c != 0 else ())

    def times(self, x: Value, y: Value) -> Value:
        """The elementwise product: a scalar and anything, two rows, or a row and I."""
        if y.shape == SCALAR and x.shape != SCALAR:
            x, y = y, x
        if x.shape == SCALAR and all(t.version is None for t in x.terms):
            return self.scale(x.static(), y)
        if x.shape == SCALAR:
            return self.read_scalar_times(x, y)
        if any(t.version is not None for t in x.terms):
            x, y = y, x
        diag = Value((x.shape[0], x.shape[0]), (Term(Diag(x.shape[0], x.static())),) if x.terms else ())
        return self.matmul(diag, y)

    def read_scalar_times(self, x: Value, y: Value) -> Value:
        """A scalar that reads the state, times a static y = sum of a b^T: a x b^T."""
        terms: list[Term] = []
        for t in y.terms:
            if not isinstance(t.left, Outer):
                raise VerifyError("a multiple of I that reads the state")
            a = Value((t.left.rows, "1"), (Term(Outer(t.left.rows, "1", t.left.a, ONE)),))
            b = Value(("1", t.left.cols), (Term(Outer("1", t.left.cols, ONE, t.left.b)),))
            terms += self.matmul(a, self.matmul(x, b)).terms
        return Value(y.shape, tuple(terms))

    # gradients

    def gradient(self, node: Node) -> Value:
        """d node / d S, for a scalar built from norm2, dot, static factors and sums."""
        if node.degree == 0:
            return Value(STATE, ())
        match node:
            case Neg(x=x):
                return self.scale(Integer(-1), self.gradient(x))
            case Binary(op="+" | "-", x=x, y=y):
                return self.sum(STATE, [self.gradient(x), self.signed(1 if node.op == "+" else -1, self.gradient(y))])
            case Binary(op="*", x=x, y=y):
                c, rest = (x, y) if x.degree == 0 else (y, x)
                return self.scale(self.eval(c).static(), self.gradient(rest))
            case Binary(op="/", x=x, y=y):
                return self.scale(Pow(self.eval(y).static(), -1), self.gradient(x))
            case Call(fn="norm2", args=(x,)):
                value = self.eval(x)
                return self.scale(Integer(2), self.pull(value, value))
            case Call(fn="dot", args=(x, y)):
                a, b = self.eval(x), self.eval(y)
                return self.sum(STATE, [self.pull(a, b), self.pull(b, a)])
            case Binary(op="@", x=x, y=y):
                a, b = self.transpose(self.eval(x)), self.eval(y)
                return self.sum(STATE, [self.pull(a, b), self.pull(b, a)])
        raise VerifyError(f"no gradient of {node}")

    def pull(self, x: Value, y: Value) -> Value:
        """d <x, y> / d S with y held: L^T y R^T for a term L S R of x, R y^T L for L S^T R."""
        out = []
        for t in x.terms:
            if t.right is not None:
                left = Value(_shape(t.left), (Term(t.left),))
                right = Value(_shape(t.right), (Term(t.right),))
                if t.flipped:
                    out.append(self.matmul(self.matmul(right, self.transpose(y)), left))
                else:
                    out.append(self.matmul(self.matmul(self.transpose(left), y), self.transpose(right)))
        return self.sum(STATE, out)


def _shape(f: Factor) -> Shape:
    return (f.dim, f.dim) if isinstance(f, Diag) else (f.rows, f.cols)


def _parts(f: Factor) -> tuple[Expr, ...]:
    return (f.d,) if isinstance(f, Diag) else (f.a, f.b)


def _turn(f: Factor) -> Factor:
    return f if isinstance(f, Diag) else Outer(f.cols, f.rows, f.b, f.a)


def _summands(node: Node, sign: Literal[1, -1] | int) -> list[tuple[int, Node]]:
    """node as a signed sum."""
    match node:
        case Neg(x=x):
            return _summands(x, -sign)
        case Binary(op="+" | "-", x=x, y=y) if x.shape == y.shape:
            return _summands(x, sign) + _summands(y, sign if node.op == "+" else -sign)
    return [(sign, node)]


def _chain(node: Node) -> tuple[list[Node], list[Node]] | None:
    """The static factors on the left and on the right of S in a plain product; None when node is something else."""
    factors = _factors(node)
    at = [i for i, f in enumerate(factors) if isinstance(f, Name) and f.name == "S"]
    if len(at) != 1 or any(f.degree for i, f in enumerate(factors) if i != at[0]):
        return None
    left, right = factors[: at[0]], factors[at[0] + 1 :]
    fits = all(f.shape in (SCALAR, ("v", "v")) for f in left) and all(f.shape in (SCALAR, ("k", "k")) for f in right)
    return (left, right) if fits else None


def _factors(node: Node) -> list[Node]:
    match node:
        case Binary(op="@" | "*", x=x, y=y) if node.shape not in (("k", "k"), ("v", "v")) or node.degree:
            return _factors(x) + _factors(y)
        case Binary(op="@", x=x, y=y) if "1" not in x.shape + y.shape:
            return _factors(x) + _factors(y)
        case Neg(x=x) if node.shape == STATE:
            return [Number(-1, shape=SCALAR, degree=0, line=node.line, col=node.col), *_factors(x)]
    return [node]
