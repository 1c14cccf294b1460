"""The bench on a CPU, over a small emitted package: rows, tables, files, and jobs that die."""

import inspect
import json
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from recgen.bench import Job, app, document, in_child, machine, side_by_side, write
from recgen.parity import GATED, Check, Failure, Shape, check_op, load
from recgen.peers import PEERS, missing
from recgen.sample import REGIMES, draw
from recgen.timing import FirstCall, Timing, TokenLoop, Window, time_on_cpu

PACKAGE = '''
"""S = exp(g) S + v k^T, o = S q."""
import torch

INPUTS = (
    ("q", "tk", "real", float("-inf"), float("inf")),
    ("k", "tk", "unit_norm", float("-inf"), float("inf")),
    ("v", "tv", "real", float("-inf"), float("inf")),
    ("g", "t", "log_decay", float("-inf"), 0.0),
)


def reference_toy(q, k, v, g, initial_state=None, output_final_state=False):
    S = q.new_zeros(*q.shape[::2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    o = []
    for t in range(q.shape[1]):
        S = g[:, t].exp()[..., None, None] * S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        o.append((q[:, t].unsqueeze(-1) * S).sum(-2))
    return torch.stack(o, 1), S if output_final_state else None


def recurrent_toy(q, k, v, g, initial_state=None, output_final_state=False):
    o, S = reference_toy(q.float(), k.float(), v.float(), g, initial_state, output_final_state)
    return o.to(v.dtype), S


def chunk_toy(q, k, v, g, initial_state=None, output_final_state=False):
    if q.shape[-1] == 24:
        raise RuntimeError("no kernel for K = 24")
    if q.shape[-1] == 16:
        q = 1.5 * q
    return recurrent_toy(q, k, v, g, initial_state, output_final_state)


toy = chunk_toy
'''
SMALL = (Shape("small", 1, 5, 2, 8, 12, bare=True), Shape("wrong", 1, 5, 2, 16, 12), Shape("refused", 1, 5, 2, 24, 12))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "emitted_for_bench"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "__init__.py").write_text(PACKAGE)
    return folder


@pytest.fixture(scope="module")
def checked(packages: Path) -> list[Check | Failure]:
    return list(check_op(packages, "toy", ("bf16", "fp32"), (*SMALL, GATED), device="cpu"))


def test_check_covers_modes_regimes_and_tensors(checked: list[Check | Failure]) -> None:
    rows = [row for row in checked if isinstance(row, Check)]
    assert {row.mode for row in rows} == {"chunk", "recurrent"}
    assert {row.gate for row in rows if row.shape == GATED.name} == set(REGIMES)
    assert {row.tensor for row in rows} == {"o", "state", "dq", "dk", "dv", "dg", "dinitial_state", "bitwise"}
    assert {row.tensor for row in rows if not row.carried} == {"o", "dq", "dk", "dv", "dg", "bitwise"}


def test_check_tells_right_from_wrong_and_goes_on_after_a_failure(checked: list[Check | Failure]) -> None:
    wrong = {(row.mode, row.shape, row.tensor) for row in checked if isinstance(row, Check) and not row.right}
    assert wrong == {("chunk", "wrong", tensor) for tensor in ("o", "dq", "dk", "dv", "dg", "dinitial_state")}
    failures = [row for row in checked if isinstance(row, Failure)]
    assert [row.what for row in failures] == ["chunk bf16 refused drawn", "chunk fp32 refused drawn"]
    assert "no kernel for K = 24" in failures[0].message


