"""Elementwise work on inputs: SymPy expressions become tile nodes, so that it is fused into the kernels and differentiated like the
rest."""

from __future__ import annotations

from dataclasses import replace

from sympy import Abs, Add, Expr, Integer, Mul, Number, Pow, Symbol, exp, log, nan, tanh, zoo

from .graph import Graph
from .normalize import Input
from .ops import Axes, Node


def input_axes(declared: Input) -> Axes:
    """The axes of an input's tile inside one chunk and head."""
    return tuple(declared.axes) if declared.axes is not None else ()


def translate(graph: Graph, expr: Expr, inputs: tuple[Input, ...], *, padded: bool = True, token: bool = False) -> Node:
    """The node of `expr`. With `padded`, rows behind the end of the sequence (where inputs load as 0) are 0, never NaN.
    With `token`, of one token: inputs have no token axis."""
    table = {i.name: replace(i, axes=tuple(a for a in i.axes if a != "t")) if token and i.axes is not None else i for i in inputs}
    if not padded:
        return _node(graph, expr, table)
    at_padding = {Symbol(i.name, real=True): Integer(0) for i in inputs if i.axes and "t" in i.axes}
    if _value(expr, at_padding) == 0 or not _varies(expr, table):
        return _node(graph, expr, table)
    factors = list(Mul.make_args(expr))
    broken = [f for f in factors if not _is_finite(_value(f, at_padding))]
    kept = [f for f in factors if f not in broken]
    if any(_value(f, at_padding) == 0 for f in kept):
        return graph.mul(*(_node(graph, f, table) for f in kept), *(graph.valid(_rows(graph, _node(graph, f, table))) for f in broken))
    return graph.valid(_rows(graph, _node(graph, expr, table)))


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
    if type(expr).__name__ in ("sum_k", "sum_v", "silu") and args[0] == 0:
        return Integer(0)
    return expr.func(*args)


def _is_finite(value: Expr) -> bool:
    return not value.has(zoo, nan) and value.is_infinite is not True


def _node(graph: Graph, expr: Expr, table: dict[str, Input]) -> Node:
    def recurse(e: Expr) -> Node:
        return _node(graph, e, table)

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
            return graph.pow(recurse(base), float(exponent))
    argument = expr.args[0]
    if isinstance(expr, exp):
        return graph.exp(recurse(argument))
    if isinstance(expr, log):
        return graph.map("log", recurse(argument))
    if isinstance(expr, Abs):  # sqrt(x * x)
        return graph.map("abs", recurse(argument))
    if isinstance(expr, tanh):
        return graph.map("tanh", recurse(argument))
    match type(expr).__name__:
        case "sum_k":
            return graph.sum(recurse(argument), "k")
        case "sum_v":
            return graph.sum(recurse(argument), "v")
        case "silu":
            x = recurse(argument)
            return graph.mul(x, graph.map("sigmoid", x))
        case "sigmoid" | "softplus" as fn:
            return graph.map(fn, recurse(argument))
        case other:
            raise ValueError(f"no tile operation for {other}")
