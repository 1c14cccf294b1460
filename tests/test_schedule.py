"""schedule: kernels that can compute what they store from what they load; and what `explain` prints of every stage."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from recgen.chunk import chunk
from recgen.cost import SPECIAL, Sizes, flops
from recgen.errors import VerifyError
from recgen.hardware import H200
from recgen.ops import Load, Map, topological
from recgen.pipeline import compile_spec
from recgen.resources import Source
from recgen.schedule import Kernel, Schedule, schedule
from recgen.tile import tile
from tests.conftest import ROOT, ZOO, RunPython
from tests.stages import chunk_form, form_of, normal, plan, tile_graph

GOLDEN = ROOT / "tests" / "golden"
DUMPED = ("gated_deltanet", "kda", "rwkv6")
STAGES: dict[str, Callable[[str], object]] = {"normal": normal, "chunk": chunk_form, "tile": tile_graph, "schedule": plan}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", DUMPED)
def test_golden(name: str, stage: str) -> None:
    """RECGEN_GOLDEN=write rewrites the dumps; read the difference before it is committed."""
    path, text = GOLDEN / f"{name}.{stage}.txt", f"{STAGES[stage](name)}\n"
    if os.environ.get("RECGEN_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs: RECGEN_GOLDEN=write rewrites it"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ZOO)
def test_every_stage_is_plain_text(name: str, stage: str) -> None:
    text = str(STAGES[stage](name))
    assert text.isascii()
    assert all(line == line.rstrip() and len(line) <= 200 for line in text.split("\n"))
    assert "  x0 " not in text and "None" not in text


def test_the_same_text_under_another_hash_seed(run_python: RunPython) -> None:
    code = "from tests.stages import plan, tile_graph; print(tile_graph('rwkv7'), plan('rwkv7'))"
    first, second = (run_python("-c", code, PYTHONHASHSEED=seed).stdout for seed in ("1", "2"))
    assert first == second == f"{tile_graph('rwkv7')} {plan('rwkv7')}\n"


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_scheduled(name: str) -> None:
    found = plan(name)
    found.verify()
    assert {b.name for k in found.forward for b in k.stores} >= {"o"}
    stored = {b.name for k in found.backward for b in k.stores}
    assert stored >= {f"d{i.name}" for i in found.tile.form.normal.inputs if i.axes is not None}


@pytest.mark.parametrize("name", ZOO)
def test_a_kernel_of_parallel_chunks_carries_nothing(name: str) -> None:
    for kernel in (*plan(name).forward, *plan(name).backward):
        assert (kernel.carry is None) == (kernel.walk == "parallel")
        if kernel.walk == "parallel":
            have = {b.node.index for b in kernel.loads}
            inside = topological((b.node for b in kernel.stores), stop=lambda n, have=have: n.index in have)  # type: ignore[misc]
            assert not [n for n in inside if isinstance(n.op, Load) and n.op.role == "state" and n.index not in have]


@pytest.mark.parametrize("name", ZOO)
def test_a_buffer_has_one_meaning(name: str) -> None:
    """What is called alike in two kernels is the same value."""
    meanings: dict[str, int] = {}
    for kernel in (*plan(name).forward, *plan(name).backward):
        for buffer in (*kernel.loads, *kernel.stores):
            assert meanings.setdefault(buffer.name, buffer.node.index) == buffer.node.index


@pytest.mark.parametrize("name", ZOO)
def test_what_is_saved_is_written_by_the_forward(name: str) -> None:
    written = {b.name for k in plan(name).forward for b in k.stores}
    assert {b.name for b in plan(name).saved} <= written


def broken(kernels: tuple[Kernel, ...], name: str, change: Callable[[Kernel], Kernel]) -> tuple[Kernel, ...]:
    assert any(k.name == name for k in kernels)
    return tuple(change(k) if k.name == name else k for k in kernels)


def test_verify_catches_a_load_that_is_missing() -> None:
    found = plan("kda")
    without = broken(found.forward, "scan", lambda k: replace(k, loads=tuple(b for b in k.loads if b.name != "v")))
    with pytest.raises(VerifyError, match="scan needs v, which it does not load"):
        replace(found, forward=without).verify()


def test_verify_catches_a_value_that_nobody_wrote() -> None:
    found = plan("kda")
    without = broken(found.forward, "prepare", lambda k: replace(k, stores=tuple(b for b in k.stores if b.name != "inverse")))
    with pytest.raises(VerifyError, match="scan loads inverse before a kernel wrote it"):
        replace(found, forward=without).verify()


def test_verify_catches_kernels_in_the_wrong_order() -> None:
    found = plan("kda")
    with pytest.raises(VerifyError, match="before a kernel wrote it"):
        replace(found, forward=found.forward[::-1]).verify()
    with pytest.raises(VerifyError, match="before a kernel wrote it"):
        replace(found, backward=found.backward[::-1]).verify()


def test_verify_catches_a_scan_without_its_state() -> None:
    found = plan("gated_deltanet")
    without = broken(found.forward, "scan", lambda k: replace(k, carry=None))
    with pytest.raises(VerifyError, match="scan needs state"):
        replace(found, forward=without).verify()


def test_a_schedule_fits_its_card() -> None:
    """Where operations are for nothing, fewer values pass through memory."""

    def moved(found: Schedule) -> int:
        return sum(found.sizes.bytes(b.node) for k in (*found.forward, *found.backward) for b in (*k.loads, *k.stores))

    quick = replace(H200, matmul=1e30, lanes=1e30, special=1e30, barrier=0.0)
    slow_memory = schedule(tile_graph("rwkv7"), quick)
    assert moved(slow_memory) < moved(schedule(tile_graph("rwkv7"), replace(H200, bandwidth=1e30)))


def test_flops_of_a_chunk() -> None:
    """The least of them: scores, outputs and states of linear attention, 64 tokens."""
    graph, sizes = tile_graph("linear_attention"), Sizes(t=64)
    total = sum(flops(n, sizes) for n in topological([graph.output, graph.state]))
    assert total == 2 * (64 * 64 * 128 * 2 + 64 * 128 * 128 * 2)


def test_the_text_sums_up() -> None:
    """The floors of the kernels are those of the sums, and a floor is the larger of its two times."""
    lines = str(plan("gla")).splitlines()
    floors = [int(line.split()[1]) for line in lines if line.startswith("  floor ") and " us, " in line]
    both = next(line for line in lines if line.startswith("  forward + backward"))
    assert abs(sum(floors) - int(both.split()[-2])) <= len(floors)
    assert len(floors) == len(plan("gla").forward) + len(plan("gla").backward)
    for line in lines:
        if line.startswith("  floor ") and " us, " in line:
            words = line.replace(",", "").split()
            memory, matmul = (int(words[n - 1]) for n, word in enumerate(words) if word == "us" and words[n - 2] == "in")
            assert int(words[1]) == max(memory, matmul)


DECAYS = {"none": "", "scalar": "S = exp(g) * S", "channel": "S = S @ diag(exp(g))"}
SKIPS = {"": "", "head": "D * v", "head[value]": "D * v", "scalar": "D * v", "value": "D * v", "gated": "sigmoid(D) * v"}


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_goes_with_every_skip(decay: str, skip: str, delta: bool) -> None:
    """A gradient that hangs on value rows alone, the skip's, is made once, by whichever kernel has them."""
    declared = {"q": "key", "k": "key[unit_norm]", "v": "value", "y": "value"}
    declared |= {"g": f"{'key' if decay == 'channel' else 'scalar'}[log_decay]"} if DECAYS[decay] else {}
    declared |= {"D": "scalar" if skip == "gated" else skip} if skip else {}
    write = "S = S + (v - S @ k) @ k.T / 2" if delta else "S = S + v @ k.T"
    output = f"o = silu(y) * ({' + '.join(filter(None, ('S @ q', SKIPS[skip])))})"
    text = "\n".join([*(f"{name}: {kind}" for name, kind in declared.items()), "", *filter(None, (DECAYS[decay], write, output)), ""])
    found = schedule(tile(chunk(form_of(text))))
    stores = [b.name for kernel in found.backward for b in kernel.stores if b.name.removeprefix("d") in declared]
    assert sorted(stores) == sorted(f"d{name}" for name in declared)


