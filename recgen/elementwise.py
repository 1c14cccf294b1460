"""elementwise: how the work on inputs is written in SymPy, and what it means in NumPy.

Scalars, key rows and value rows are plain commutative expressions over the inputs' symbols; which axes an expression
varies along is looked up in the table of inputs. A reduction over an axis is `sum_k` or `sum_v`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import sympy
from sympy import Add, Expr, Mul, Pow, Symbol

from recgen.errors import VerifyError

Axis = Literal["t", "k", "v"]
AXES: tuple[Axis, ...] = ("t", "k", "v")

K = Symbol("K", integer=True, positive=True)
V = Symbol("V", integer=True, positive=True)
SIZES: dict[str, Symbol] = {"K": K, "V": V}

L2_EPS = sympy.Rational(1, 10**6)


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a value lies: the interval [low, high] (+-inf when open); kind drives sampling and errors."""

    kind: Literal["real", "log_decay", "unit", "interval", "unit_norm"]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Input:
    """A declared argument of the emitted op.

    axes is what varies: ("t",) scalar [B,T,H]; ("t","k") key [B,T,H,K]; ("t","v") value [B,T,H,V];
    () head [H]; ("k",) head[key] [H,K]; ("v",) head[value] [H,V]; None for a const (a Python number).
    """

    name: str
    axes: tuple[Axis, ...] | None
    domain: Domain
    default: Expr | None  # of a const: an expression in the symbols K and V, None otherwise
    line: int


class sigmoid(sympy.Function):  # type: ignore[misc]
    """1 / (1 + exp(-x))."""

    nargs = 1
    is_real = True
    is_positive = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """s (1 - s)."""
        return self * (1 - self)


class softplus(sympy.Function):  # type: ignore[misc]
    """log(1 + exp(x))."""

    nargs = 1
    is_real = True
    is_positive = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """sigmoid(x)."""
        return sigmoid(self.args[0])


class silu(sympy.Function):  # type: ignore[misc]
    """x sigmoid(x)."""

    nargs = 1
    is_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """s (1 + x (1 - s)), s = sigmoid(x)."""
        x = self.args[0]
        return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


class sum_k(sympy.Function):  # type: ignore[misc]
    """The sum over the key axis; build it with `reduce`, which takes factors out."""

    nargs = 1
    is_real = True


class sum_v(sympy.Function):  # type: ignore[misc]
    """The sum over the value axis; build it with `reduce`, which takes factors out."""

    nargs = 1
    is_real = True


def symbol(name: str) -> Symbol:
    """The symbol of an input (or of a size, K and V)."""
    return SIZES.get(name) or Symbol(name, real=True)


def number(value: int | float) -> Expr:
    """A literal of the spec, exactly as its decimal digits say: 0.1 is 1/10."""
    return sympy.Integer(value) if isinstance(value, int) else sympy.Rational(repr(value))


def apply(fn: str, x: Expr) -> Expr:
    """The elementwise function named fn, applied."""
    match fn:
        case "exp":
            return sympy.exp(x)
        case "log":
            return sympy.log(x)
        case "sqrt":
            return sympy.sqrt(x)
        case "tanh":
            return sympy.tanh(x)
        case "sigmoid":
            return sigmoid(x)
        case "softplus":
            return softplus(x)
        case "silu":
            return silu(x)
    raise VerifyError(f"no elementwise function {fn!r}")


def axes_of(expr: Expr, inputs: Sequence[Input]) -> tuple[Axis, ...]:
    """What expr varies along, in the order t, k, v."""
    found = _axes(expr, {i.name: i.axes or () for i in inputs})
    return tuple(a for a in AXES if a in found)


def _axes(expr: Expr, table: Mapping[str, tuple[Axis, ...]]) -> frozenset[Axis]:
    if isinstance(expr, Symbol):
        if expr.name in SIZES:
            return frozenset()
        if expr.name not in table:
            raise VerifyError(f"{expr.name} is not an input")
        return frozenset(table[expr.name])
    found: frozenset[Axis] = frozenset().union(*(_axes(a, table) for a in expr.args))
    if isinstance(expr, sum_k):
        return found - {"k"}
    if isinstance(expr, sum_v):
        return found - {"v"}
    return found


def factors(expr: Expr, axis: Axis, inputs: Sequence[Input]) -> tuple[Expr, Expr]:
    """expr = c * x: c the factors that do not vary along axis, x the others."""
    c: list[Expr] = []
    x: list[Expr] = []
    for f in Mul.make_args(expr):
        (x if axis in axes_of(f, inputs) else c).append(f)
    return Mul(*c), Mul(*x)


