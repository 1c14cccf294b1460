"""bench: what emitted ops do on this machine: how right they are, how fast they are, and what stands beside them.

    recgen bench [NAME...] --check     every output and gradient against the token loop in fp64      recgen.parity
    recgen bench [NAME...] --time      forward and backward, memory, host, ours and a peer's         recgen.timing
    ... --warm                         before that, compile the kernels of both side by side

`python -m recgen.bench` is the same command. Each op runs in a child process: one that does not compile, hangs, or takes the
device down is a line of the report, and the others go on. Without a GPU, `--time` times the chunked torch path against the
token loop.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import geometric_mean
from time import monotonic as clock
from typing import Annotated

import torch
import typer

from recgen.parity import CHECKED, DTYPES, Check, Failure, Shape, alive, check_op, describe
from recgen.peers import PEERS, missing
from recgen.timing import TIMED, FirstCall, Timing, TokenLoop, time_on_cpu, time_op, warm_ours, warm_peer

Row = Check | Timing | FirstCall | TokenLoop | Failure
NO_TIME = "no time was left"


@dataclass(frozen=True, slots=True)
class Job:
    """Work on one op, for a child process: `run` is a partial of a module's function."""

    op: str
    what: str
    run: Callable[[], Iterable[Row]]


def bench(
    names: Sequence[str] = (),
    *,
    check: bool = False,
    time: bool = True,
    warm: bool = False,
    shapes: Sequence[str] = ("train", "narrow"),
    dtypes: Sequence[str] = tuple(DTYPES),
    peer: str | None = None,
    packages: Path = Path("generated"),
    out: Path | None = None,
    workers: int = 14,
    patience: float = 420.0,
    limit: float = inf,
) -> list[Row]:
    """Run the jobs that are asked for and return all rows.

    `names` are packages in the folder `packages`, by default all of them. `dtypes` is what is checked; the first of them is
    what is timed. `patience` is how many seconds a child may take between two rows, `limit` how many everything may. With
    `out`, out/bench.json holds what is known at any moment, and out/benchmarks.md the tables.
    """
    names = tuple(names) or packaged(packages)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timed, dtype = [TIMED[shape] for shape in shapes], dtypes[0]
    rows: list[Row] = []
    deadline = clock() + limit

    def collect(found: Iterable[Row]) -> None:
        written = clock()
        for _, group in groupby(found, key=_told_together):
            told = list(group)
            rows.extend(told)
            if out is not None and clock() - written > 5:
                write(rows, out)
                written = clock()
            print(summary(max(told, key=_wrong)), flush=True)

    if check:
        jobs = [
            Job(name, f"check {dtype}, {shapes[0].name}", partial(check_op, packages, name, (dtype,), shapes, device))
            for dtype in sorted(dtypes, key="fp32".__ne__)  # whose kernels take longest to compile
            for shapes in CHECKED
            for name in names
        ]
        collect(side_by_side(jobs, workers if device == "cuda" else 1, patience, deadline))
    if time and device == "cpu":
        collect(in_child([Job(name, "time", partial(time_on_cpu, packages, name)) for name in names], patience, deadline))
    if warm and device == "cuda":
        jobs = [Job(name, "warm", partial(warm_ours, packages, name, timed, dtype)) for name in names]
        if peer is not None:
            jobs += [job for name in names if name in PEERS[peer] for job in _warm_peer(packages, name, timed, dtype, peer)]
        collect(side_by_side(jobs, workers, patience, deadline))
    if time and device == "cuda":
        jobs = [Job(name, f"time {s.name}", partial(time_op, packages, name, s, dtype, peer)) for name in names for s in timed]
        collect(in_child(jobs, patience, deadline))
    if out is not None:
        write(rows, out)
    return rows


def _warm_peer(packages: Path, name: str, shapes: Sequence[Shape], dtype: str, peer: str) -> Iterator[Job]:
    shares = PEERS[peer][name].shares
    for index in range(shares):
        run = partial(warm_peer, packages, name, shapes, dtype, peer, (index, shares))
        yield Job(name, f"warm {peer} {index + 1}/{shares}", run)


