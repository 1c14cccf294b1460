"""Elementwise work on inputs: SymPy expressions become tile nodes, so that it is fused into the kernels and differentiated like the
rest."""

from __future__ import annotations

from dataclasses import replace

from sympy import Abs, Add, Expr, Function, Integer, Mul, Number, Pow, Symbol, exp, expand, log, nan, tanh, zoo

from .graph import Graph
from .normalize import Input
from .ops import Axes, Node

LARGE = 1000  # a coefficient that belongs in front of a sum


def input_axes(declared: Input) -> Axes:
    """The axes of an input's tile inside one chunk and head."""
    return tuple(declared.axes) if declared.axes is not None else ()


def translate(
    graph: Graph,
    expr: Expr,
    inputs: tuple[Input, ...],
    *,
    padded: bool = True,
    token: bool = False,
    factor: bool = False,
    decay: bool = False,
) -> Node:
    """The node of `expr`, 0 on padding channels; for a `factor` of the state it is enough that it is a number there. With `padded`, rows
    behind the end of the sequence (where inputs load as 0) are 0, never NaN. With `token`, of one token: inputs have no token axis. In a
    `decay`, a logarithm is that of a retention."""
    table = {i.name: replace(i, axes=tuple(a for a in i.axes if a != "t")) if token and i.axes is not None else i for i in inputs}
    for axis in ("k", "v"):
        expr = _within(expr, axis, table, factor)
    logarithm = "log_retention" if decay else "log"
    if not padded:
        return _node(graph, expr, table, logarithm)
    at_padding = {Symbol(i.name, real=True): Integer(0) for i in inputs if i.axes and "t" in i.axes}
    if _value(expr, at_padding) == 0 or not _varies(expr, table):
        return _node(graph, expr, table, logarithm)
    factors = list(Mul.make_args(expr))
    broken = [f for f in factors if not _is_finite(_value(f, at_padding))]
    kept = [f for f in factors if f not in broken]
    if any(_value(f, at_padding) == 0 for f in kept):
        inside = [_node(graph, f, table, logarithm) for f in kept]
        return graph.mul(*inside, *(graph.valid(_rows(graph, _node(graph, f, table, logarithm))) for f in broken))
    return graph.valid(_rows(graph, _node(graph, expr, table, logarithm)))


class within_k(Function):  # type: ignore[misc]
    """Its argument on the channels that there are, 0 on padding."""


class within_v(Function):  # type: ignore[misc]
    """The same along the value axis."""


def _within(expr: Expr, axis: str, table: dict[str, Input], factor: bool) -> Expr:
    """The expression with every row over `axis` 0 on padding channels, where inputs load as 0: what is summed, and the whole; of a factor
    only what is no number there."""
    sums = "sum_k" if axis == "k" else "sum_v"
    channels = {Symbol(i.name, real=True): Integer(0) for i in table.values() if i.axes and axis in i.axes}

    def has(e: Expr) -> bool:
        """Whether e varies along the axis."""
        if type(e).__name__ == sums:
            return False
        return e in channels or any(has(a) for a in e.args)

    def value(e: Expr) -> Expr:
        """e on a padding channel; a sum is no channel's."""
        if not e.args:
            return channels.get(e, e)
        if type(e).__name__ == sums:
            return e
        args = [value(a) for a in e.args]
        return Integer(0) if type(e).__name__ == "silu" and args[0] == 0 else e.func(*args)

    def inner(e: Expr) -> Expr:
        """e with what its sums run over within."""
        if not e.args:
            return e
        args = [inner(a) for a in e.args]
        return e.func(whole(args[0], False)) if type(e).__name__ == sums else e.func(*args)

    def whole(e: Expr, factor: bool) -> Expr:
        if not has(e):
            return e
        factors = list(Mul.make_args(e))
        own = [f for f in factors if has(f)]
        values = {f: value(f) for f in own}
        bad = [f for f in own if not _is_finite(values[f])]
        if not bad and (factor or any(v == 0 for v in values.values())):
            return e
        wrapped = bad or own[:1]  # one factor that is 0 makes the product 0
        function = within_k if axis == "k" else within_v
        return Mul(*(function(f) if f in wrapped else f for f in factors), evaluate=False)

    return whole(inner(expr), factor) if channels else expr


def _rows(graph: Graph, node: Node) -> Node:
    return graph.expand(node, ("t", *node.axes))


def _varies(expr: Expr, table: dict[str, Input]) -> bool:
    """Constants without a head parameter need no mask in a product; every row written or decayed does."""
    return not isinstance(expr, Number)


def _value(expr: Expr, at_padding: dict[Symbol, Integer]) -> Expr:
    """The value where inputs are 0, worked from the inside out: 0 * 0 ** -1 is not 0."""
    if not expr.args:
        return at_padding.get(expr, expr)
    args = [_value(a, at_padding) for a in expr.args]
    if type(expr).__name__ in ("sum_k", "sum_v", "silu", "within_k", "within_v") and args[0] == 0:
        return Integer(0)
    return expr.func(*args)


def _is_finite(value: Expr) -> bool:
    return not value.has(zoo, nan) and value.is_infinite is not True


def _node(graph: Graph, expr: Expr, table: dict[str, Input], logarithm: str) -> Node:
    def recurse(e: Expr) -> Node:
        return _node(graph, e, table, logarithm)

    if expr.is_number:  # as SymPy left it: 1/3, sqrt(2), E, log(2)
        return graph.const(float(expr))
    match expr:
        case Symbol(name=name):
            declared = table.get(name)
            if declared is None or declared.axes is None:
                return graph.const(name)  # a size K, V or a keyword argument
            return graph.load(name, input_axes(declared))
        case Add():
            return graph.add(*(recurse(a) for a in expr.as_ordered_terms()))
        case Mul():
            return graph.mul(*(recurse(a) for a in expr.as_ordered_factors()))
        case Pow():
            base, exponent = expr.as_base_exp()
            unit = max((abs(t.as_coeff_Mul()[0]) for t in base.args), default=Integer(1)) if isinstance(base, Add) else Integer(1)
            if unit > LARGE:  # SymPy clears 1 / (x + 1e-6) into 1e6 / (1e6 x + 1), which fp16 does not hold
                return graph.mul(graph.const(float(unit) ** float(exponent)), graph.pow(recurse(expand(base / unit)), float(exponent)))
            return graph.pow(recurse(base), float(exponent))
    argument = expr.args[0]
    if isinstance(expr, exp):
        return graph.exp(recurse(argument))
    if isinstance(expr, log):
        return graph.map(logarithm, recurse(argument))
    if isinstance(expr, Abs):  # sqrt(x * x)
        return graph.map("abs", recurse(argument))
    if isinstance(expr, tanh):
        return graph.map("tanh", recurse(argument))
    match type(expr).__name__:
        case "sum_k":
            return graph.sum(recurse(argument), "k")
        case "sum_v":
            return graph.sum(recurse(argument), "v")
        case "within_k":
            return graph.within(recurse(argument), "k")
        case "within_v":
            return graph.within(recurse(argument), "v")
        case "silu":
            x = recurse(argument)
            return graph.mul(x, graph.map("sigmoid", x))
        case "sigmoid" | "softplus" as fn:
            return graph.map(fn, recurse(argument))
        case other:
            raise ValueError(f"no tile operation for {other}")
