"""Ahead-of-time compilation of emitted packages: the kernels they would launch for given shapes, compiled for any card without one.

The launches are recorded, not written down a second time: the op runs on meta tensors with the launcher replaced.

    python -m recgen.aot [NAME...] [--target sm_90] [--dtype bf16] [--key 128 --value 128] [--jobs 8]

prints what every kernel takes, of the whole zoo and in every shipped configuration unless told less, and fails when one does not compile or
does not fit.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest import mock

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from recgen.cache import module
from recgen.resources import find, folder
from recgen.sample import is_operand

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
POINTERS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
TENSOR_MEMORY = 512
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A card, the dtype of keys and values, and their widths."""

    target: str
    dtype: str
    K: int
    V: int

    def __str__(self) -> str:
        return f"{self.target} {self.dtype} K {self.K} V {self.V}"


SHIPPED = (
    *(Configuration(target, "bf16", 128, 128) for target in TARGETS),
    *(Configuration("sm_90", dtype, 128, 128) for dtype in ("fp16", "fp32")),
    *(Configuration("sm_90", dtype, size, size) for dtype in ("bf16", "fp32") for size in (64, 256)),
    *(Configuration("sm_90", "bf16", *sizes) for sizes in ((128, 64), (64, 128))),
    *(Configuration("sm_90", dtype, 24, 40) for dtype in ("fp16", "fp32")),
)


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
    tensor: int = 0  # columns of Blackwell's tensor memory

    @property
    def fits(self) -> bool:
        return self.shared <= self.limit and self.tensor <= TENSOR_MEMORY

    def __str__(self) -> str:
        over = f"over {self.limit}" if self.shared > self.limit else ""
        if self.tensor > TENSOR_MEMORY:  # such a kernel compiles, to nothing
            over = f"{over} {self.tensor} columns of tensor memory, over {TENSOR_MEMORY}"
        return f"{self.kernel:32} {self.registers:4} {self.spills:6} {self.shared:7} {over}".rstrip()


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel that did not compile."""

    kernel: str
    message: str
    fits: bool = False

    def __str__(self) -> str:
        return f"{self.kernel:32} {self.message}"


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, launches are written to the list instead of being made."""
    launches: list[Launch] = []

    def record(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self.arg_names}
        launches.append(Launch(self, named, {k: v for k, v in kwargs.items() if k in OPTIONS and v is not None}))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


def launches_of(package: ModuleType, configuration: Configuration, B: int = 8, T: int = 4096, H: int = 16) -> list[Launch]:
    """Everything that a training step of the chunked and of the recurrent op launches, with a state that comes and goes."""
    K, V, dtype = configuration.K, configuration.V, DTYPES[configuration.dtype]
    sizes = {"t": (B, T, H), "tk": (B, T, H, K), "tv": (B, T, H, V), "": (H,), "k": (H, K), "v": (H, V)}
    card = package.launch.Card(
        132, TARGETS[configuration.target][1], configuration.target.startswith("gfx"), configuration.target == "sm_100"
    )
    operands = {a.name for a in package.op.ARGUMENTS if a.operand}

    def on_card(device: torch.device) -> Any:
        return card

    with (
        recording() as launches,
        mock.patch.object(package.op, "card", on_card, create=True),
        mock.patch.object(package.launch, "card", on_card),
        mock.patch.object(package.launch, "DEVICES", ("meta",)),
    ):
        _forget(package)
        for op in (getattr(package, name) for name in package.__all__ if name.startswith(("chunk_", "recurrent_"))):
            inputs = []
            for name, axes, kind, *_ in package.INPUTS:
                given = dtype if name in operands or is_operand(axes, kind) else torch.float32
                inputs.append(torch.empty(sizes[axes], dtype=given, device="meta", requires_grad=True))
            start = torch.empty((B, H, K, V), device="meta", requires_grad=True)
            outputs = op(*inputs, initial_state=start, output_final_state=True)
            torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
    _forget(package)
    return launches


def _forget(package: ModuleType) -> None:
    """What a package remembers by shape was chosen for one card."""
    for function in (f for part in (package.op, package.launch) for f in vars(part).values() if hasattr(f, "cache_clear")):
        function.cache_clear()


def reports(name: str, configuration: Configuration) -> list[Report | Failure]:
    """Every kernel of a zoo member, or of the spec at a path, in a configuration."""
    found: dict[str, Report | Failure] = {}
    for launch in launches_of(module(find(name, folder("specs"))), configuration):
        kernel = launch.kernel.__name__
        try:
            found[kernel] = compile_launch(launch, configuration.target)
        except Exception as error:
            found[kernel] = Failure(kernel, f"{type(error).__name__}: {str(error)[-500:]}")
    return list(found.values())


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
    tensor = getattr(compiled.metadata, "tmem_size", None) or 0
    return Report(launch.kernel.__name__, target, registers, spills, compiled.metadata.shared, limit, tensor)


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


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _reports(work: tuple[str, Configuration]) -> list[Report | Failure]:
    return reports(*work)


@app.command()
def _command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Of the zoo, or paths of .rec files. None: the zoo.")] = None,
    target: Annotated[str | None, typer.Option(help=f"One of {', '.join(TARGETS)}. Default: all.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}. Default: all.")] = None,
    key: Annotated[int | None, typer.Option(help="Key channels, for a configuration that is not shipped.")] = None,
    value: Annotated[int | None, typer.Option(help="Value channels. Default: as many as key channels.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that compile.")] = os.cpu_count() or 1,
) -> None:
    """Registers, bytes of spills a thread and bytes of shared memory of every kernel."""
    chosen = SHIPPED
    if key is not None:
        chosen = tuple(Configuration(t, d, key, value or key) for t in TARGETS for d in DTYPES)
    chosen = tuple(c for c in chosen if target in (None, c.target) and dtype in (None, c.dtype))
    zoo = names or sorted(path.stem for path in folder("specs").glob("*.rec"))
    work = [(name, configuration) for configuration in chosen for name in zoo]
    wrong = 0
    print(f"Triton {triton.__version__}\n{'kernel':32} regs spills  shared", flush=True)
    with ProcessPoolExecutor(jobs) as pool:
        for (name, configuration), rows in zip(work, pool.map(_reports, work), strict=True):
            print(f"{name}, {configuration}", *rows, sep="\n", flush=True)
            wrong += sum(not row.fits for row in rows)
    if wrong or not work:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
