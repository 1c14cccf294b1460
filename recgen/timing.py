"""timing: an emitted op and a peer's on the same inputs in the same process, each time with its error beside it.

Medians between device events, the cache flushed before every run. Errors are against the token loop in fp64 on a window of
the full-size call: a fast wrong kernel is no result.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from recgen.parity import Call, Emitted, Failure, Shape, alive, describe, load
from recgen.peers import PEERS, tuning
from recgen.sample import error, results

TIMED: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("train", 8, 4096, 16),
        Shape("narrow", 1, 8192, 8),
        Shape("steep", 8, 4096, 16, regime="-5"),
        Shape("long", 1, 32768, 16),
        Shape("wide", 4, 4096, 64),
        Shape("small", 8, 1024, 8, 64, 64),
        Shape("big", 8, 2048, 32, 256, 256),
        Shape("decode", 256, 1, 16, decode=True),
    )
}
ON_CPU = Shape("cpu", 1, 4096, 2, 64, 64)

WINDOW = 4096  # tokens compared with the reference at most,
LEAST = 512  # and at least, however slow it is
PROBE = 64


@dataclass(frozen=True, slots=True)
class Timing:
    """One op, ours or a peer's, at one shape. Times are medians; the peak is over inputs and upstream gradient."""

    op: str
    who: str
    shape: str
    dtype: str
    first_s: float
    forward_ms: float
    total_ms: float | None  # forward + backward; None for decode
    peak_mib: float
    host_us: float  # to enqueue a forward call
    errors: Mapping[str, float]  # o, d<input>
    note: str = ""


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first forward + backward of a fresh process at one shape, compilation included."""

    op: str
    who: str
    shape: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TokenLoop:
    """On a CPU: the chunked torch path against the token loop, forward, in seconds."""

    op: str
    chunked_s: float
    loop_s: float


@dataclass(frozen=True, slots=True)
class Contender:
    """A callable to time. `shared` maps its arguments to our inputs where they are the same: there gradients can be compared."""

    who: str
    call: Call
    tensors: Mapping[str, Tensor]
    shared: Mapping[str, str]
    finish: Callable[[Tensor], Tensor] | None = None
    note: str = ""

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call(**self.tensors)[0]

    def both(self, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Forward and backward to every tensor."""
        leaves = {name: x.detach().requires_grad_() for name, x in self.tensors.items()}
        o, _ = self.call(**leaves)
        return torch.autograd.grad(o, list(leaves.values()), upstream, allow_unused=True)

    def finished(self, o: Tensor) -> Tensor:
        return o if self.finish is None else self.finish(o)


@dataclass(frozen=True, slots=True)
class Window:
    """Where results are compared: the first tokens of the last sequence, in its last two heads. They depend on nothing outside."""

    tokens: int

    def cut(self, value: Tensor, axes: str) -> Tensor:
        if axes.startswith("t"):
            return value[-1:, : self.tokens, -2:]
        return value[-1:, -2:] if axes == "state" else value[-2:]


def time_op(folder: Path, name: str, shape: Shape, dtype: str, library: str | None, seconds: float = 2.0) -> Iterator[Timing | Failure]:
    """Ours, then the peer's. The reference gets as many tokens as it can do in `seconds`, WINDOW at most."""
    op = load(folder, name)
    inputs, upstream = shape.inputs(op.inputs, "cuda", dtype), shape.upstream("cuda", dtype)
    state = shape.state("cuda") if shape.decode else None
    window, truth = _truth(op, inputs, upstream, state, seconds)
    for who in ("recgen", library):
        gc.collect()
        torch.cuda.empty_cache()
        try:
            contender = ours(op, inputs, state) if who == "recgen" else peers(who, op, inputs, shape)
            if contender is None:
                continue
            with tuning():
                timing = _measure(contender, op, shape, dtype, upstream, window, truth)
            yield timing
        except Exception as failure:
            if not alive("cuda"):
                raise
            yield Failure(name, f"time {who} {shape.name} {dtype}", describe(failure))


def ours(op: Emitted, inputs: Mapping[str, Tensor], state: Tensor | None) -> Contender:
    call = op.ops["auto"] if state is None else partial(op.ops["recurrent"], initial_state=state, output_final_state=True)
    return Contender("recgen", call, inputs, {name: name for name in inputs})


def peers(library: str | None, op: Emitted, inputs: Mapping[str, Tensor], shape: Shape) -> Contender | None:
    peer = None if library is None or shape.decode else PEERS[library].get(op.name)
    if peer is None or library is None:
        return None
    return Contender(library, peer.load(), peer.tensors(inputs), peer.shared(), peer.finisher(inputs), peer.note)


