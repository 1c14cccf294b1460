"""What each tile operation means, in NumPy: the oracle that every printed form is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

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
    MaskKind,
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
    levelled,
    split_spec,
    topological,
)

Array = NDArray[np.float64]
RESET = -87.0  # exp of it is the smallest normal float32: a decay below is a reset


def evaluate(targets: Iterable[Node], env: Mapping[str, Array], sizes: Mapping[Axis, int], valid: int | None = None) -> dict[int, Array]:
    """Values of `targets` and of all they need, by node index; what differs from level to level has none outside of its Levels.

    env: arrays by name, shaped by the axes of their Load; sizes: extent of each axis (s like t); valid: rows before the padding.
    """
    sizes = {**sizes, "s": sizes.get("t", 0)}
    values: dict[int, Array] = {}
    with np.errstate(divide="ignore", over="ignore"):
        nodes = topological(targets)
        differ = levelled(nodes)
        for node in nodes:
            if isinstance(node.op, Levels):
                values[node.index] = _over_levels(node, differ, values, env, sizes, valid)
            elif node.index not in differ:
                values[node.index] = _apply(node, [values[a.index] for a in node.args], env, sizes, valid)
    return values


def _over_levels(
    node: Node, differ: Set[int], known: Mapping[int, Array], env: Mapping[str, Array], sizes: Mapping[Axis, int], valid: int | None
) -> Array:
    """The sum over halves of blocks of 1, 2, 4, ... tokens, up to half a chunk."""
    (x,) = node.args
    inside = [n for n in topological([x], stop=lambda n: n.index not in differ) if n.index in differ]
    total = np.zeros(tuple(sizes[a] for a in node.axes))
    for power in range(sizes["t"].bit_length() - 1):
        values = dict(known)
        for each in inside:
            values[each.index] = _apply(each, [values[a.index] for a in each.args], env, sizes, valid, 1 << power)
        total += values[x.index]
    return total


def _apply(node: Node, args: list[Array], env: Mapping[str, Array], sizes: Mapping[Axis, int], valid: int | None, size: int = 0) -> Array:
    """The value of one node; size: half the blocks of the level at hand."""
    match node.op:
        case Load(name=name):
            return np.asarray(env[name], np.float64)
        case Const(value=value):
            return np.asarray(env[value] if isinstance(value, str) else value, np.float64)
        case Map(fn=fn, exponent=exponent):
            spread = [_spread(x, a.axes, node.axes) for x, a in zip(args, node.args, strict=True)]
            return _elementwise(fn, spread, exponent)
        case Expand():
            shape = tuple(sizes[a] for a in node.axes)
            return np.broadcast_to(_spread(args[0], node.args[0].axes, node.axes), shape)
        case Sum(axis=axis):
            return np.asarray(args[0].sum(node.args[0].axes.index(axis)))
        case Along() | Within():
            return args[0]
        case Segment(size=size, reverse=reverse, exclusive=exclusive):
            return _segment(args[0], size, reverse, exclusive)
        case Rows(kind=kind):
            return args[0][_source(size, sizes["t"])] if kind == "middle" else args[0][sizes["t"] // 2 - 1 if kind == "half" else -1]
        case Scatter():
            total = np.zeros(tuple(sizes[a] for a in node.axes))
            total[-1] = args[0]
            return total
        case Side(upper_zero=upper_zero, lower_zero=lower_zero):
            t = np.arange(sizes["t"])
            zero = (upper_zero & (t % (2 * size) == size)) | (lower_zero & (t % (2 * size) == size - 1))
            return np.where(zero, 0.0, np.where(t // size % 2 == 1, 1.0, -1.0))
        case Mask(kind=kind):
            return np.where(mask_matrix(kind, sizes["t"], size), args[0], 0.0)
        case Levels():
            raise ValueError("one level has no sum over levels")
        case Valid():
            rows = np.arange(sizes["t"]) < (sizes["t"] if valid is None else valid)
            return np.where(_spread(rows, ("t",), node.axes), args[0], 0.0)
        case Decay(strict=strict):
            read, read_resets, write, write_resets = args
            connected = (read_resets[:, None] == write_resets[None, :]) & mask_matrix("strict" if strict else "causal", sizes["t"])
            return np.exp(np.where(connected, read[:, None] - write[None, :], -np.inf))
        case Score(decay=decay, causal=causal):
            a, kappa, *decays = args
            between = _between(decay, decays, sizes)
            score = np.asarray(np.einsum("tk,sk,tsk->ts", _over(a, between), _over(kappa, between), between))
            return score + np.diag(np.sum(_over(a, between) * _over(kappa, between), 1)) if causal else score
        case Pull(decay=decay, side=side, gate=gate, touching=touching):
            c, *rest = args
            given, decays = (rest[: 1 + gate], rest[1 + gate :])
            between = _between(decay, decays, sizes)
            c = np.where(mask_matrix("gapped", sizes["t"]), c, 0.0) if touching else c
            spec = "ts,sk,tsk->tk" if side == "read" else "ts,tk,tsk->sk"
            pulled = np.asarray(np.einsum(spec, c, _over(given[-1] if side == "read" else given[0], between), between))
            if not gate:
                return pulled
            own = pulled * _over(given[0] if side == "read" else given[-1], between)
            return own if decay == "key" else own.sum(1)
        case Diagonal():
            return np.diag(args[0])
        case TakeDiagonal():
            return np.diagonal(args[0]).copy()
        case Inverse():
            return np.linalg.inv(np.eye(sizes["t"]) - args[0]).astype(np.float64)
        case Dot(spec=spec):
            left, right, out = split_spec(spec)
            return np.asarray(np.einsum(f"{left},{right}->{out}", *args))
        case _:
            assert_never(node.op)


def mask_matrix(kind: MaskKind, n: int, size: int = 0) -> NDArray[np.bool_]:
    """[t, s] of Mask; size: half the blocks of the level at hand."""
    t, s = np.arange(n)[:, None], np.arange(n)[None, :]
    match kind:
        case "strict":
            return s < t
        case "causal":
            return s <= t
        case "gapped":
            return s < t - 1
        case "across":
            return np.asarray((t // (2 * size) == s // (2 * size)) & (t // size > s // size))
        case _:
            assert_never(kind)


def _between(decay: str, decays: list[Array], sizes: Mapping[Axis, int]) -> Array:
    """The decay at the pairs s < t, [t, s, k]."""
    seen = mask_matrix("strict", sizes["t"])
    if decay == "key":
        read, write, _ = decays
        return np.asarray(np.exp(np.where(seen[:, :, None], read[:, None] - write[None], -np.inf)))
    read, read_resets, write, write_resets = decays
    seen = seen & (read_resets[:, None] == write_resets[None, :])
    scalar = np.exp(np.where(seen, read[:, None] - write[None, :], -np.inf))
    return np.asarray(np.repeat(scalar[:, :, None], sizes["k"], 2))


def _over(rows: Array, between: Array) -> Array:
    """A row for each token; a parameter has one for all."""
    return np.broadcast_to(rows, between.shape[1:])


def _source(size: int, n: int) -> NDArray[np.intp]:
    """The row that each token reads: the last of the lower half of its 2 * size block."""
    t = np.arange(n)
    return t // (2 * size) * (2 * size) + size - 1


def _spread(x: Array | NDArray[np.bool_], axes: tuple[Axis, ...], target: tuple[Axis, ...]) -> Array:
    return np.expand_dims(x, tuple(i for i, a in enumerate(target) if a not in axes))


def _segment(x: Array, size: int, reverse: bool, exclusive: bool) -> Array:
    blocks = x.reshape(x.shape[0] // size, size, *x.shape[1:])
    if reverse:
        blocks = blocks[:, ::-1]
    total = np.cumsum(blocks, axis=1)
    if exclusive:
        total = np.concatenate([np.zeros_like(total[:, :1]), total[:, :-1]], axis=1)
    if reverse:
        total = total[:, ::-1]
    return total.reshape(x.shape)


def _elementwise(fn: str, args: list[Array], exponent: float) -> Array:
    x = args[0]
    match fn:
        case "add":
            return x + args[1]
        case "mul":
            return x * args[1]
        case "exp":
            return np.exp(x)
        case "log" | "log_retention":
            return np.log(x)
        case "sigmoid":
            return np.exp(-np.logaddexp(0.0, -x))
        case "softplus":
            return np.logaddexp(0.0, x)
        case "tanh":
            return np.tanh(x)
        case "abs":
            return np.abs(x)
        case "sign":
            return np.sign(x)
        case "pow":
            return x**exponent
        case "quotient":  # x / y, and 0 where x is 0: a gradient that no path carries
            return np.divide(
                x, args[1], out=np.zeros(np.broadcast(x, args[1]).shape), where=np.broadcast_to(x != 0, np.broadcast(x, args[1]).shape)
            )
        case "floor":  # a log decay, no lower than what fp32 can tell from nothing
            return np.maximum(x, RESET)
        case "at_most_zero":
            return np.minimum(x, 0.0)
        case "round":  # to the precision of matrix operands, which numbers here do not have
            return x
        case "finite":  # a log decay without its resets
            return np.where(x < RESET, 0.0, x)
        case "resets":
            return np.where(x < RESET, 1.0, 0.0)
        case _:
            raise ValueError(f"no meaning for {fn}")
