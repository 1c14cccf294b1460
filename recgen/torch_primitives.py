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
    if exclusive:
        zero = torch.zeros_like(x.narrow(axis, 0, 1))
        rows = x.shape[axis] - 1
        x = torch.cat([x.narrow(axis, 1, rows), zero] if reverse else [zero, x.narrow(axis, 0, rows)], axis)
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def _upper(x: Tensor, size: int) -> Tensor:
    """The later half of every block of 2 size tokens, [B, H, N, C, ...] -> [B, H, N, C / (2 size), size, ...]."""
    return x.unflatten(3, (-1, 2, size)).select(4, 1)


def _lower(x: Tensor, size: int) -> Tensor:
    """The earlier half of every block of 2 size tokens."""
    return x.unflatten(3, (-1, 2, size)).select(4, 0)


def _join(blocks: Tensor, across: Tensor) -> Tensor:
    """Lower triangular blocks [..., 2 M, size, size], two and two with what lies between them: [..., M, 2 size, 2 size]."""
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    return torch.cat([F.pad(first, (0, first.shape[-1])), torch.cat([across, second], -1)], -2)


def _inverse(L: Tensor) -> Tensor:
    """(I - L)^-1 of strictly lower triangular matrices, by substitution."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(one - L, one.expand_as(L), upper=False, unitriangular=True)


def _log(x: Tensor) -> Tensor:
    """log, with no gradient at 0: a hard reset."""
    reset = x == 0
    return torch.where(reset, -torch.inf, torch.where(reset, 1.0, x).log())


def _finite(g: Tensor) -> Tensor:
    """A log decay without its resets: below exp(-87) nothing is left in fp32."""
    return torch.where(g < -87.0, 0.0, g)


def _resets(g: Tensor) -> Tensor:
    return (g < -87.0).to(g.dtype)


def _decay(read: Tensor, read_resets: Tensor, write: Tensor, write_resets: Tensor) -> Tensor:
    """exp(read_t - write_s) for s <= t where no reset lies between; masked before exp."""
    C = read.shape[-1]
    seen = torch.ones(C, C, dtype=torch.bool, device=read.device).tril()
    seen = seen & (read_resets[..., :, None] == write_resets[..., None, :])
    return torch.where(seen, read[..., :, None] - write[..., None, :], -torch.inf).exp()