NAMED = (
    """v: value
f: key
k0: key
q0: key
cq0: scalar[unit]
og: value

S = S + silu(v) @ k0.T
S = S @ diag(sigmoid(f))
p0 = S @ (cq0 * q0)
o = sigmoid(og) * p0
""",
    """v: value
m0: key
m1: key[unit_norm]
b0: scalar[unit]
b1: scalar[unit]
k0: key
k1: key
q0: key
og: value

S = S + v @ k0.T
S = S - b0 / 2 * (S @ l2norm(m0)) @ l2norm(m0).T
S = S + v @ k1.T
p0 = S @ q0
S = S @ householder(m1, b1)
o = sigmoid(og) * p0
""",
    """q: key
k: key[unit_norm]
v: value
g: scalar[log_decay]
beta: scalar[unit]
decay_all: const = 1.5
beta_chunks: const = 2.0

S = exp(g) * S
S = S + beta * (decay_all * v - S @ k) @ k.T
o = beta_chunks * (S @ q)
""",
)


@pytest.mark.parametrize("text", NAMED, ids=["a value called N", "a scale along s", "constants"])
def test_what_is_stored_has_a_place_and_a_name_of_its_own(text: str) -> None:
    files = compile_spec(Source("mine", "mine.rec", text)).files
    compile(files["kernels.py"], "kernels.py", "exec")


@pytest.mark.parametrize("name", ZOO)
def test_a_scan_takes_its_vectors_ready_made(name: str) -> None:
    """Numbers of tokens lie chunk by chunk, so that one copy fetches a chunk's, and functions of them are not worked out by every warp."""
    for kernel in (k for k in (*plan(name).forward, *plan(name).backward) if k.walk != "parallel"):
        vectors = [b for b in kernel.loads if b.node.axes == ("t",)]
        assert all(b.layout == "chunk" for b in vectors), [b.name for b in vectors]
        assert not [n for n in kernel.computed() if n.axes == ("t",) and isinstance(n.op, Map) and n.op.fn in SPECIAL]


def test_without_a_kernel_before_the_scan_numbers_are_read_where_they_are() -> None:
    """A kernel that only copied them would cost a launch."""
    made = schedule(tile(chunk(form_of("q: key\nk: key\nv: value\nbeta: scalar\n\nS = S + beta * v @ k.T\no = S @ q\n"))))
    assert [k.name for k in made.forward] == ["scan"]
    assert [b.layout for b in made.forward[0].loads if b.node.axes == ("t",)] == ["token"]
