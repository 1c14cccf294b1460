"""What every emitted op does on the host: arguments checked before any launch, tiles described, block sizes chosen, kernels launched.

A call repeats earlier ones in all but its data, so whatever follows from shapes, dtypes and device alone is worked out once and looked up.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on CPU tensors
DEVICES = ("cpu", "cuda")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CACHED = 1024  # sets of sizes that are remembered
WIDEST = 256  # key or value channels of a head that the kernels take
RANK = {"t": "[B,T,H]", "tk": "[B,T,H,K]", "tv": "[B,T,H,V]", "": "[H]", "k": "[H,K]", "v": "[H,V]"}


@dataclass(frozen=True, eq=False)
class Argument:
    """A tensor input: its axes (t token, k key, v value; none: per head), and whether matrix products take it as it is."""

    name: str
    axes: str
    operand: bool


@dataclass(frozen=True, eq=False)
class Shape:
    """The sizes of one call and the dtypes of its inputs. Calls that differ in nothing but data share one object: it hashes by identity."""

    B: int
    T: int
    H: int
    K: int
    V: int
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


def check_arguments(op: str, table: tuple[Argument, ...], tensors: tuple[torch.Tensor, ...], initial_state: torch.Tensor | None) -> Shape:
    """The sizes of a call. A wrong argument: TypeError or ValueError with its name, what was expected and what came."""
    return _checked(op, table, tuple([_facts(x) for x in tensors]), None if initial_state is None else _facts(initial_state))


_Facts = tuple[torch.Size, torch.dtype, torch.device] | type


def _facts(x: object) -> _Facts:
    """What can be wrong with an argument: its shape, dtype and device, or its type where it is no tensor."""
    return (x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else type(x)


def _tensor(op: str, name: str, expected: str, facts: _Facts) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    if isinstance(facts, type):
        raise TypeError(f"{op}: {name} must be a tensor {expected}, got {facts.__name__}")
    if not facts[1].is_floating_point:
        raise TypeError(f"{op}: {name} must be a floating-point tensor, got {facts[1]}")
    return tuple(facts[0]), facts[1], facts[2]


@functools.lru_cache(CACHED)
def _checked(op: str, table: tuple[Argument, ...], inputs: tuple[_Facts, ...], state: _Facts | None) -> Shape:
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    dtypes: list[torch.dtype] = []
    on: torch.device | None = None
    for argument, facts in zip(table, inputs, strict=True):
        expected = RANK[argument.axes]
        letters = expected.strip("[]").split(",")
        shape, dtype, device = _tensor(op, argument.name, expected, facts)
        on = on or device
        if len(shape) != len(letters):
            raise ValueError(f"{op}: {argument.name} must be {expected}, got shape {shape}")
        if device != on:
            raise ValueError(f"{op}: {argument.name} must be on {on} as {table[0].name}, got {device}")
        for axis, size in zip(letters, shape, strict=True):
            if axis in "HKV" and size < 1:
                raise ValueError(f"{op}: {argument.name} must be {expected} with {axis} of at least 1, got shape {shape}")
            if sizes.setdefault(axis, size) != size:
                known = f"{axis} = {sizes[axis]} as in {origin[axis]}"
                raise ValueError(f"{op}: {argument.name} must be {expected} with {known}, got shape {shape}")
            origin.setdefault(axis, argument.name)
        dtypes.append(dtype)
    assert on is not None
    if on.type not in DEVICES:
        raise ValueError(f"{op}: {table[0].name} must be on a CPU or a GPU, got {on}")
    if state is not None:
        shape, _, device = _tensor(op, "initial_state", "[B,H,K,V]", state)
        if device != on:
            raise ValueError(f"{op}: initial_state must be on {on} as {table[0].name}, got {device}")
        wanted = tuple(sizes[a] for a in "BHKV")
        if shape != wanted:
            raise ValueError(f"{op}: initial_state must be [B,H,K,V] = {wanted}, got shape {shape}")
    B, T, H, K, V = (sizes[a] for a in "BTHKV")
    return Shape(B, T, H, K, V, tuple(dtypes), on)


def check_number(op: str, name: str, value: object) -> float:
    """A keyword argument of the spec: a Python number, since no gradient flows to it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op}: {name} must be a number or None, got {type(value).__name__}")
    return float(value)


@functools.lru_cache(CACHED)
def check_kernels(op: str, table: tuple[Argument, ...], shape: Shape) -> None:
    """The kernels take fp32, fp16 and bf16, what meets the tensor cores must agree, and a state has to fit registers."""
    for axis, size in (("K", shape.K), ("V", shape.V)):
        if size > WIDEST:
            name = next(a.name for a in table if axis.lower() in a.axes)
            raise ValueError(f"{op}: {axis} must be at most {WIDEST} on {shape.device.type}, got {size} in {name}")
    for argument, dtype in zip(table, shape.dtypes, strict=True):
        if dtype not in FLOATS:
            raise TypeError(f"{op}: {argument.name} must be float32, float16 or bfloat16 on {shape.device.type}, got {dtype}")
        if INTERPRETED and dtype == torch.bfloat16:
            raise TypeError(
                f"{op}: {argument.name} must be float32 or float16 under TRITON_INTERPRET, whose bfloat16 arithmetic is wrong, got {dtype}"
            )
    operands = [(a.name, dtype) for a, dtype in zip(table, shape.dtypes, strict=True) if a.operand]
    for name, dtype in operands:
        if dtype != operands[0][1]:
            raise TypeError(f"{op}: {name} must be {operands[0][1]} as {operands[0][0]}, got {dtype}")