def test_tables(checked: list[Check | Failure], tmp_path: Path) -> None:
    timings = [
        Timing("toy", "recgen", "train", "bf16", 1.5, 0.2, 0.8, 700.0, 40.0, {"o": 3e-3, "dg": 1e-3, "dq": 4e-3}),
        Timing("toy", "fla", "train", "bf16", 20.0, 0.4, 2.4, 1400.0, 90.0, {"o": 3e-3}, "half the work"),
    ]
    rows = [*checked, *timings, FirstCall("toy", "fla", "train", 30.0), FirstCall("toy", "fla", "train", 50.0), TokenLoop("toy", 0.1, 2.0)]
    text = document(rows)
    assert "WRONG toy chunk o: 2 times, 5.0e-01 (" in text
    assert "| toy | train | recgen | 0.200 | 0.800 | 700 | 40 | 1.5 | 3.0e-03 | 4.0e-03 (dq) |" in text
    assert "| toy | train | fla | 0.400 (2.00x) | 2.400 (3.00x) | 1400 | 90 | 20.0 | 3.0e-03 |  |" in text
    assert "fla at train, geometric mean of 1: 2.00x forward, 3.00x forward + backward." in text
    assert "toy, fla: half the work." in text and "| toy | fla | train | 50.0 |" in text and "20.0 times as fast" in text
    assert "FAILED toy, chunk bf16 refused drawn (2 such): RuntimeError at " in text
    write(rows, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert stored["machine"] == machine() and stored["Timing"][0]["errors"]["dq"] == 4e-3
    assert (tmp_path / "out" / "benchmarks.md").read_text() == text


def test_the_torch_path_beside_the_token_loop(packages: Path) -> None:
    (row,) = time_on_cpu(packages, "toy", Shape("cpu", 1, 64, 2, 16, 16), repeats=1)
    assert row.op == "toy" and row.chunked_s > 0 and row.loop_s > 0


def dying(how: str) -> Iterator[FirstCall | Failure]:
    yield FirstCall("toy", "recgen", how, 1.0)
    match how:
        case "dies":
            os._exit(7)
        case "hangs":
            time.sleep(600)
        case "raises":
            raise RuntimeError("out of luck")


def test_a_job_that_dies_does_not_stop_the_others() -> None:
    jobs = [Job("toy", how, partial(dying, how)) for how in ("runs", "dies", "raises", "runs")]
    rows = list(in_child(jobs, patience=60))
    assert [row.shape for row in rows if isinstance(row, FirstCall)] == ["runs", "dies", "raises", "runs"]
    assert [(row.what, row.message[:12]) for row in rows if isinstance(row, Failure)] == [
        ("dies", "the process "),
        ("raises", "RuntimeError"),
    ]
    assert "exit code 7" in next(row.message for row in rows if isinstance(row, Failure))
    assert len(list(side_by_side(jobs[::3], 2, patience=60))) == 2


def test_what_is_late_is_reported() -> None:
    jobs = [Job("toy", how, partial(dying, how)) for how in ("hangs", "runs")]
    rows = list(in_child(jobs, patience=10))
    assert [row.what for row in rows if isinstance(row, Failure)] == ["hangs"] and rows[-1] == FirstCall("toy", "recgen", "runs", 1.0)
    assert [row.message for row in in_child(jobs, patience=10, deadline=0.0) if isinstance(row, Failure)] == ["no time was left"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shapes of a GPU take minutes")
def test_the_command(packages: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["toy", "--time", "--packages", str(packages), "--out", str(tmp_path)])
    assert run.exit_code == 0, run.output
    assert "times as fast" in run.output
    assert json.loads((tmp_path / "bench.json").read_text())["TokenLoop"][0]["op"] == "toy"


@pytest.mark.parametrize(
    ("arguments", "said"), [(["nothing"], "unknown 'nothing', expected one of toy"), (["--shape", "x"], "unknown 'x'")]
)
def test_the_command_refuses_what_it_does_not_know(packages: Path, arguments: list[str], said: str) -> None:
    run = CliRunner().invoke(app, [*arguments, "--packages", str(packages)], env={"COLUMNS": "200", "TERM": "dumb"})
    assert run.exit_code == 2
    assert said in " ".join(run.output.replace("│", " ").split())


def test_a_window_cuts_every_kind_of_tensor(packages: Path) -> None:
    window = Window(3)
    values = draw((("x", "tv", "real", -math.inf, math.inf), ("D", "", "real", -math.inf, math.inf)), 2, 5, 4, 8, 12, seed=0)
    assert torch.equal(window.cut(values["x"], "tv"), values["x"][1:, :3, 2:])
    assert torch.equal(window.cut(values["D"], ""), values["D"][2:])
    assert window.cut(torch.zeros(2, 4, 8, 12), "state").shape == (1, 2, 8, 12)
    assert list(load(packages, "toy").ops) == ["auto", "chunk", "recurrent", "reference"]


@pytest.mark.parametrize(("library", "name"), [(library, name) for library, peers in PEERS.items() for name in peers])
def test_a_peer_takes_the_arguments_it_is_given(library: str, name: str) -> None:
    if lacking := missing(library):
        pytest.skip(lacking)
    peer = PEERS[library][name]
    inspect.signature(peer.load()).bind(**dict.fromkeys(peer.arguments))
