"""Every level of the compiler, on recurrences drawn from the grammar: the same numbers as the token loop, and the same gradients."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recgen import primitives
from recgen.chunk import chunk
from recgen.emit_chunk import KernelText, kernel_texts
from recgen.normalize import NormalForm, normalize
from recgen.parse import parse
from recgen.reference import reference_source
from recgen.sample import InputRow, draw, error, results
from recgen.schedule import schedule
from recgen.tile import TileGraph, tile
from tests.strategies import recurrences
from tests.torch_path import compiled

LIMIT = 1e-9  # of rms(x - ref) / rms(ref), all in fp64
FLOOR = 1e-6  # the least rms that counts, of the largest there is: what cancels to less has no more digits than that
KNOWN = frozenset({*vars(primitives), "range", "float"})  # in every kernel
SPECS = int(os.environ.get("RECGEN_SPECS", "200"))
COMPARED = settings(
    max_examples=SPECS,
    deadline=None,
    derandomize="RECGEN_SPECS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@COMPARED
@given(
    text=recurrences(),
    T=st.sampled_from([1, 17, 64, 70]),
    K=st.integers(4, 8),
    V=st.integers(3, 6),
    gate=st.sampled_from([None, "0", "-0.5", "-5", "mixed"]),
)
def test_every_level_is_the_token_loop(text: str, T: int, K: int, V: int, gate: str | None) -> None:
    spec = parse(text, "drawn.rec", "drawn")
    normal = normalize(spec)
    inputs = draw(_rows(normal), 1, T, 1, K, V, seed=T, dtype=torch.float64, gate=gate)
    random = torch.Generator().manual_seed(K)
    state, d_state = (torch.randn(1, 1, K, V, dtype=torch.float64, generator=random) for _ in range(2))
    upstream = torch.randn(1, T, 1, V, dtype=torch.float64, generator=random)
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(reference_source(spec), scope)
    wanted = results(scope["reference_drawn"], inputs, upstream, initial_state=state, state_grad=d_state)
    least = FLOOR * max(x.square().mean().sqrt().item() for x in wanted.values())

    env = {name: x[0, :, 0].numpy() if x.ndim > 2 else x[0].numpy() for name, x in inputs.items()}
    start = state[0, 0].T.numpy()
    _compare("the normal form", wanted, least, *normal.run(env, start))
    _compare("its updates", wanted, least, *normal.run_updates(env, start))
    event(f"obstacle: {normal.obstacle}")
    if normal.obstacle is not None:
        return
    form = chunk(normal)
    form.verify()
    _compare("the chunk form", wanted, least, *form.run(env, start))
    graph = tile(form)
    graph.verify()
    _compare_graph(graph, env, start, upstream, d_state, wanted, least)
    plan = schedule(graph)
    assert {b.name for b in plan.saved} <= {b.name for kernel in plan.backward for b in kernel.loads}
    for kernel in (*plan.forward, *plan.backward):
        for made in kernel_texts(kernel, plan, "drawn"):
            _check_names(made)
    found = results(compiled(graph, K, V), inputs, upstream, initial_state=state, state_grad=d_state)
    for name, x in found.items():
        assert error(x, wanted[name], least) < LIMIT, f"torch, {name}: {error(x, wanted[name], least):.1e}"


def _check_names(kernel: KernelText) -> None:
    """What a kernel uses is a parameter, a function, or a line before; and it uses every tensor that it is handed."""
    used, made = dict[str, int](), dict[str, int]()
    for node in ast.walk(ast.parse("\n".join(kernel.lines))):
        if isinstance(node, ast.Name):
            lines = made if isinstance(node.ctx, ast.Store) else used
            lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
    parameters = {p.split(":")[0] for p in kernel.parameters}
    for name, line in used.items():
        known = name in parameters or name in KNOWN or made.get(name, line + 1) <= line
        assert known, f"{kernel.name} uses {name} before it is made"
    assert {b.name for b in kernel.tensors} <= used.keys(), kernel.name


def _rows(normal: NormalForm) -> list[InputRow]:
    return [(i.name, "".join(i.axes), i.domain.kind, i.domain.low, i.domain.high) for i in normal.inputs if i.axes is not None]


def _compare(what: str, wanted: Mapping[str, Tensor], least: float, o: Any, state: Any) -> None:
    for name, x, ref in (("o", o, wanted["o"][0, :, 0]), ("state", state, wanted["state"][0, 0].T)):
        found = error(torch.from_numpy(np.array(x)), ref, least)
        assert found < LIMIT, f"{what}, {name}: {found:.1e}"


def _compare_graph(
    graph: TileGraph, env: Mapping[str, Any], start: Any, upstream: Tensor, d_state: Tensor, wanted: Mapping[str, Tensor], least: float
) -> None:
    run = graph.run({**env, **_constants(graph, start.shape)}, start, upstream[0, :, 0].numpy(), d_state[0, 0].T.numpy())
    _compare("the tile graph", wanted, least, run.output, run.state)
    for name, x in run.d_inputs.items():
        ref = wanted[f"d{name}"]
        found = error(torch.from_numpy(np.array(x)), ref[0, :, 0] if ref.ndim > 2 else ref[0], least)
        assert found < LIMIT, f"the tile graph, d{name}: {found:.1e}"
    found = error(torch.from_numpy(np.array(run.d_start)), wanted["dinitial_state"][0, 0].T, least)
    assert found < LIMIT, f"the tile graph, d_start: {found:.1e}"


def _constants(graph: TileGraph, shape: tuple[int, int]) -> dict[str, Any]:
    V, K = shape
    sizes = {"K": K, "V": V}
    inputs = graph.form.normal.inputs
    defaults = {i.name: i.default for i in inputs if i.default is not None}
    return sizes | {name: float(x.subs({s: sizes[s.name] for s in x.free_symbols})) for name, x in defaults.items()}
