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
    if N * C > T:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, N * C - T))
    return x.reshape(B, N, C, H, *x.shape[3:]).movedim(3, 1).contiguous()


def _tokens(pieces: list[Tensor], T: int) -> Tensor:
    """Pieces of a sequence, [B, H, N, C, V] each, as [B, T, H, V]."""
    x = torch.cat([piece.movedim(1, 3) for piece in pieces], 1)
    return x.flatten(1, 2)[:, :T].contiguous()


def _segment_sum(x: Tensor, axis: int, reverse: bool, exclusive: bool) -> Tensor:
    """The cumulative sum over an axis of finite numbers. The exclusive form shifts and never subtracts: -1e9 is as good as -1."""
    if axis == -1:
        if exclusive:
            x = F.pad(x[..., 1:], (0, 1)) if reverse else F.pad(x[..., :-1], (1, 0))
        return x.flip(-1).cumsum(-1).flip(-1) if reverse else x.cumsum(-1)
    ones = torch.ones(x.shape[axis], x.shape[axis], dtype=x.dtype, device=x.device)
    return (ones.triu(int(exclusive)) if reverse else ones.tril(-int(exclusive))) @ x  # of rows, one product is faster than many sums


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


def _scores(
    gate: Tensor, total: Tensor, reads: list[tuple[Tensor, bool]], writes: list[tuple[Tensor, bool]], pairs: list[tuple[int, int, bool]]
) -> list[Tensor]:
    """a_t . exp(the log decay between) kappa_s at s < t, each channel with its own: [B, H, N, C, K] thrice -> [B, H, N, C, C], for pairs of
    a read and a write; where the pair says so, a_t . kappa_t at s = t.

    total: the gates' cumulative sum. Beside a read or a write: whether it happens before its token's own decay. Where the decay over half a
    chunk is small, one product around the chunk's middle; else halves of halves, the pairs across the middle of a block around it: no
    exponent is positive.
    """
    B, H, N, C = gate.shape[:4]
    middle = total[..., C // 2 - 1, None, :]
    span = 8.0 if gate.dtype == torch.float32 else 60.0  # the exponential of a large number is not precise enough for fp32
    if bool((torch.maximum(-middle, middle - total[..., -1:, :]) <= span).all()):
        grows = {False: (total - middle).exp_()}
        if any(before for _, before in (*reads, *writes)):
            grows[True] = torch.cat(((-middle).exp(), grows[False][..., :-1, :]), -2)
        shrinks = {before: grows[before].reciprocal() for before in dict.fromkeys(before for _, before in writes)}
        rows, columns = [a * grows[before] for a, before in reads], [kappa * shrinks[before] for kappa, before in writes]
        scores = [(rows[i] @ columns[j].mT).tril_(-1) for i, j, _ in pairs]
    else:
        scores = [torch.zeros(B, H, N, C, C, dtype=gate.dtype, device=gate.device) for _ in pairs]
        for size in [1 << i for i in range(C.bit_length() - 1)]:
            upper, lower = _upper(gate, size), _lower(gate, size)
            ahead = {before: _exp(_segment_sum(upper, -2, False, before)) for before in dict.fromkeys(before for _, before in reads)}
            behind = {before: _exp(_segment_sum(lower, -2, True, not before)) for before in dict.fromkeys(before for _, before in writes)}
            rows = [_upper(a.expand(gate.shape), size) * ahead[before] for a, before in reads]
            columns = [_lower(kappa.expand(gate.shape), size) * behind[before] for kappa, before in writes]
            for score, (i, j, _) in zip(scores, pairs, strict=True):
                _across(score, size).copy_(rows[i] @ columns[j].mT)
    for score, (i, j, causal) in zip(scores, pairs, strict=True):
        if causal:
            score.diagonal(dim1=-2, dim2=-1).copy_((reads[i][0] * writes[j][0]).sum(-1))
    return scores


def _inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular matrices, by substitution. What stands on the diagonal or above it is not looked at."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse: Tensor = torch.linalg.solve_triangular(L, one.expand_as(L), upper=False, unitriangular=True)
    return inverse


def _log(x: Tensor) -> Tensor:
    """log, with no gradient at 0: a hard reset."""
    reset = x == 0
    return torch.where(reset, -torch.inf, torch.where(reset, 1.0, x).log())


def _log_retention(x: Tensor) -> Tensor:
    """log, whose gradient below 1e-4 is that at 1e-4: what is divided by x there is the rounding of sums."""
    low = x < 1e-4
    near = x.detach().log() + (x - x.detach()) / 1e-4
    return torch.where(low, near, torch.where(low, 1.0, x).log())


def _finite(g: Tensor) -> Tensor:
    """A log decay without its resets: below exp(-87) nothing is left in fp32."""
    return torch.where(g < -87.0, 0.0, g)


def _resets(g: Tensor) -> Tensor:
    return (g < -87.0).to(g.dtype)


def _exp(x: Tensor) -> Tensor:
    """exp of a log decay. Where as good as nothing is left it stays a normal number with its full precision: others are slow."""
    return x.clamp_min(-80.0 if x.dtype == torch.float32 else -690.0).exp_()


def _later(x: Tensor) -> Tensor:
    """Each row one token later, [..., C, K]; the first is 1."""
    return torch.cat((torch.ones_like(x[..., :1, :]), x[..., :-1, :]), -2)


def _decay(read: Tensor, read_resets: Tensor, write: Tensor, write_resets: Tensor, strict: bool, touching: bool) -> Tensor:
    """exp(read_t - write_s) for s <= t, strict: s < t, where no reset lies between; masked before exp, by what exp makes small at once.

    Where read is write the diagonal is 1, and takes no gradient; touching: neither do pairs of neighbours, which nothing lies between.
    """
    C, one = read.shape[-1], not strict and read is write
    ones = torch.ones(C, C, dtype=read.dtype, device=read.device)
    log_decay = (read[..., :, None] - write[..., None, :]).add_(ones.triu(0 if strict or one else 1).mul_(-1e30))
    if bool(write_resets.any()):
        log_decay.masked_fill_(read_resets[..., :, None] != write_resets[..., None, :], -1e30)
    if touching:
        log_decay = torch.where(ones.tril(-1).triu(-1).bool(), log_decay.detach(), log_decay)
    decay = F.threshold(_exp(log_decay), 2e-35 if read.dtype == torch.float32 else 1e-299, 0.0)
    return decay.add_(torch.eye(C, dtype=read.dtype, device=read.device)) if one else decay
