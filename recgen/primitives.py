"""The constant Triton code: real functions that can be imported and tested, copied into every emitted package as they stand."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment_sum(x, SIZE: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Cumulative sum over rows inside blocks of SIZE rows, of finite x [C] or [C, D]."""
    C: tl.constexpr = x.shape[0]
    if SIZE == C:
        total = tl.cumsum(x, 0, reverse=REVERSE)
    elif len(x.shape) == 1:
        total = tl.reshape(tl.cumsum(tl.reshape(x, (C // SIZE, SIZE)), 1, reverse=REVERSE), x.shape)
    else:
        total = tl.reshape(tl.cumsum(tl.reshape(x, (C // SIZE, SIZE, x.shape[1])), 1, reverse=REVERSE), x.shape)
    if EXCLUSIVE:
        total = total - x
    return total


@triton.jit
def sum_to_middle(x, SIZE: tl.constexpr):
    """The sum over each block of 2 * SIZE rows, in the last row of its lower half; zero elsewhere. [C, D]"""
    C: tl.constexpr = x.shape[0]
    if 2 * SIZE > C:
        result = tl.zeros_like(x)
    else:
        total = tl.sum(tl.reshape(x, (C // (2 * SIZE), 2 * SIZE, x.shape[1])), 1)
        row = tl.arange(0, 2 * SIZE)[None, :, None]
        result = tl.reshape(tl.where(row == SIZE - 1, total[:, None, :], 0.0), x.shape)
    return result


@triton.jit
def upper_half(t, SIZE: tl.constexpr):
    """+1.0 for rows in the upper half of their block of 2 * SIZE rows, -1.0 in the lower."""
    return tl.where((t // SIZE) % 2 == 1, 1.0, -1.0)


@triton.jit
def log_decay_floor(g):
    """A log decay, no lower than what fp32 can tell from nothing."""
    return tl.maximum(g, -87.0)


@triton.jit
def across_middle(t, s, SIZE: tl.constexpr):
    """Whether t lies in the upper and s in the lower half of one block of 2 * SIZE rows."""
    return ((t // SIZE) ^ 1 == s // SIZE) & (t > s)


@triton.jit
def log_decay_finite(g):
    """A log decay without its resets: below exp(-87) nothing is left in fp32."""
    return tl.where(g < -87.0, 0.0, g)


@triton.jit
def log_decay_resets(g):
    return tl.where(g < -87.0, 1.0, 0.0)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def power(x, EXPONENT: tl.constexpr):
    """x ** EXPONENT for the exponents that specs use; integers of either sign, halves, and exp(e log x) for the rest."""
    if EXPONENT == 2.0:
        result = x * x
    elif EXPONENT == 0.5:
        result = tl.sqrt(x)
    elif EXPONENT == -0.5:
        result = tl.rsqrt(x)
    elif EXPONENT == -1.0:
        result = 1.0 / x
    elif EXPONENT == 3.0:
        result = x * x * x
    elif EXPONENT == -1.5:
        result = tl.rsqrt(x) / x
    elif EXPONENT == -2.0:
        result = 1.0 / (x * x)
    else:
        result = tl.exp(EXPONENT * tl.log(x))
    return result


@triton.jit
def quotient(x, y):
    """x / y, and 0 where x is 0: a gradient that no path carries."""
    return tl.where(x == 0.0, 0.0, x / tl.where(x == 0.0, 1.0, y))


@triton.jit
def unit_lower_inverse(L, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I - L)^-1 of a strictly lower triangular L [C, C], C a power of two from 16.

    Two solved halves are joined at a time: [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]. Up to 16 rows all diagonal blocks go as one batch
    [C/16, 16, 16]; then the blocks meet in whole products. Products in DTYPE, sums in fp32.
    """
    C: tl.constexpr = L.shape[0]
    N: tl.constexpr = C // 16
    blocks = tl.arange(0, N)
    rows = tl.arange(0, 16)
    r = rows[None, :, None]
    c = rows[None, None, :]
    own = blocks[:, None, None, None] == blocks[None, None, :, None]
    L16 = tl.sum(tl.where(own, tl.reshape(L, (N, 16, N, 16)), 0.0), axis=2)
    L16 = tl.where(r > c, L16, 0.0).to(DTYPE)
    X16 = tl.where((r // 2) == (c // 2), L16, tl.zeros((N, 16, 16), DTYPE))
    X16 = tl.where(r == c, tl.full((N, 16, 16), 1.0, DTYPE), X16)
    for level in tl.static_range(1, 4):
        below = tl.where(((r >> (level + 1)) == (c >> (level + 1))) & ((r >> level) != (c >> level)), L16, tl.zeros((N, 16, 16), DTYPE))
        joined = tl.dot(X16, below, input_precision=PRECISION).to(DTYPE)
        X16 = X16 + tl.dot(joined, X16, input_precision=PRECISION).to(DTYPE)
    X = tl.reshape(tl.where(own, X16[:, :, None, :], tl.zeros((1, 1, 1, 1), DTYPE)), (C, C))
    o = tl.arange(0, C)
    i = o[:, None]
    j = o[None, :]
    LD = L.to(DTYPE)
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else (6 if C == 64 else 7))
    for level in tl.static_range(4, LEVELS):
        below = tl.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level)), LD, tl.zeros((1, 1), DTYPE))
        joined = tl.dot(X, below, input_precision=PRECISION).to(DTYPE)
        X = X + tl.dot(joined, X, input_precision=PRECISION).to(DTYPE)
    return X.to(tl.float32)