def _truth(
    op: Emitted, inputs: Mapping[str, Tensor], upstream: Tensor, state: Tensor | None, seconds: float
) -> tuple[Window, dict[str, Tensor]]:
    def run(window: Window) -> dict[str, Tensor]:
        wide = {name: window.cut(x, op.axes[name]).double() for name, x in inputs.items()}
        initial = None if state is None else window.cut(state, "state").double()
        found = results(op.ops["reference"], wide, window.cut(upstream, "tv").double(), initial_state=initial)
        torch.cuda.synchronize()
        return found

    tokens = min(upstream.shape[1], WINDOW)
    if tokens > LEAST:
        run(Window(PROBE))
        start = time.perf_counter()
        run(Window(PROBE))
        affordable = int(seconds / (time.perf_counter() - start) * PROBE)
        tokens = min(tokens, max(LEAST, affordable))
    window = Window(tokens)
    return window, run(window)


def _measure(
    contender: Contender, op: Emitted, shape: Shape, dtype: str, upstream: Tensor, window: Window, truth: Mapping[str, Tensor]
) -> Timing:
    both = partial(contender.both, upstream)
    step: Callable[[], object] = contender.forward if shape.decode else both
    before, first = torch.cuda.memory_allocated(), _seconds(step)
    step()  # the first call may have tuned, with buffers of its own
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    forward_ms, note = _median_ms(contender.forward), contender.note
    if shape.decode:
        state = 4 * shape.B * shape.H * shape.K * shape.V
        note = f"{(2 * state + sum(x.nbytes for x in contender.tensors.values()) + upstream.nbytes) / forward_ms / 1e6:.0f} GB/s at decode"
    return Timing(
        op=op.name,
        who=contender.who,
        shape=shape.name,
        dtype=dtype,
        first_s=first,
        forward_ms=forward_ms,
        total_ms=None if shape.decode else _median_ms(both),
        peak_mib=peak / 2**20,
        host_us=_host_us(contender.forward),
        errors=_errors(contender, op, upstream, window, truth, backward=not shape.decode),
        note=note,
    )


def _errors(
    contender: Contender, op: Emitted, upstream: Tensor, window: Window, truth: Mapping[str, Tensor], *, backward: bool
) -> dict[str, float]:
    """The whole call, with an upstream gradient inside the window alone, so that sums over everything can be compared too."""
    if backward:
        masked = torch.zeros_like(upstream)
        window.cut(masked, "tv").copy_(window.cut(upstream, "tv"))
        found = results(contender.call, contender.tensors, masked)
    else:
        found = {"o": contender.forward()}
    finite = bool(found["o"].isfinite().all())
    errors = {"o": error(window.cut(contender.finished(found["o"]), "tv"), truth["o"]) if finite else float("inf")}
    if backward:
        for argument, name in contender.shared.items():
            errors[f"d{name}"] = error(window.cut(found[f"d{argument}"], op.axes[name]), truth[f"d{name}"])
    return errors


def _median_ms(step: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(step, warmup=25, rep=150, return_mode="median"))


def _host_us(step: Callable[[], object], calls: int = 32) -> float:
    """Host time to enqueue a call on an idle device."""
    taken: list[int] = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        step()
        taken.append(time.perf_counter_ns() - start)
    return statistics.median(taken) / 1e3


def _seconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def warm_ours(folder: Path, name: str, shapes: Sequence[Shape], dtype: str) -> Iterator[FirstCall]:
    """Compile what `time_op` will run of ours, at full size, since the pipeline may depend on it."""
    op = load(folder, name)
    for shape in shapes:
        inputs, state = shape.inputs(op.inputs, "cuda", dtype), shape.state("cuda") if shape.decode else None
        yield _first_call(ours(op, inputs, state), op, shape, dtype)


def warm_peer(folder: Path, name: str, shapes: Sequence[Shape], dtype: str, library: str, share: tuple[int, int]) -> Iterator[FirstCall]:
    """Compile a share of a peer's configurations, on two sequences at most: memory for many processes at once."""
    op = load(folder, name)
    for shape in (dataclasses.replace(shape, B=min(shape.B, 2)) for shape in shapes):
        contender = peers(library, op, shape.inputs(op.inputs, "cuda", dtype), shape)
        if contender is not None:
            with tuning(share=share):
                first = _first_call(contender, op, shape, dtype)
            yield first


def _first_call(contender: Contender, op: Emitted, shape: Shape, dtype: str) -> FirstCall:
    upstream = shape.upstream("cuda", dtype)
    step: Callable[[], object] = contender.forward if shape.decode else partial(contender.both, upstream)
    first = FirstCall(op.name, contender.who, shape.name, _seconds(step))
    contender.forward()  # without gradients an op may run other kernels
    return first


def time_on_cpu(folder: Path, name: str, shape: Shape = ON_CPU, repeats: int = 3) -> Iterator[TokenLoop]:
    """The best of a few runs of each."""
    op = load(folder, name)
    inputs = shape.inputs(op.inputs, "cpu", "fp32")
    best: dict[str, float] = {}
    for mode in ("auto", "reference"):
        for _ in range(repeats):
            start = time.perf_counter()
            with torch.no_grad():
                op.ops[mode](**inputs)
            best[mode] = min(best.get(mode, float("inf")), time.perf_counter() - start)
    yield TokenLoop(name, best["auto"], best["reference"])
