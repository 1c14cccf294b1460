"""The constant Triton functions, interpreted, against NumPy in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from recgen import primitives
from tests.interpreter import Interpret, interpreter

INF = float("inf")
NAN = float("nan")
Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    with interpreter() as call:
        yield call


# ---- kernels of one call each


@triton.jit
def _unary(x, out, FUNCTION: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, FUNCTION(tl.load(x + o)))


@triton.jit
def _binary(x, y, out, FUNCTION: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, FUNCTION(tl.load(x + o), tl.load(y + o)))


@triton.jit
def _with_constant(x, out, FUNCTION: tl.constexpr, CONSTANT: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, FUNCTION(tl.load(x + o), CONSTANT))


@triton.jit
def _sides(out, FUNCTION: tl.constexpr, level, UPPER_ZERO: tl.constexpr, LOWER_ZERO: tl.constexpr, C: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(out + o, FUNCTION(o, level, UPPER_ZERO, LOWER_ZERO))


@triton.jit
def _pairs(out, FUNCTION: tl.constexpr, level, C: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(out + o[:, None] * C + o[None, :], FUNCTION(o[:, None], o[None, :], level).to(tl.int32))


@triton.jit
def _middles(out, FUNCTION: tl.constexpr, level, C: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(out + o, FUNCTION(o, level))


@triton.jit
def _levels(out, FUNCTION: tl.constexpr, C: tl.constexpr):
    count = 0
    for _ in tl.range(0, FUNCTION(C), num_stages=1):
        count += 1
    tl.store(out, count)


@triton.jit
def _tokens(x, out, FUNCTION: tl.constexpr, step_b, step_t, step_h, i_b, first, i_h, T, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    t, o = tl.arange(0, C), tl.arange(0, BD)
    tl.store(out + t[:, None] * BD + o[None, :], FUNCTION(x, step_b, step_t, step_h, i_b, first + t, i_h, o, T, D))


@triton.jit
def _copied(x, out, LOAD: tl.constexpr, STORE: tl.constexpr, first, count, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    row, o = first + tl.arange(0, C), tl.arange(0, BD)
    STORE(out, row, row < first + count, o, D, LOAD(x, row, o, D))


@triton.jit
def _steep(rows, out, left, FUNCTION: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr):
    tl.store(out, FUNCTION(rows, left, WIDTH, C, K, SPAN).to(tl.int32))


@triton.jit
def _any_steep(rows, out, n_chunks, FUNCTION: tl.constexpr, T, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    for first in range(0, n_chunks, 4):
        tl.store(out + first // 4, FUNCTION(rows, first, n_chunks, T, N, H, W, C, K, 3.0, 4).to(tl.int32))


@triton.jit
def _vector_sum(x, out, FUNCTION: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    o = tl.arange(0, C)
    tl.store(out + o, FUNCTION(tl.load(x + o), REVERSE, EXCLUSIVE))


@triton.jit
def _tile_sum(x, out, FUNCTION: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    o = tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + o, FUNCTION(tl.load(x + o), REVERSE, EXCLUSIVE))


@triton.jit
def _passes(out, FUNCTION: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, T):
    count = 0
    for _ in tl.range(0, FUNCTION(K, BK, T)):
        count += 1
    tl.store(out, count)


@triton.jit
def _inverse(x, out, FUNCTION: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr):
    o = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + o, FUNCTION(tl.load(x + o), DTYPE, "ieee"))


# ---- what runs in the interpreter


def elementwise(name: str, x: list[float], y: list[float] | None = None, constant: float | None = None) -> Tensor:
    """A function of recgen.primitives at these values, in fp32; their number is a power of two."""
    function, values = getattr(primitives, name), torch.tensor(x, dtype=torch.float32)
    out = torch.empty_like(values)
    if y is not None:
        _binary[(1,)](values, torch.tensor(y, dtype=torch.float32), out, function, len(x))
    elif constant is not None:
        _with_constant[(1,)](values, out, function, constant, len(x))
    else:
        _unary[(1,)](values, out, function, len(x))
    return out


def pairs(C: int, level: int) -> Tensor:
    out = torch.empty(C, C, dtype=torch.int32)
    _pairs[(1,)](out, primitives.across_middle, level, C)
    return out


def middles(C: int, level: int) -> Tensor:
    out = torch.empty(C, dtype=torch.int32)
    _middles[(1,)](out, primitives.middle_of_block, level, C)
    return out


def levels(C: int) -> int:
    out = torch.empty(1, dtype=torch.int32)
    _levels[(1,)](out, primitives.levels, C)
    return int(out)


def tokens(x: Tensor, steps: tuple[int, int, int], at: tuple[int, int, int], T: int, C: int, BD: int) -> Tensor:
    out = torch.empty(C, BD, dtype=x.dtype)
    _tokens[(1,)](x, out, primitives.load_tokens, *steps, *at, T, C, x.shape[-1], BD)
    return out


def copied(x: Tensor, D: int, first: int, count: int, C: int, BD: int) -> Tensor:
    out = torch.full_like(x, NAN)
    _copied[(1,)](x, out, primitives.load_rows, primitives.store_rows, first, count, C, D, BD)
    return out


def _counted(K: int, BK: int) -> int:
    out = torch.empty(1, dtype=torch.int32)
    _passes[(1,)](out, primitives.passes, K, BK, 100)
    return int(out)


def steep(rows: Tensor, left: int, span: float) -> bool:
    C, K = rows.shape
    padded, out = torch.nn.functional.pad(rows, (0, -K % 4), value=-1e9).contiguous(), torch.empty(1, dtype=torch.int32)
    _steep[(1,)](padded, out, left, primitives.is_steep, padded.shape[1], C, K, span)
    return bool(out)


def groups(rows: Tensor, T: int) -> Tensor:
    """Of [B,H,N,C,K]: whether a chunk is steep in each group of four, where heads are neighbours."""
    B, H, N, C, K = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -K % 4), value=-1e9).contiguous()
    out = torch.full((-(-B * H * N // 4),), -1, dtype=torch.int32)
    _any_steep[(1,)](padded, out, B * H * N, primitives.any_steep, T, N, H, padded.shape[-1], C, K)
    return out


def sides(C: int, level: int, upper_zero: bool, lower_zero: bool) -> Tensor:
    out = torch.empty(C)
    _sides[(1,)](out, primitives.side_of_middle, level, upper_zero, lower_zero, C)
    return out


def summed(x: Tensor, reverse: bool, exclusive: bool) -> Tensor:
    out = torch.empty_like(x)
    if x.dim() == 1:
        _vector_sum[(1,)](x, out, primitives.chunk_sum, reverse, exclusive, *x.shape)
    else:
        _tile_sum[(1,)](x, out, primitives.chunk_sum, reverse, exclusive, *x.shape)
    return out


def inverted(x: Tensor, dtype: str) -> Tensor:
    out = torch.empty_like(x)
    _inverse[(1,)](x, out, primitives.unit_lower_inverse, x.shape[0], getattr(tl, dtype))
    return out


# ---- tests


def close(found: Tensor, expected: Array, relative: float = 2e-7, absolute: float = 0.0) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=relative, atol=absolute)


EDGES = [-INF, -1e30, -200.0, -88.0, -87.0, -1.0, -1e-3, -0.0, 0.0, 1e-30, 1e-3, 1.0, 20.0, 88.0, 1e30, INF]


def test_softplus(interpret: Interpret) -> None:
    """Nothing overflows, and log(1 + x) is as good as fp32 is beside 1."""
    close(interpret(elementwise, "softplus", EDGES), np.logaddexp(0.0, np.array(EDGES)), absolute=2e-7)


def test_tanh(interpret: Interpret) -> None:
    close(interpret(elementwise, "tanh", EDGES), np.tanh(np.array(EDGES)), absolute=2e-7)


@pytest.mark.parametrize("exponent", (2.0, 0.5, -0.5, -1.0, 3.0, -1.5, -2.0, 1.5, 4.0, -0.25))
def test_power(interpret: Interpret, exponent: float) -> None:
    x = [1e-4, 0.3, 0.999, 1.0, 1.001, 2.0, 77.0, 1e4]
    close(interpret(elementwise, "power", x, constant=exponent), np.array(x) ** exponent, relative=2e-6)


@pytest.mark.parametrize(("exponent", "at_zero"), ((2.0, 0.0), (0.5, 0.0), (-0.5, INF), (-1.0, INF), (3.0, 0.0), (-2.0, INF), (1.5, 0.0)))
def test_power_at_zero(interpret: Interpret, exponent: float, at_zero: float) -> None:
    assert interpret(elementwise, "power", [0.0, 0.0], constant=exponent).tolist() == [at_zero] * 2


def test_integer_powers_of_negative_numbers(interpret: Interpret) -> None:
    for exponent in (2.0, 3.0, -1.0, -2.0):
        close(interpret(elementwise, "power", [-3.0, -0.5], constant=exponent), np.array([-3.0, -0.5]) ** exponent)


@pytest.mark.parametrize("exponent", (1, 2, 3, 4, 7))
def test_integer_power(interpret: Interpret, exponent: int) -> None:
    x = [-2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 1.5, 20.0]
    close(interpret(elementwise, "integer_power", x, constant=exponent), np.array(x) ** exponent, relative=6e-7)


def test_sign(interpret: Interpret) -> None:
    assert interpret(elementwise, "sign", [-INF, -1e-30, -0.0, 0.0, 1e-30, INF, -2.0, 2.0]).tolist() == [-1, -1, 0, 0, 1, 1, -1, 1]


def test_quotient(interpret: Interpret) -> None:
    """0 over anything is 0, so that a gradient that no path carries is none; the rest is division."""
    found = interpret(elementwise, "quotient", [0.0, 0.0, -0.0, 0.0, 0.0, 6.0, 1.0, -INF], [0.0, NAN, INF, 5.0, -INF, -3.0, 0.0, 2.0])
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, -2.0, INF, -INF]


def test_parts_of_a_log_decay(interpret: Interpret) -> None:
    """Below exp(-87) a decay is a reset: its finite part is 0 and it is counted. The boundary itself still decays."""
    g = [-INF, -1e9, -100.0, -87.5, -87.0, -5.0, -1e-3, 0.0]
    assert interpret(elementwise, "log_decay_finite", g).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, -87.0, -5.0, -1e-3, 0.0])
    assert interpret(elementwise, "log_decay_resets", g).tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert interpret(elementwise, "log_decay_floor", g).tolist() == pytest.approx([-87.0] * 5 + [-5.0, -1e-3, 0.0])


@pytest.mark.parametrize("level", (0, 1, 3, 5))
@pytest.mark.parametrize("upper_zero", (False, True))
@pytest.mark.parametrize("lower_zero", (False, True))
def test_sides_of_the_middle(interpret: Interpret, level: int, upper_zero: bool, lower_zero: bool) -> None:
    size = 1 << level
    block = np.repeat([-1.0, 1.0], size)
    block[size] *= not upper_zero
    block[size - 1] *= not lower_zero
    assert np.array_equal(interpret(sides, 64, level, upper_zero, lower_zero).numpy(), np.tile(block, 32 // size))


@pytest.mark.parametrize("C", (16, 32, 64))
def test_the_levels_tile_the_lower_triangle(interpret: Interpret, C: int) -> None:
    """Each t > s stands across the middle of one block of one level."""
    t, s = np.arange(C)[:, None], np.arange(C)[None, :]
    found = [interpret(pairs, C, level).numpy() for level in range(C.bit_length() - 1)]
    for level, across in enumerate(found):
        size = 1 << level
        assert np.array_equal(across, (t // (2 * size) == s // (2 * size)) & (t // size > s // size))
    assert np.array_equal(sum(found), t > s)
    assert interpret(levels, C) == len(found)


@pytest.mark.parametrize("level", (0, 1, 3, 5))
def test_the_middle_of_a_block(interpret: Interpret, level: int) -> None:
    t, size = np.arange(64), 1 << level
    assert np.array_equal(interpret(middles, 64, level).numpy(), t // (2 * size) * (2 * size) + size - 1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_tokens_by_pointer(interpret: Interpret, dtype: torch.dtype) -> None:
    """The rows of one head, however batch, tokens and heads lie: zero behind the last token and behind the width."""
    B, T, H, D, unit = 2, 20, 3, 24, 16 // dtype.itemsize
    x = torch.randn(H, B, T + 2, D + 8, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :, :T, :D].permute(1, 2, 0, 3)
    steps = tuple(n // unit for n in x.stride()[:3])
    found = interpret(tokens, x, steps, (1, 8, 2), T, 16, 32)
    expected = torch.zeros(16, 32, dtype=dtype)
    expected[: T - 8, :D] = x[1, 8:, 2]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("D", (24, 21))
def test_rows_by_pointer(interpret: Interpret, dtype: torch.dtype, D: int) -> None:
    """Rows padded to 16 bytes; only those inside, and of them only their width, are written."""
    unit = 16 // dtype.itemsize
    x = torch.randn(40, -(-D // unit) * unit, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = interpret(copied, x, D, 8, 13, 16, 32)
    assert torch.equal(found[8:21, :D], x[8:21, :D])
    found[8:21, :D] = NAN
    assert found.isnan().all()


@pytest.mark.parametrize("K", (16, 21))
def test_a_steep_chunk_is_one_with_a_steep_half(interpret: Interpret, K: int) -> None:
    """Of the last channel, in the first half or in the second; the span itself is not steep."""
    for half, rows in (("first", slice(0, 16)), ("second", slice(16, 32))):
        for fall, expected in ((-0.25, False), (-0.26, True)):
            gate = torch.full((32, K), -0.01)
            gate[rows, K - 1] = fall
            assert interpret(steep, gate.double().cumsum(0).float(), 32, 4.0) == expected, (half, fall)


def test_the_last_chunk_is_steep_as_its_tokens_are(interpret: Interpret) -> None:
    """Two tokens at -20 fall by less than a span of 60 and are steep; two tokens at -1 are not."""
    for tokens, fall, expected in ((2, -20.0, True), (2, -1.0, False), (20, -20.0, True), (20, -1.0, False)):
        gate = torch.zeros(32, 16)
        gate[:tokens] = fall
        assert interpret(steep, gate.cumsum(0), tokens, 60.0) == expected, (tokens, fall)


def test_a_group_has_a_steep_chunk_where_one_of_its_chunks_is(interpret: Interpret) -> None:
    """18 chunks, of 2 sequences of 3 heads, in groups of four; the last of a sequence has two tokens. Each in turn is steep alone."""
    B, H, N, C, T, K = 2, 3, 3, 16, 34, 21
    left = (16, 16, 2)
    for b, h, n in itertools.product(range(B), range(H), range(N)):
        gate = torch.full((B, H, N, C, K), -0.01)
        gate[:, :, -1, left[-1] :] = 0.0
        gate[b, h, n, : left[n], K - 1] = -2.0
        found = interpret(groups, gate.cumsum(-2), T)
        place = (b * N + n) * H + h
        assert found.tolist() == [int(place // 4 == i) for i in range(5)], (b, h, n)


def test_a_loop_is_never_known_to_be_passed_once(interpret: Interpret) -> None:
    assert [interpret(_counted, K, BK) for K, BK in ((16, 16), (16, 32), (128, 64), (40, 32))] == [1, 1, 2, 2]


@pytest.mark.parametrize("shape", ((16,), (64,), (32, 16), (64, 32)))
@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("exclusive", (False, True))
def test_chunk_sum(interpret: Interpret, shape: tuple[int, ...], reverse: bool, exclusive: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    close(interpret(summed, x, reverse, exclusive), _cumulative(x.double().numpy(), reverse, exclusive), relative=1e-5, absolute=2e-6)


@pytest.mark.parametrize("reverse", (False, True))
def test_an_exclusive_sum_keeps_what_is_small(interpret: Interpret, reverse: bool) -> None:
    """Rows that grow by e^20: the own row subtracted again would leave nothing of the sum before it."""
    x = torch.exp(20.0 * torch.arange(-8.0, 8.0)).clamp(1e-30, 1e30)
    x = x.flip(0) if reverse else x
    for each in (x, x[:, None].repeat(1, 16)):
        found = interpret(summed, each.contiguous(), reverse, True)
        close(found, _cumulative(each.double().numpy(), reverse, True), relative=1e-6)


# dtype of the products -> the error that they may leave, of the largest entry: 4e-7 and 1.7e-3 were measured
PRECISIONS = {"float32": 1e-6, "float16": 3e-3}
KEYS: dict[str, Callable[[int, np.random.Generator], Array]] = {
    "random": lambda C, random: random.standard_normal((C, 24)),
    "near-collinear": lambda C, random: random.standard_normal(24) + 1e-3 * random.standard_normal((C, 24)),
    "equal": lambda C, random: np.ones((C, 24)),
    "alternating": lambda C, random: np.where(np.arange(C) % 2 == 0, 1.0, -1.0)[:, None] * np.ones(24),
}


@pytest.mark.parametrize("C", (16, 32, 64))
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("beta", (1.0, 2.0))
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_unit_lower_inverse(interpret: Interpret, C: int, keys: str, beta: float, dtype: str) -> None:
    """(I - L)^-1 of a correction of unit keys. beta = 2 reflects, which is as far as a correction may go."""
    k = KEYS[keys](C, np.random.default_rng(C))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    L = np.tril(-beta * k @ k.T, -1).astype(np.float32)
    found = interpret(inverted, torch.from_numpy(L), dtype).double().numpy()
    exact = np.linalg.inv(np.eye(C) - L)
    assert np.array_equal(np.triu(found), np.eye(C)), "the diagonal is 1, and nothing lies above it"
    assert np.abs(found - exact).max() <= PRECISIONS[dtype] * np.abs(exact).max()


def _cumulative(x: Array, reverse: bool, exclusive: bool) -> Array:
    ordered = x[::-1] if reverse else x
    total = ordered.cumsum(0)
    if exclusive:
        total = np.concatenate([np.zeros_like(total[:1]), total[:-1]])
    return total[::-1] if reverse else total
