"""The constant Triton code: real functions that can be imported and tested, copied into every emitted package as they stand."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _join_without_last(sum_a, last_a, sum_b, last_b):
    return sum_a + last_a + sum_b, last_b


@triton.jit
def chunk_sum(x, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Cumulative sum over rows, [C] or [C, D]. The exclusive form leaves the own row out rather than subtracting it: where sums fall by
    e^20 from row to row, nothing of them would be left."""
    if not EXCLUSIVE:
        total = tl.cumsum(x, 0, reverse=REVERSE)
    else:
        total, _ = tl.associative_scan((tl.zeros_like(x), x), 0, _join_without_last, reverse=REVERSE)
    return total


@triton.jit
def levels(C: tl.constexpr):
    """How many levels a chunk has: its blocks of 2, 4, 8, ... rows, up to C."""
    count = 0
    for power in tl.static_range(1, 10):
        if 2**power <= C:
            count = power
    return count


@triton.jit
def across_middle(t, s, level):
    """Whether t stands in the upper and s in the lower half of one block of 2^(level + 1) rows."""
    return (t > s) & ((t ^ s) >> level == 1)


@triton.jit
def middle_of_block(t, level):
    """The last row of the lower half of the block of 2^(level + 1) rows that t stands in."""
    return (t | ((2 << level) - 1)) - (1 << level)


@triton.jit
def passes(K: tl.constexpr, BK: tl.constexpr, T):
    """How many tiles of BK the key channels make; never known to be one: a loop that is known to be passed once is taken apart, and its
    loads of descriptors then wait for each other."""
    count = (K + BK - 1) // BK
    if count == 1:
        count = tl.where(T < 0, 2, 1)
    return count


@triton.jit
def load_tokens(x, step_b, step_t, step_h, i_b, t, i_h, o, T, D: tl.constexpr):
    """Rows t of one head of x, [B,T,H,D], at the columns o; zero behind T and D. The steps from batch to batch, token to token and head to
    head count units of 16 bytes."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    rows = i_b.to(tl.int64) * step_b + i_h * step_h + t.to(tl.int64) * step_t
    return tl.load(x + (rows * UNIT)[:, None] + o[None, :], mask=(t < T)[:, None] & (o < D)[None, :], other=0.0)


@triton.jit
def load_rows(x, row, o, D: tl.constexpr):
    """Rows of x, [N,D] with rows padded to 16 bytes, at the columns o; zero behind D."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = (D + UNIT - 1) // UNIT * UNIT
    return tl.load(x + row[:, None] * WIDTH + o[None, :], mask=(o < D)[None, :], other=0.0)


@triton.jit
def load_row(x, row, o, D: tl.constexpr):
    """One row of x, [N,D] with rows padded to 16 bytes, at the columns o; zero behind D."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = (D + UNIT - 1) // UNIT * UNIT
    return tl.load(x + row * WIDTH + o, mask=o < D, other=0.0)


@triton.jit
def store_row(x, row, o, D: tl.constexpr, value):
    """One row of x, [N,D] with rows padded to 16 bytes, at the columns o."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = (D + UNIT - 1) // UNIT * UNIT
    tl.store(x + row * WIDTH + o, value, mask=o < D)


@triton.jit
def store_rows(x, row, inside, o, D: tl.constexpr, value):
    """The rows of `value` that are `inside`, to x, [N,D] with rows padded to 16 bytes, at the columns o."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = (D + UNIT - 1) // UNIT * UNIT
    place = x + row.to(tl.int64)[:, None] * WIDTH + o[None, :]
    tl.store(place, value.to(x.dtype.element_ty), mask=inside[:, None] & (o < D)[None, :])


@triton.jit
def _too_far(middle, last, left, C: tl.constexpr, SPAN: tl.constexpr):
    """By how much the log decay of a channel falls too far over either half of a chunk: positive if it does. middle, last: where it stands
    at the end of each half; left: tokens from the chunk's first on. Where they are fewer than C, a half of n tokens may decay by n in C / 2
    of the span: the tokens of an even chunk decay by no more than e^(2 SPAN / C) in the mean."""
    HALF: tl.constexpr = C // 2
    first = SPAN / HALF * tl.minimum(left, HALF)
    second = SPAN / HALF * tl.maximum(tl.minimum(left - HALF, HALF), 0)
    return tl.maximum(-middle - first, middle - last - second)


@triton.jit
def is_steep(rows, left, WIDTH: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr):
    """Whether a channel decays by more than e^SPAN over either half of a chunk, whose cumulative log decay is the C rows of K at `rows`,
    WIDTH apart; `left` tokens are left."""
    o = tl.arange(0, triton.next_power_of_2(K))
    middle = tl.load(rows + (C // 2 - 1) * WIDTH + o, mask=o < K, other=0.0)
    last = tl.load(rows + (C - 1) * WIDTH + o, mask=o < K, other=0.0)
    return tl.max(_too_far(middle, last, left, C, SPAN), 0) > 0


@triton.jit
def any_steep(
    rows,
    first,
    n_chunks,
    T,
    N,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Whether any of GROUP chunks from the `first` on is steep, of `n_chunks` in all, where heads are neighbours: their rows are loaded
    at once, and a program that has none of them is done."""
    i = first + tl.arange(0, GROUP)
    i_t = (i // H) % N
    chunk = (i // (H * N) * H + i % H).to(tl.int64) * N + i_t
    o = tl.arange(0, triton.next_power_of_2(K))
    place = rows + chunk[:, None] * (C * WIDTH) + o[None, :]
    inside = (i < n_chunks)[:, None] & (o < K)[None, :]
    middle = tl.load(place + (C // 2 - 1) * WIDTH, mask=inside, other=0.0)
    last = tl.load(place + (C - 1) * WIDTH, mask=inside, other=0.0)
    return tl.max(_too_far(middle, last, (T - i_t * C)[:, None], C, SPAN)) > 0


@triton.jit
def side_of_middle(t, level, UPPER_ZERO: tl.constexpr, LOWER_ZERO: tl.constexpr):
    """+1.0 for rows in the upper half of their block of 2^(level + 1) rows, -1.0 in the lower; 0.0 for the first of the upper or the last
    of the lower."""
    above = t - middle_of_block(t, level)
    side = tl.where(above > 0, 1.0, -1.0)
    if UPPER_ZERO:
        side = tl.where(above == 1, 0.0, side)
    if LOWER_ZERO:
        side = tl.where(above == 0, 0.0, side)
    return side


@triton.jit
def log_decay_floor(g):
    """A log decay, no lower than what fp32 can tell from nothing."""
    return tl.maximum(g, -87.0)


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
def sign(x):
    """1 where x is positive, -1 where it is negative, else 0."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def power(x, EXPONENT: tl.constexpr):
    """x ** EXPONENT for the exponents that specs use; small integers, halves, and exp(e log x) for the rest."""
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
def integer_power(x, N: tl.constexpr):
    """x ** N for N >= 1, of x of either sign."""
    result = x
    for _ in tl.static_range(N - 1):
        result = result * x
    return result


@triton.jit
def quotient(x, y):
    """x / y, and 0 where x is 0: a gradient that no path carries."""
    return tl.where(x == 0.0, 0.0, x / tl.where(x == 0.0, 1.0, y))


@triton.jit
def unit_lower_inverse(L, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I - L)^-1 of a strictly lower triangular L [C, C], C a power of two from 16.

    Two solved halves are joined at a time: [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]. Up to 16 rows all diagonal blocks go as
    one batch [C/16, 16, 16]; then the blocks meet in whole products. Products in DTYPE, sums in fp32.
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