# ---- tiles


@functools.lru_cache(CACHED)
def _steps_on_16_bytes(strides: tuple[int, ...], size: int) -> bool:
    """Whether a tensor descriptor can step like this over elements of so many bytes: the last by one, all others on 16 bytes."""
    return strides[-1] == 1 and all(s * size % 16 == 0 and s > 0 for s in strides[:-1])


def new_tiles(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor that a descriptor can address: rows padded to 16 bytes where need be."""
    multiple = 16 // dtype.itemsize
    if shape[-1] % multiple == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    width = -(-shape[-1] // multiple) * multiple
    return torch.empty((*shape[:-1], width), dtype=dtype, device=device)[..., : shape[-1]]


def addressable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it that a descriptor can address."""
    if x.data_ptr() % 16 == 0 and _steps_on_16_bytes(x.stride(), x.dtype.itemsize):
        return x
    made = new_tiles(tuple(x.shape), x.dtype, x.device)
    return made.copy_(x)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it that has no gaps and starts on 16 bytes."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _described(x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """The descriptor without the checks of its constructor, which cost more than a launch: x is addressable, blocks are powers of 2."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, shape, strides, block
    return made


def token_tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """[B,T,H,D] as blocks of `rows` tokens of one head: rows behind T and columns behind D read as 0 and are not written."""
    B, T, H, D = x.shape
    b, t, h, d = x.stride()
    return _described(x, [B, H, T, D], [b, h, t, d], [1, 1, rows, columns])


def tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """[N,R,D] as blocks of `rows` by `columns`."""
    N, R, D = x.shape
    n, r, d = x.stride()
    return _described(x, [N, R, D], [n, r, d], [1, rows, columns])


def row_tiles(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """[N,D] as pieces of rows, `columns` long."""
    return _described(x, [*x.shape], [*x.stride()], [1, columns])


def token_steps(x: torch.Tensor) -> tuple[int, int, int]:
    """The strides of B, T and H of an addressable [B,T,H,D], in units of 16 bytes."""
    b, t, h, _ = x.stride()
    unit = 16 // x.itemsize
    return b // unit, t // unit, h // unit


# ---- block sizes


@dataclass(frozen=True)
class Facts:
    """What a kernel is: how it walks over the chunks, how many tiles of each shape one iteration loads, its products, whether it has scores
    with a decay per channel, and for steep chunks, stores the state of every chunk, and inverts."""

    walk: str
    tk: int
    tv: int
    ts: int
    vk: int
    dots: int
    channels: bool
    steep: bool
    keeps: bool
    inverts: bool


@dataclass(frozen=True)
class Blocks:
    """Tile sizes and the launch options of one kernel."""

    BK: int
    BV: int
    warps: int
    stages: int
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, int]:
        return {} if self.maxnreg is None or INTERPRETED else {"maxnreg": self.maxnreg}


@dataclass(frozen=True, eq=False)
class Card:
    """What the choice of blocks needs to know of a device. One object a device."""

    multiprocessors: int
    shared_memory: int
    hip: bool
    blackwell: bool = False


@functools.cache
def card(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(132, 227 * 1024, False)
    properties: Any = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    shared = 64 * 1024 if hip else properties.shared_memory_per_block_optin
    return Card(properties.multi_processor_count, shared, hip, not hip and properties.major >= 10)


def chunk_size(dtype: torch.dtype) -> int:
    """Tokens a chunk: fp32 tiles are twice as wide, so half as many rows."""
    return 64 if dtype.itemsize == 2 else 32


def choose_blocks(facts: Facts, heads: int, K: int, V: int, itemsize: int, on: Card) -> Blocks:
    """Block sizes by rule: what fills the card first, then what fits shared memory, then what was measured to be fast."""
    C = 64 if itemsize == 2 else 32
    BK, BV = max(16, triton.next_power_of_2(K)), max(16, triton.next_power_of_2(V))
    if facts.steep:
        # Its tiles stay in registers, all of a level's products at once: what spills was counted for widths of 16 and 32, 4 and 8 warps.
        width = 16 if facts.dots > (6 if itemsize == 2 else 2) else 32
        return Blocks(min(BK, width), BV, 8 if facts.dots > 2 else 4, 1)
    if facts.walk == "parallel":
        width = min(BK, 32) if facts.channels or facts.dots > 6 else min(BK, 128 if facts.dots == 1 else 64)
        if facts.dots != 1:  # two passes at least, so that one loads while the other computes
            width = max(16, min(width, BK // 2))
        fixed = (facts.tv * C * BV + facts.ts * C * C) * itemsize
        warps = 8 if (facts.channels and facts.dots > 5) or (BV > 128 and facts.tv + facts.vk) else 4
        deep = 3 if facts.dots and width < BK else 2  # what only passes through needs programs, not stages
        # Two programs of four warps share a multiprocessor, where they fit. Never one stage: a loop of descriptor loads in one stage has
        # been seen to go wrong.
        whole = on.shared_memory - 4096 - (C * BV * itemsize if facts.tv else 0)  # a tile of value channels between two layouts
        half = on.shared_memory // 2 - (8192 if facts.channels else 1024)  # beside what is loaded: rows between two layouts
        tries = [
            (half, width, deep),
            (half, width, 2),
            (whole, width, deep),
            (whole, width, 2),
            (whole, max(16, width // 2), 2),
            (whole, 16, 2),
        ]
        for limit, tile, stages in tries:
            moving = (facts.tk * C + facts.vk * BV) * min(BK, tile) * itemsize
            if fixed + stages * moving <= limit and (limit == whole or warps == 4):
                break
        # An inverse is a chain of small products: what hides its latency is other programs, five on a multiprocessor, or three.
        few = facts.inverts and warps == 4 and itemsize == 2 and not on.hip
        registers = None if facts.channels and facts.dots > 2 else (168 if facts.channels else 96)
        return Blocks(min(BK, tile), BV, warps, stages, registers if few else None)
    wide = [(128, 8, 3), (128, 8, 2), (64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 4, 2), (16, 4, 2), (16, 4, 1)]
    if itemsize == 4 or on.hip:
        wide = [(32, 4, 2), (16, 4, 2), (16, 4, 1)]
    fallback = wide[-1]
    for tile, warps, stages in wide:
        if tile > BV:
            continue
        loaded = (facts.tk * C * BK + facts.tv * C * tile + facts.ts * C * C) * itemsize
        stored = (C * tile + C * C + tile * BK * facts.keeps) * itemsize  # what waits to be written, and a score between two layouts
        if loaded * stages + stored > on.shared_memory - 2560 or (BK > 128 and tile > 64):
            continue
        if on.blackwell and facts.dots > 4 and tile > (64 if BK <= 128 else 32):  # each product has its own place in the tensor memory
            continue
        if tile > 32 and heads * triton.cdiv(V, tile) < 0.7 * on.multiprocessors:
            continue
        return Blocks(BK, tile, warps, stages)
    tile, warps, stages = fallback
    return Blocks(BK, min(tile, BV), warps, stages)


def chunks_a_program(facts: Facts, chunks: int, on: Card) -> int:
    """How many chunks a program of a kernel for steep ones looks at: few programs, as most often none of them has one, but enough to fill
    the card evenly if they all have."""
    most = chunks // (4 * on.multiprocessors)
    return min(16, 1 << most.bit_length() - 1) if facts.steep and most else 1


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """fp32 products as three tf32 products: an error near 1e-6 at tensor-core speed. 16-bit operands have one form only."""
    if INTERPRETED or card(device).hip:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def decay_span(dtype: torch.dtype) -> float:
    """How far a log decay may fall over half a chunk for one product to hold it: e^span and e^-span scale the operands. bf16 has the range
    of fp32; fp16 overflows at e^11; the exponential of a large number is not precise enough for fp32."""
    return {torch.bfloat16: 60.0, torch.float16: 3.0, torch.float32: 8.0}[dtype]


# ---- launches


class Launch:
    """One kernel at one set of sizes, called with its tensors and numbers; what follows from the sizes is appended.

    The first call goes through Triton's own launcher, which works out from the arguments what to specialise on, and compiles. Every further
    call hands its arguments to the kernel that this made: dtypes, integers and which tensors are None are the same by the key that this
    object is cached under, and all tensors start on 16 bytes.
    """

    __slots__ = ("BK", "BV", "_again", "_grid", "_kernel", "_options", "_sizes", "direct")

    def __init__(self, kernel: Any, programs: int, at: Blocks, sizes: dict[str, object], **options: int) -> None:
        self.BK, self.BV = at.BK, at.BV
        self.direct = sizes.get("DIRECT", False)
        self._kernel, self._grid = kernel, (programs, 1, 1)
        known = {**sizes, "BK": at.BK, "BV": at.BV, "STAGES": at.stages}
        self._sizes = tuple(known[name] for name in kernel.arg_names if name in known)
        self._options = {"num_warps": at.warps, **options}
        self._again: Callable[..., None] | None = None

    def __call__(self, *arguments: object) -> None:
        if self._again is not None:
            self._again(*arguments, *self._sizes)
            return
        made = self._kernel[self._grid](*arguments, *self._sizes, **self._options)
        if isinstance(made, CompiledKernel):  # nothing under the interpreter
            self._again = made[self._grid]


_STAY = contextlib.nullcontext()


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes the device of the tensors the current one, on which Triton launches, if it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(device)