def reduce(axis: Literal["k", "v"], expr: Expr, inputs: Sequence[Input]) -> Expr:
    """The sum of expr over axis, with what does not vary along it outside. A sum is not split: it may cancel."""
    if expr == 0:
        return expr
    c, x = factors(expr, axis, inputs)
    if x == 1:
        return c * SIZES[axis.upper()]
    return c * (sum_k(x) if axis == "k" else sum_v(x))


def bounds(expr: Expr, inputs: Sequence[Input]) -> tuple[float, float]:
    """An interval that contains expr for all inputs in their domains; (-inf, inf) where nothing is known."""
    unknown = (-math.inf, math.inf)
    if isinstance(expr, Symbol):
        if expr.name in SIZES:
            return 1.0, math.inf
        domain = next(i.domain for i in inputs if i.name == expr.name)
        return domain.low, domain.high
    if expr.is_Atom:
        return float(expr), float(expr)
    args = [bounds(a, inputs) for a in expr.args]
    low, high = args[0]
    match expr:
        case Add():
            return math.fsum(a for a, _ in args), math.fsum(b for _, b in args)
        case Mul():
            for a, b in args[1:]:
                ends = [0.0 if 0 in (x, y) else x * y for x in (low, high) for y in (a, b)]
                low, high = min(ends), max(ends)
            return low, high
        case sympy.exp():
            return (math.exp(low) if low < 700 else math.inf), (math.exp(high) if high < 700 else math.inf)
        case sympy.log() if low >= 0:
            return (math.log(low) if low > 0 else -math.inf), (math.log(high) if high > 0 else -math.inf)
        case sympy.tanh():
            return math.tanh(low), math.tanh(high)
        case sigmoid():
            return 0.0, 1.0
        case softplus() | sympy.Abs():
            return 0.0, math.inf
        case Pow() if low > 0 and expr.exp == -1:
            return 1 / high, 1 / low
        case Pow() if low >= 0 or (expr.exp.is_Integer and expr.exp % 2 == 0):
            return 0.0, math.inf
        case sum_k() | sum_v() if low >= 0:
            return 0.0, math.inf
    return unknown


def align(env: Mapping[str, Any], inputs: Sequence[Input]) -> dict[str, Any]:
    """Arrays [T], [T,K], [T,V], [], [K], [V] of one head -> broadcastable [T,K,V], with 1 where an axis is missing.

    The sizes K and V are read off; a const that env lacks takes its default.
    """
    out: dict[str, Any] = {}
    for i in inputs:
        if i.axes is not None:
            x = env[i.name]
            sizes = iter(x.shape)
            out[i.name] = x.reshape(tuple(next(sizes) if a in i.axes else 1 for a in AXES))
            for a, n in zip(i.axes, x.shape, strict=True):
                out[a.upper()] = n
    for i in inputs:
        if i.axes is None:
            assert i.default is not None
            given = env.get(i.name)
            sizes_of = {s: out[n] for n, s in SIZES.items() if n in out}
            out[i.name] = float(i.default.subs(sizes_of)) if given is None else given
    return out


def evaluate(expr: Expr, env: Mapping[str, Any], xp: ModuleType) -> Any:
    """The value of expr, where env gives arrays of the aligned layout [T,K,V] (see `align`) or numbers; xp is numpy or torch."""
    if isinstance(expr, Symbol):
        return env[expr.name]
    if expr.is_Atom:
        return float(expr)
    args = [evaluate(a, env, xp) for a in expr.args]
    x = args[0]
    match expr:
        case Add():
            return sum(args[1:], start=x)
        case Mul():
            return math.prod(args[1:], start=x)
        case Pow():
            return _power(x, expr.args[1], args[1])
        case sum_k():
            return x.sum(axis=-2, keepdims=True)
        case sum_v():
            return x.sum(axis=-1, keepdims=True)
        case sigmoid():
            return 0.5 * (1 + _unary("tanh", 0.5 * x, xp))
        case silu():
            return 0.5 * x * (1 + _unary("tanh", 0.5 * x, xp))
        case softplus():
            return xp.logaddexp(x, x * 0)
        case sympy.exp() | sympy.log() | sympy.tanh() | sympy.Abs():
            return _unary({"Abs": "abs"}.get(type(expr).__name__, type(expr).__name__), x, xp)
    raise VerifyError(f"{type(expr).__name__} has no meaning in NumPy")


def _power(x: Any, exponent: Expr, value: Any) -> Any:
    # NumPy refuses an integer array to a negative power and is exact for small integers.
    if exponent == sympy.Rational(1, 2):
        return x**0.5
    if exponent == -1:
        return 1.0 / x
    return x ** (int(exponent) if exponent.is_Integer and exponent > 0 else value)


def _unary(name: str, x: Any, xp: ModuleType) -> Any:
    if isinstance(x, int | float):
        return abs(x) if name == "abs" else getattr(math, name)(x)
    return getattr(xp, name)(x)
