"""What every emitted op does on the host: arguments checked before any launch, tiles described, block sizes chosen by shape and card."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on CPU tensors
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
RANK = {"t": "[B,T,H]", "tk": "[B,T,H,K]", "tv": "[B,T,H,V]", "": "[H]", "k": "[H,K]", "v": "[H,V]"}


@dataclass(frozen=True)
class Argument:
    """A tensor input: its axes (t token, k key, v value; none: per head), and whether matrix products take it as it is."""

    name: str
    axes: str
    operand: bool


@dataclass(frozen=True)
class Shape:
    """The sizes of one call."""

    B: int
    T: int
    H: int
    K: int
    V: int


def check_arguments(op: str, table: tuple[Argument, ...], tensors: tuple[torch.Tensor, ...], initial_state: torch.Tensor | None) -> Shape:
    """The sizes of a call. A wrong argument: TypeError or ValueError with its name, what was expected and what came."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}

    def agree(name: str, axis: str, size: int, shape: tuple[int, ...], expected: str) -> None:
        if sizes.setdefault(axis, size) != size:
            raise ValueError(f"{op}: {name} must be {expected} with {axis} = {sizes[axis]} as in {origin[axis]}, got shape {shape}")
        origin.setdefault(axis, name)

    first = tensors[0]
    for argument, x in zip(table, tensors, strict=True):
        expected = RANK[argument.axes]
        letters = expected.strip("[]").split(",")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: {argument.name} must be a tensor {expected}, got {type(x).__name__}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{op}: {argument.name} must be a floating-point tensor, got {x.dtype}")
        if x.dim() != len(letters):
            raise ValueError(f"{op}: {argument.name} must be {expected}, got shape {tuple(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{op}: {argument.name} must be on {first.device} as {table[0].name}, got {x.device}")
        for axis, size in zip(letters, x.shape, strict=True):
            agree(argument.name, axis, size, tuple(x.shape), expected)
    if initial_state is not None:
        if not isinstance(initial_state, torch.Tensor):
            raise TypeError(f"{op}: initial_state must be a tensor [B,H,K,V], got {type(initial_state).__name__}")
        if not initial_state.dtype.is_floating_point:
            raise TypeError(f"{op}: initial_state must be a floating-point tensor, got {initial_state.dtype}")
        if initial_state.device != first.device:
            raise ValueError(f"{op}: initial_state must be on {first.device} as {table[0].name}, got {initial_state.device}")
        expected_state = tuple(sizes[a] for a in "BHKV")
        if tuple(initial_state.shape) != expected_state:
            raise ValueError(f"{op}: initial_state must be [B,H,K,V] = {expected_state}, got shape {tuple(initial_state.shape)}")
    return Shape(*(sizes[a] for a in "BTHKV"))


def check_kernel_dtypes(op: str, table: tuple[Argument, ...], tensors: tuple[torch.Tensor, ...]) -> None:
    """The kernels take fp32, fp16 and bf16; what meets the tensor cores must agree."""
    for argument, x in zip(table, tensors, strict=True):
        if x.dtype not in FLOATS:
            raise TypeError(f"{op}: {argument.name} must be float32, float16 or bfloat16 on {x.device.type}, got {x.dtype}")
    operands = [(a.name, x.dtype) for a, x in zip(table, tensors, strict=True) if a.operand]
    for name, dtype in operands:
        if dtype != operands[0][1]:
            raise TypeError(f"{op}: {name} must be {operands[0][1]} as {operands[0][0]}, got {dtype}")


# ---- tiles


def _aligned(x: torch.Tensor) -> bool:
    """Whether a tensor descriptor can address x: unit last stride, everything else on 16 bytes."""
    size = x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 and s > 0 for s in x.stride()[:-1])


def new_tiles(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor that a descriptor can address: rows padded to 16 bytes where need be."""
    multiple = 16 // dtype.itemsize
    width = -(-shape[-1] // multiple) * multiple
    return torch.empty((*shape[:-1], width), dtype=dtype, device=device)[..., : shape[-1]]


def addressable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it that a descriptor can address."""
    if _aligned(x):
        return x
    made = new_tiles(tuple(x.shape), x.dtype, x.device)
    return made.copy_(x)


def token_tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """[B,T,H,D] as blocks of `rows` tokens of one head: rows behind T and columns behind D read as 0 and are not written."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """[N,R,D] as blocks of `rows` by `columns`."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, columns])


# ---- block sizes


@dataclass(frozen=True)
class Facts:
    """What a kernel is: how it walks over the chunks, and how many tiles of each shape one iteration loads, its products, and whether it works through
    levels of halved chunks."""

    walk: str
    tk: int
    tv: int
    ts: int
    vk: int
    dots: int
    levels: bool


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


@dataclass(frozen=True)
class Card:
    """What the choice of blocks needs to know of a device."""

    multiprocessors: int
    shared_memory: int
    hip: bool


@functools.cache
def card(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(132, 227 * 1024, False)
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    shared = 64 * 1024 if hip else properties.shared_memory_per_block_optin
    return Card(properties.multi_processor_count, shared, hip)


def chunk_size(dtype: torch.dtype) -> int:
    """Tokens a chunk: fp32 tiles are twice as wide, so half as many rows."""
    return 64 if dtype.itemsize == 2 else 32


def choose_blocks(facts: Facts, heads: int, K: int, V: int, itemsize: int, on: Card) -> Blocks:
    """Block sizes by rule: what fills the card first, then what fits shared memory, then what was measured to be fast."""
    C = 64 if itemsize == 2 else 32
    BK, BV = max(16, triton.next_power_of_2(K)), max(16, triton.next_power_of_2(V))
    if facts.walk == "parallel":
        BK = min(BK, 32 if facts.dots > 6 else 64) if facts.tv or facts.dots > 1 else min(BK, 128)
        fixed = (facts.tv * C * BV + facts.ts * C * C) * itemsize
        moving = (facts.tk * C * BK + facts.vk * BV * BK) * itemsize
        stages = 3 if fixed + 3 * moving <= on.shared_memory else (2 if fixed + 2 * moving <= on.shared_memory else 1)
        return Blocks(BK, BV, 4 if BV <= 128 else 8, stages)
    wide = [(128, 8, 3), (128, 8, 2), (64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 4, 2), (16, 4, 2), (16, 4, 1)]
    if itemsize == 4 or on.hip:
        wide = [(32, 4, 2), (16, 4, 2), (16, 4, 1)]
    fallback = wide[-1]
    for tile, warps, stages in wide:
        if tile > BV:
            continue
        bytes_loaded = (facts.tk * C * BK + facts.tv * C * tile + facts.ts * C * C) * itemsize
        if bytes_loaded * stages > on.shared_memory - 4096 or (BK > 128 and tile > 64):
            continue
        if tile > 32 and heads * triton.cdiv(V, tile) < 0.7 * on.multiprocessors:
            continue
        return Blocks(BK, tile, warps, stages)
    tile, warps, stages = fallback
    return Blocks(BK, min(tile, BV), warps, stages)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """fp32 products as three tf32 products: an error near 1e-6 at tensor-core speed. 16-bit operands have one form only."""
    if INTERPRETED or card(device).hip:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
