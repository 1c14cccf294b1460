"""Reverse mode over the tile graph: gradients are more nodes of the same graph.

Three rules carry the numerics. The inverse is never differentiated: with E = (I - L)^-1 Y, dY = (I - L)^-T dE and dL = dY E^T. The gradient
of the decays in a score is what its reader is given less what its writer is given, without the pairs that no decay lies between, each times
its own row as the matrix products saw it. Sums over segments have segment sums as their adjoint, so no gate gradient is a difference of two
large numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from .graph import Graph
from .ops import (
    Along,
    Axis,
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

LEAST = 1e-4  # the retention, given as a number, under which its gradient is no longer divided by it


def gradients(graph: Graph, cotangents: Mapping[Node, Node], wrt: Sequence[Node]) -> dict[Node, Node]:
    """The cotangent of each leaf in `wrt`, given one for each output in `cotangents`; a number 0 where nothing flows."""
    order = topological(cotangents)
    wanted = {n.index for n in wrt}
    active: set[int] = set()
    for node in order:
        if node.index in wanted or any(a.index in active for a in node.args):
            active.add(node.index)
    flowing: dict[int, list[Node]] = {node.index: [c] for node, c in cotangents.items()}
    line = graph.line
    for node in reversed(order):
        contributions = flowing.pop(node.index, [])
        if node.index not in active or not contributions:
            continue
        total = graph.expand(graph.add(*contributions), node.axes)
        if node.index in wanted:
            flowing[node.index] = [total]
            continue
        graph.line = node.line
        if node.index in graph.names:
            graph.name(total, f"d{graph.names[node.index]}")
        for target, contribution in _pull(graph, node, total):
            if target.index in active:
                flowing.setdefault(target.index, []).append(_fit(graph, contribution, target))
    graph.line = line
    return {leaf: graph.expand(graph.add(*flowing.get(leaf.index, [])), leaf.axes) for leaf in wrt}


def _fit(graph: Graph, contribution: Node, target: Node) -> Node:
    """Sums the cotangent over axes that the target was broadcast along; padding rows do not count."""
    for axis in contribution.axes:
        if axis not in target.axes:
            per_head = axis == "t" and not {"t", "s"} & set(target.axes)
            if axis in ("k", "v") and _may_be_infinite(contribution, axis):
                contribution = graph.within(contribution, axis)
            contribution = graph.sum(graph.valid(contribution) if per_head else contribution, axis)
    return contribution


def _may_be_infinite(node: Node, axis: Axis) -> bool:
    """Whether it has a logarithm, a root or a quotient of channels, which on padding are 0."""
    inside = topological([node], stop=lambda n: axis not in n.axes)
    return any(isinstance(n.op, Map) and axis in n.axes and n.op.fn in ("log", "log_retention", "pow", "quotient") for n in inside)


def _pull(graph: Graph, node: Node, c: Node) -> list[tuple[Node, Node]]:
    """Pairs (argument, its contribution) of one node with cotangent c."""
    match node.op:
        case Load() | Const():
            return []
        case Map():
            return _pull_map(graph, node, c)
        case Expand():
            return [(node.args[0], graph.expand(c, node.axes))]
        case Sum(axis=axis):
            return [(node.args[0], graph.expand(c, (*c.axes, axis)))]
        case Along():
            return [(node.args[0], graph.along(c))]
        case Segment(size=size, reverse=reverse, exclusive=exclusive):
            return [(node.args[0], graph.segment(c, size, reverse=not reverse, exclusive=exclusive))]
        case Rows(kind="last"):
            return [(node.args[0], graph.scatter(c))]
        case Score(decay=decay):
            a, kappa, read, *_ = node.args
            write = node.args[4 if decay == "scalar" else 3]
            return [
                (a, graph.add(graph.pull("read", node, c), graph.own(node, c, kappa))),
                (kappa, graph.add(graph.pull("write", node, c), graph.own(node, c, a))),
                (read, graph.pull("read", node, c, gate=True)),
                (write, graph.neg(graph.pull("write", node, c, gate=True))),
            ]
        case Rows() | Scatter() | Side() | Levels() | Pull() | Decay():
            raise ValueError(f"no gradient for {node.op}")
        case Mask(kind=kind):
            return [(node.args[0], graph.mask(c, kind))]
        case Valid():
            return [(node.args[0], graph.valid(c))]
        case Within(axis=axis):
            return [(node.args[0], graph.within(c, axis))]
        case Diagonal():
            return [(node.args[0], graph.take_diagonal(c))]
        case TakeDiagonal():
            return [(node.args[0], graph.diagonal(c))]
        case Inverse():
            left = graph.dot("rt,rs->ts", node, c)
            return [(node.args[0], graph.mask(graph.dot("tr,sr->ts", left, node), "strict"))]
        case Dot(spec=spec, solve=solve):
            return _pull_dot(graph, node, c, spec, solve)
        case _:
            assert_never(node.op)


def _pull_dot(graph: Graph, node: Node, c: Node, spec: str, solve: bool) -> list[tuple[Node, Node]]:
    left, right, out = split_spec(spec)
    x, y = node.args
    if solve:
        dy = graph.name(graph.dot(f"{left},{out}->{right}", x, c), "dY")
        outer = "tv,sv->ts" if "v" in node.axes else "tr,sr->ts"
        return [(y, dy), (x.args[0], graph.mask(graph.dot(outer, dy, node), "strict"))]
    return [(x, graph.dot(f"{out},{right}->{left}", c, y)), (y, graph.dot(f"{left},{out}->{right}", x, c))]


def _pull_map(graph: Graph, node: Node, c: Node) -> list[tuple[Node, Node]]:
    x = node.args[0]
    assert isinstance(node.op, Map)
    match node.op.fn:
        case "add":
            return [(a, c) for a in node.args]
        case "mul":
            y = node.args[1]
            return [(x, graph.mul(c, y)), (y, graph.mul(c, x))]
        case "exp":
            return [(x, graph.mul(c, node))]
        case "log":
            return [(x, graph.map("quotient", c, x))]
        case "log_retention":  # c is as small as x, up to the rounding of sums of what is not: no quotient of that by next to nothing
            least = graph.const(LEAST)
            below = graph.map("at_most_zero", graph.add(x, graph.neg(least)))
            return [(x, graph.map("quotient", c, graph.add(x, graph.neg(below))))]
        case "sigmoid":
            return [(x, graph.mul(c, node, graph.add(graph.const(1.0), graph.neg(node))))]
        case "softplus":
            return [(x, graph.mul(c, graph.map("sigmoid", x)))]
        case "tanh":
            return [(x, graph.mul(c, graph.add(graph.const(1.0), graph.neg(graph.mul(node, node)))))]
        case "pow":
            n = node.op.exponent
            if n > 0 and n < 1:
                return [(x, graph.map("quotient", graph.mul(c, graph.const(n)), graph.pow(x, 1.0 - n)))]
            return [(x, graph.mul(c, graph.const(n), graph.pow(x, n - 1.0)))]
        case "abs":
            return [(x, graph.mul(c, graph.map("sign", x)))]
        case "finite" | "floor":  # a reset lets no gradient through: every decay across it is zero
            return [(x, graph.mul(c, graph.add(graph.const(1.0), graph.neg(graph.map("resets", x)))))]
        case "resets" | "sign":
            return []
        case fn:
            raise ValueError(f"no gradient for {fn}")