def _told_together(row: Row) -> object:
    """There are thousands of checks: one line for what was compared at a shape, the worst of it."""
    return (row.op, row.dtype, row.shape) if isinstance(row, Check) else id(row)


def _wrong(row: Row) -> float:
    return row.error / row.limit if isinstance(row, Check) and row.limit else 0.0


def packaged(folder: Path) -> tuple[str, ...]:
    """The names of the emitted packages in a folder."""
    return tuple(sorted(path.parent.name for path in folder.glob("*/__init__.py")))


# Jobs in child processes


def side_by_side(jobs: Sequence[Job], workers: int, patience: float, deadline: float = inf) -> Iterator[Row]:
    """One child a job, `workers` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        for rows in pool.map(lambda job: list(in_child([job], patience, deadline)), jobs):
            yield from rows


def in_child(jobs: Sequence[Job], patience: float, deadline: float = inf) -> Iterator[Row]:
    """The jobs one after the other in one child; a new one takes the rest when a job takes the child down, or the device.

    A job ends as a Failure when no row comes for `patience` seconds, and all that are left do at `deadline`.
    """
    context = multiprocessing.get_context("spawn")
    remaining = list(jobs)
    while remaining and clock() < deadline:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_serve, args=(sender, remaining), daemon=True)
        child.start()
        sender.close()
        done, end = 0, ""
        try:
            while done < len(remaining) and not end:
                wait = max(0.0, min(patience, deadline - clock()))
                if not receiver.poll(wait):
                    child.kill()
                    end = NO_TIME if clock() >= deadline else f"no row for {wait:.0f} s"
                elif (row := receiver.recv()) is None:
                    done += 1
                else:
                    yield row
        except EOFError:
            child.join()
            if child.exitcode or not done:
                end = f"the process ended with exit code {child.exitcode}"
        child.join()
        if end:
            yield Failure(remaining[done].op, remaining[done].what, end)
            done += 1
        remaining = remaining[done:]
    for job in remaining:
        yield Failure(job.op, job.what, NO_TIME)


def _serve(sender: Connection, jobs: Sequence[Job]) -> None:
    """In the child: send each row, and None after each job. Return early when the device is lost."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for job in jobs:
        try:
            for row in job.run():
                sender.send(row)
        except Exception as failure:
            sender.send(Failure(job.op, job.what, describe(failure)))
        sender.send(None)
        if not alive(device):
            return


# What is written and printed


