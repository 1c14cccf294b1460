"""Ahead-of-time compilation of an emitted package: the kernels it would launch for given shapes, compiled for any card without one.

The launches are recorded, not written down a second time: the op runs on meta tensors with the launcher replaced.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
POINTERS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: the kernel, and its arguments by name."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """What a compiled kernel takes. spills: bytes of local memory a thread; -1 where the target does not say."""

    kernel: str
    target: str
    registers: int
    spills: int
    shared: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.shared <= self.limit


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, launches are written to the list instead of being made."""
    launches: list[Launch] = []

    def record(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.arg_names}
        launches.append(Launch(self, named, {k: v for k, v in kwargs.items() if k in OPTIONS and v is not None}))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


def launches_of(package: ModuleType, shape: tuple[int, int, int, int, int], dtype: torch.dtype, target: str, *, state: bool = True) -> list[Launch]:
    """Everything that a training step of the chunked and of the recurrent op launches at [B, T, H, K, V]."""
    B, T, H, K, V = shape
    sizes = {"t": (B, T, H), "tk": (B, T, H, K), "tv": (B, T, H, V), "": (H,), "k": (H, K), "v": (H, V)}
    name = package.__name__.rsplit(".", 1)[-1]
    limit = TARGETS[target][1]
    fake = package.launch.Card(132, limit, target.startswith("gfx"))
    operands = {a.name: a.operand for a in package.op.ARGUMENTS}
    modes = [f for f in (getattr(package, f"chunk_{name}", None), getattr(package, f"recurrent_{name}")) if f is not None]
    with recording() as launches, mock.patch.object(package.op, "card", lambda device: fake, create=True), mock.patch.object(package.launch, "card", lambda device: fake):
        for op in modes:
            inputs = [
                torch.empty(sizes[axes], dtype=dtype if operands[n] or len(axes) == 2 and domain != "log_decay" else torch.float32, device="meta", requires_grad=True)
                for n, axes, domain, *_ in package.INPUTS
            ]
            start = torch.empty((B, H, K, V), device="meta", requires_grad=True) if state else None
            o, last = op(*inputs, initial_state=start, output_final_state=state)
            torch.autograd.backward([o, *([last] if state else [])], [torch.empty_like(o), *([torch.empty_like(last)] if state else [])])
    return launches


def compile_launch(launch: Launch, target: str) -> Report:
    """Compiles one launch for a target and reads off what it takes."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    declared = {p.name: p.is_constexpr for p in launch.kernel.params}
    for i, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if declared[name] or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{POINTERS[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{POINTERS[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    architecture, limit = TARGETS[target]
    options = {k: v for k, v in launch.options.items() if k != "maxnreg" or architecture.backend == "cuda"}
    compiled = triton.compile(ASTSource(launch.kernel, signature, constants, attributes), target=architecture, options=options)
    registers, spills = _resources(compiled.asm)
    return Report(launch.kernel.__name__, target, registers, spills, compiled.metadata.shared, limit)


def _resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers and bytes of local memory a thread."""
    if "amdgcn" in asm:
        registers = re.search(r"\.vgpr_count:\s*(\d+)", asm["amdgcn"])
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", asm["amdgcn"])
        return (int(registers.group(1)) if registers else -1, 4 * int(spills.group(1)) if spills else -1)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else (-1, -1)
