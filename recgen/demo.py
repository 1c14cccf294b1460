"""`python -m recgen.demo [NAME]`: run one package of generated/ on this machine and show what it made.

Trains one step (output, final state and every gradient), holds it against the token loop in fp64, decodes token by token from a
prefilled state, and times both.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recgen.errors import RecgenError
from recgen.package import on_disk
from recgen.sample import draw, error, results

B, T, H = 1, 1024, 4
DECODED = 16  # tokens


def demo(name: str, out: Path = Path("generated")) -> None:
    """Run the package `out`/<name> on CUDA in bf16 where there is a CUDA device, else on the CPU in fp32."""
    if not (out / name / "__init__.py").is_file():
        raise RecgenError(f"{out / name} is not there: recgen generate {name}")
    console = Console()
    package = importlib.import_module(f"{out.name}.{name}")
    device, dtype, width = ("cuda", torch.bfloat16, 128) if torch.cuda.is_available() else ("cpu", torch.float32, 64)
    inputs = draw(package.INPUTS, B, T, H, width, width, seed=0, device=device, dtype=dtype)
    console.print(_files(out / name))
    place = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in inputs.items())
    console.print(f"\n{name} on {place}, {str(dtype).removeprefix('torch.')}\n{shapes}\n", highlight=False, soft_wrap=True)
    console.print(_training(package, name, inputs))
    console.print(f"\n{_decoding(package, name, inputs)}", highlight=False, soft_wrap=True)


def _files(folder: Path) -> Table:
    table = Table("file", box=None, pad_edge=False)
    table.add_column("lines", justify="right")
    table.add_column("bytes", justify="right")
    for name, text in on_disk(folder).items():
        table.add_row((folder / name).as_posix(), f"{text.count(chr(10)):,}", f"{len(text.encode()):,}")
    return table


def _training(package: ModuleType, name: str, inputs: dict[str, Tensor]) -> Table:
    """Error of everything a training step makes, against the token loop in fp64, and what each takes."""
    op, reference = getattr(package, name), getattr(package, f"reference_{name}")
    exact = {key: value.double() for key, value in inputs.items()}
    o, state = reference(**exact, output_final_state=True)
    random = torch.Generator(o.device).manual_seed(1)
    gradient = torch.randn(o.shape, generator=random, device=o.device, dtype=torch.float64)
    ahead = torch.randn(state.shape, generator=random, device=o.device, dtype=torch.float64)

    truth = results(reference, exact, gradient, state_grad=ahead)
    made = results(op, inputs, gradient, state_grad=ahead)
    table = Table("tensor", "shape", "error against fp64", box=None, pad_edge=False)
    for key, value in made.items():
        table.add_row(key, str(list(value.shape)), f"{error(value, truth[key]):.1e}")
    table.add_section()
    ours = _milliseconds(lambda: results(op, inputs, gradient, state_grad=ahead))
    loop = _milliseconds(lambda: results(reference, inputs, gradient, state_grad=ahead))
    table.add_row("forward + backward", f"{ours:.1f} ms", f"token loop {loop:.1f} ms: {loop / ours:.0f}x")
    return table


def _decoding(package: ModuleType, name: str, inputs: dict[str, Tensor]) -> str:
    """Prefill, then one token at a time from the state that the prefill left; the same output as one pass."""
    op = getattr(package, name)
    timed = {row[0] for row in package.INPUTS if row[1].startswith("t")}

    def part(first: int, last: int) -> dict[str, Tensor]:
        return {key: value[:, first:last] if key in timed else value for key, value in inputs.items()}

    with torch.no_grad():
        whole, _ = op(**inputs)
        prompt, state = op(**part(0, T - DECODED), output_final_state=True)
        pieces = [prompt]
        for token in range(T - DECODED, T):
            o, state = op(**part(token, token + 1), initial_state=state, output_final_state=True)
            pieces.append(o)
    difference = error(torch.cat(pieces, dim=1), whole)
    return f"prefill of {T - DECODED} tokens, then {DECODED} decoded one by one: differs from one pass by {difference:.1e}"


def _milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    """The best of a few runs, after one that compiles."""
    best = float("inf")
    for attempt in range(repeats + 1):
        _finish()
        start = time.perf_counter()
        run()
        _finish()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return 1e3 * best


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    try:
        demo(sys.argv[1] if len(sys.argv) > 1 else "gated_deltanet")
    except RecgenError as problem:
        sys.exit(f"recgen: error: {problem}")