def write(rows: Sequence[Row], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        kinds.setdefault(type(row).__name__, []).append(dataclasses.asdict(row))
    (out / "bench.json").write_text(json.dumps({"machine": machine(), **kinds}, indent=1) + "\n", encoding="utf-8")
    (out / "benchmarks.md").write_text(document(rows), encoding="utf-8")


def document(rows: Sequence[Row], failures: int | None = None) -> str:
    """The tables, as Markdown, and what failed: all of it, or so many lines."""
    parts = ["Measured on " + ", ".join(f"{key} {value}" for key, value in machine().items()) + "."]
    if checks := [row for row in rows if isinstance(row, Check)]:
        parts += [check_table(checks), *over_limits(checks)[:failures]]
    if firsts := [row for row in rows if isinstance(row, FirstCall)]:
        parts.append(first_call_table(firsts))
    if timings := [row for row in rows if isinstance(row, Timing)]:
        parts += [timing_table(timings), *mean_ratios(timings)]
        parts += dict.fromkeys(f"{row.op}, {row.who}: {row.note}." for row in timings if row.note)
    parts += [summary(row) for row in rows if isinstance(row, TokenLoop)]
    lost = Counter((row.op, row.message) for row in rows if isinstance(row, Failure))
    first = {(row.op, row.message): row.what for row in reversed(rows) if isinstance(row, Failure)}
    told = [f"FAILED {op}, {first[op, said]} ({count} such): {' '.join(said.split())}" for (op, said), count in lost.items()]
    parts += told if failures is None else [line[:400] for line in told[:failures]]
    return "\n\n".join(parts) + "\n"


def check_table(checks: Sequence[Check]) -> str:
    """A line for each op and dtype: its worst output, its worst gradient, and where they were seen."""
    lines = []
    for op, dtype in dict.fromkeys((row.op, row.dtype) for row in checks):
        chosen = [row for row in checks if (row.op, row.dtype) == (op, dtype)]
        numbers = [row for row in chosen if row.tensor != "bitwise"]
        outputs = [row for row in numbers if row.tensor in ("o", "state")]
        gradients = [row for row in numbers if row.tensor not in ("o", "state")]
        wrong = sum(not row.right for row in numbers)
        unsteady = sum(not row.right for row in chosen) - wrong
        lines.append((op, dtype, str(len(numbers)), _worst(outputs), _worst(gradients), f"{wrong}", f"{unsteady}"))
    return _table(("op", "dtype", "tensors", "worst output", "worst gradient", "over limit", "not repeatable"), lines)


def over_limits(checks: Sequence[Check]) -> list[str]:
    """One line for each kind of wrong tensor, the worst first."""
    wrong: dict[tuple[str, str, str], list[Check]] = {}
    for row in checks:
        if not row.right:
            wrong.setdefault((row.op, row.mode, row.tensor), []).append(row)
    ordered = sorted(wrong.values(), key=lambda rows: -max(row.error for row in rows))
    return [f"WRONG {rows[0].op} {rows[0].mode} {rows[0].tensor}: {len(rows)} times, {_worst(rows, dtype=True)}" for rows in ordered]


def first_call_table(firsts: Sequence[FirstCall]) -> str:
    """The slowest of the processes that shared a peer's configurations counts."""
    slowest: dict[tuple[str, str, str], float] = {}
    for row in firsts:
        key = (row.op, row.who, row.shape)
        slowest[key] = max(row.seconds, slowest.get(key, 0.0))
    return _table(("op", "who", "shape", "first call, s"), [(*key, f"{seconds:.1f}") for key, seconds in slowest.items()])


def timing_table(timings: Sequence[Timing]) -> str:
    """Times in ms; beside a peer's, how many times as long as ours it took."""
    header = ("op", "shape", "who", "forward", "fwd + bwd", "peak MiB", "host us", "first s", "error o", "worst gradient")
    mine = {(row.op, row.shape): row for row in timings if row.who == "recgen"}
    lines = []
    for row in timings:
        base = mine.get((row.op, row.shape)) if row.who != "recgen" else None
        forward = _ratio(row.forward_ms, base.forward_ms if base else None)
        total = _ratio(row.total_ms, base.total_ms if base else None)
        numbers = (f"{row.peak_mib:.0f}", f"{row.host_us:.0f}", f"{row.first_s:.1f}", f"{row.errors['o']:.1e}")
        lines.append((row.op, row.shape, row.who, forward, total, *numbers, _worst_gradient(row)))
    return _table(header, lines)


def mean_ratios(timings: Sequence[Timing]) -> Iterator[str]:
    """A line for each peer and shape: how many times as long as ours it takes, in the geometric mean over ops."""
    mine = {(row.op, row.shape): row for row in timings if row.who == "recgen"}
    pairs = [(row, mine[row.op, row.shape]) for row in timings if row.who != "recgen" and (row.op, row.shape) in mine]
    for who, shape in dict.fromkeys((row.who, row.shape) for row, _ in pairs):
        chosen = [(row, base) for row, base in pairs if (row.who, row.shape) == (who, shape)]
        forward = geometric_mean(row.forward_ms / base.forward_ms for row, base in chosen)
        total = geometric_mean((row.total_ms or inf) / (base.total_ms or inf) for row, base in chosen)
        yield f"{who} at {shape}, geometric mean of {len(chosen)}: {forward:.2f}x forward, {total:.2f}x forward + backward."


def summary(row: Row) -> str:
    """A row on one line, for whoever waits."""
    match row:
        case Check():
            where = f"{row.mode} {row.tensor}, gate {row.gate}, limit {row.limit:.0e}"
            return f"{row.op} {row.dtype} {row.shape}: errors up to {row.error:.1e} ({where})"
        case Timing():
            total = "" if row.total_ms is None else f", forward + backward {row.total_ms:.3f} ms"
            return f"{row.op} {row.shape} {row.who}: forward {row.forward_ms:.3f} ms{total}, error {row.errors['o']:.1e}"
        case FirstCall():
            return f"{row.op} {row.shape} {row.who}: first call {row.seconds:.1f} s"
        case TokenLoop():
            times = f"{row.chunked_s * 1e3:.0f} ms in chunks, {row.loop_s * 1e3:.0f} ms token by token"
            return f"{row.op} (T = 4096, K = V = 64, CPU): {times}, {row.loop_s / row.chunked_s:.1f} times as fast"
        case Failure():
            return f"FAILED {row.op}, {row.what}: {row.message.splitlines()[0][:300]}"


def machine() -> Mapping[str, str]:
    versions = {}
    for package in ("torch", "triton", "fla-core", "flash-qla"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", **versions}


def _worst(rows: Sequence[Check], *, dtype: bool = False) -> str:
    if not rows:
        return ""
    row = max(rows, key=lambda row: row.error)
    carried = "" if row.carried else ", no state"
    return f"{row.error:.1e} ({row.dtype + ', ' if dtype else ''}{row.mode} {row.tensor}, {row.shape}, gate {row.gate}{carried})"


def _worst_gradient(row: Timing) -> str:
    gradients = [(value, name) for name, value in row.errors.items() if name != "o"]
    return "{:.1e} ({})".format(*max(gradients)) if gradients else ""


def _ratio(value: float | None, base: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if base is None else f"{value:.3f} ({value / base:.2f}x)"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# The command line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Emitted packages. None: all of them.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare every output and gradient with the token loop in fp64.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Measure. The default when --check is not given.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Compile everything side by side before measuring.")] = False,
    shape: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TIMED)}; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(DTYPES)}; the first is the one timed.")] = None,
    peer: Annotated[str | None, typer.Option(help=f"Another library to time: {', '.join(PEERS)}.")] = None,
    packages: Annotated[Path, typer.Option(metavar="DIR", help="Where the emitted packages are.")] = Path("generated"),
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write bench.json and benchmarks.md here.")] = None,
    workers: Annotated[int, typer.Option(help="Processes side by side, for --check and --warm.")] = max(1, (os.cpu_count() or 1) - 2),
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="Start nothing after this, and report what is known.")] = inf,
) -> None:
    """Measure emitted ops on this machine: parity, time, and peers that are installed. Exit code 1: something failed or was wrong."""
    _known("NAME", names, packaged(packages))
    _known("--shape", shape, TIMED)
    _known("--dtype", dtype, DTYPES)
    _known("--peer", [peer] if peer else None, PEERS)
    if peer is not None and (lacking := missing(peer)):
        raise typer.BadParameter(f"{lacking} is not installed", param_hint="--peer")
    rows = bench(
        names or (),
        check=check,
        time=time or not (check or warm),
        warm=warm,
        shapes=shape or ("train", "narrow"),
        dtypes=dtype or tuple(DTYPES),
        peer=peer,
        packages=packages,
        out=out,
        workers=workers,
        limit=limit,
    )
    print(document(rows, failures=12))
    if any(isinstance(row, Failure) or (isinstance(row, Check) and not row.right) for row in rows):
        raise typer.Exit(1)


def _known(option: str, given: Sequence[str] | None, known: Iterable[str]) -> None:
    for name in given or ():
        if name not in known:
            raise typer.BadParameter(f"unknown {name!r}, expected one of {', '.join(known)}", param_hint=option)


if __name__ == "__main__":
    app()
