"""The constant torch code: real functions that can be imported and tested, copied into an emitted package as they stand.

A leading underscore keeps their names apart from those of a spec, which has none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _tiles(x: Tensor, N: int, C: int) -> Tensor:
    """[B, T, H, ...] as N chunks of C tokens, [B, H, N, C, ...]; zero behind the last token."""
    B, T, H = x.shape[:3]
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, N * C - T))
    return x.reshape(B, N, C, H, *x.shape[3:]).movedim(3, 1).contiguous()


def _tokens(x: Tensor, T: int) -> Tensor:
    """[B, H, N, C, V] as [B, T, H, V]."""
    B, H, N, C, V = x.shape
    return x.movedim(1, 3).reshape(B, N * C, H, V)[:, :T]


def _segment_sum(x: Tensor, axis: int, reverse: bool, exclusive: bool) -> Tensor:
    """The cumulative sum over an axis. The exclusive form shifts and never subtracts: -inf and -1e9 are as good as -1."""
    if axis == -1:
        if exclusive:
            x = F.pad(x[..., 1:], (0, 1)) if reverse else F.pad(x[..., :-1], (1, 0))
        return x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)
    rows = list(x.unbind(axis))  # sums of whole rows are faster than many strided ones
    if reverse:
        rows.reverse()
    if exclusive:
        rows = [torch.zeros_like(rows[0]), *rows[:-1]]
    for i in range(1, len(rows)):
        rows[i] = rows[i] + rows[i - 1]
    if reverse:
        rows.reverse()
    return torch.stack(rows, axis)


def _upper(x: Tensor, size: int) -> Tensor:
    """The later half of every block of 2 size tokens, [B, H, N, C, ...] -> [B, H, N, C / (2 size), size, ...]."""
    return x.reshape(*x.shape[:3], x.shape[3] // (2 * size), 2, size, *x.shape[4:]).select(4, 1)


def _lower(x: Tensor, size: int) -> Tensor:
    """The earlier half of every block of 2 size tokens."""
    return x.reshape(*x.shape[:3], x.shape[3] // (2 * size), 2, size, *x.shape[4:]).select(4, 0)


def _across(x: Tensor, size: int) -> Tensor:
    """The view of what lies below the middle of every diagonal block, [B, H, N, C, C] -> [B, H, N, C / (2 size), size, size]."""
    M = x.shape[3] // (2 * size)
    blocks = x.view(*x.shape[:3], M, 2, size, M, 2, size)
    return blocks.select(7, 0).select(4, 1).diagonal(dim1=3, dim2=5).movedim(-1, 3)


def _score(a: Tensor, kappa: Tensor, gate: Tensor, read_before: bool, write_before: bool) -> Tensor:
    """a_t . exp(the log decay between) kappa_s at s < t, each channel with its own: [B, H, N, C, K] thrice -> [B, H, N, C, C].

    read_before, write_before: whether a token reads, or is written, before its own decay. Where the decay over half a chunk is small, one
    product around the chunk's middle; else halves of halves, the pairs across the middle of a block around it: no exponent is positive.
    """
    B, H, N, C = gate.shape[:4]
    total = _segment_sum(gate, -2, False, False)
    middle = total[..., C // 2 - 1, None, :]
    span = 4.0 if gate.dtype == torch.float32 else 60.0  # the exponential of a large number is not precise enough for fp32
    if bool((torch.maximum(-middle, middle - total[..., -1:, :]) <= span).all()):
        read, write = (_segment_sum(gate, -2, False, True) if before else total for before in (read_before, write_before))
        product: Tensor = (a * (read - middle).exp()) @ (kappa * (middle - write).exp()).mT
        return product.tril(-1)
    score = torch.zeros(B, H, N, C, C, dtype=gate.dtype, device=gate.device)
    a, kappa = a.expand(gate.shape), kappa.expand(gate.shape)
    for size in [1 << i for i in range(C.bit_length() - 1)]:
        read = _segment_sum(_upper(gate, size), -2, False, read_before).exp()
        write = _segment_sum(_lower(gate, size), -2, True, not write_before).exp()
        _across(score, size).copy_((_upper(a, size) * read) @ (_lower(kappa, size) * write).mT)
    return score


def _inverse(L: Tensor) -> Tensor:
    """(I - L)^-1 of strictly lower triangular matrices, by substitution."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse: Tensor = torch.linalg.solve_triangular(one - L, one.expand_as(L), upper=False, unitriangular=True)
    return inverse


def _log(x: Tensor) -> Tensor:
    """log, with no gradient at 0: a hard reset."""
    reset = x == 0
    return torch.where(reset, -torch.inf, torch.where(reset, 1.0, x).log())


def _finite(g: Tensor) -> Tensor:
    """A log decay without its resets: below exp(-87) nothing is left in fp32."""
    return torch.where(g < -87.0, 0.0, g)


def _resets(g: Tensor) -> Tensor:
    return (g < -87.0).to(g.dtype)


def _decay(read: Tensor, read_resets: Tensor, write: Tensor, write_resets: Tensor, strict: bool) -> Tensor:
    """exp(read_t - write_s) for s <= t, strict: s < t, where no reset lies between; masked before exp.

    Where read is write the diagonal is 1, and takes no gradient.
    """
    C, same = read.shape[-1], read is write
    seen = torch.ones(C, C, dtype=torch.bool, device=read.device).tril(-1 if strict or same else 0)
    seen = seen & (read_resets[..., :, None] == write_resets[..., None, :])
    decay = torch.where(seen, read[..., :, None] - write[..., None, :], -torch.inf).exp()
    return decay + torch.eye(C, dtype=decay.dtype, device=decay.device) if same and not strict else decay
