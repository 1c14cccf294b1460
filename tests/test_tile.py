"""tile: the graph of a chunk means what the recurrence means, and so does every gradient that is derived from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recgen.chunk import chunk
from recgen.errors import VerifyError
from recgen.ops import Decay, Load, Map, Node, Rows, Segment, Sum, Valid, topological
from recgen.parse import parse
from recgen.sample import results
from recgen.spec import Spec
from recgen.tile import TileGraph, _Builder, tile
from tests.conftest import ZOO
from tests.stages import Array, K, V, error, form_of, head, normal, reference, regimes, spec, tensors, tile_graph
from tests.test_chunk import SPECIAL, special

CASES = [(name, gate) for name in ZOO for gate in regimes(normal(name))]
TOLERANCE = 1e-11  # of fp64 against fp64


def cotangents(T: int) -> tuple[Array, Array, Array]:
    """S0 [V,K], do [T,V], dS [V,K]."""
    random = np.random.default_rng(T)
    return random.normal(size=(V, K)), random.normal(size=(T, V)), random.normal(size=(V, K))


def exact(of: Spec, drawn: dict[str, torch.Tensor], S0: Array, do: Array, dS: Array) -> dict[str, Array]:
    """o, state and every gradient of the token loop, by torch in fp64, in the layout of the NumPy meanings."""
    found = results(
        reference(of),
        drawn,
        torch.from_numpy(do)[None, :, None],
        initial_state=torch.from_numpy(S0).T[None, None].contiguous(),
        state_grad=torch.from_numpy(dS).T[None, None].contiguous(),
    )
    arrays: dict[str, Array] = {}
    axes = {f"d{i.name}": i.axes for i in of.inputs}
    for name, x in found.items():
        if name in ("state", "dinitial_state"):
            arrays[name] = x[0, 0].T.numpy()
        elif name == "o" or "t" in (axes[name] or ()):
            arrays[name] = x[0, :, 0].numpy()
        else:
            arrays[name] = x[0].numpy()
    return arrays


def compared(graph: TileGraph, env: dict[str, Any], wanted: dict[str, Array], S0: Array, do: Array, dS: Array) -> dict[str, float]:
    """The error of every output and gradient."""
    run = graph.run(env, S0, do, dS)
    assert run.d_start is not None
    found = {"o": run.output, "state": run.state, "dinitial_state": run.d_start} | {f"d{n}": x for n, x in run.d_inputs.items()}
    assert found.keys() == wanted.keys()
    return {name: error(found[name], x) for name, x in wanted.items()}


@pytest.mark.parametrize(("name", "gate"), CASES)
def test_forward_and_every_gradient(name: str, gate: str | None) -> None:
    """Two chunks and a ragged third."""
    T = 150
    drawn = tensors(normal(name), T, seed=3, gate=gate)
    S0, do, dS = cotangents(T)
    errors = compared(tile_graph(name), head(normal(name), drawn), exact(spec(name), drawn, S0, do, dS), S0, do, dS)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 128])
@pytest.mark.parametrize("name", ZOO)
def test_every_length(name: str, T: int) -> None:
    drawn = tensors(normal(name), T, seed=T, gate="mixed" if len(regimes(normal(name))) > 1 else None)
    S0, do, dS = cotangents(T)
    errors = compared(tile_graph(name), head(normal(name), drawn), exact(spec(name), drawn, S0, do, dS), S0, do, dS)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", SPECIAL)
def test_what_the_zoo_lacks(name: str) -> None:
    form, T = special(name).normal, 100
    of = parse(form.source, f"{name}.rec", name)
    drawn = {n: x * (0.3 if n in ("k", "m") else 1.0) for n, x in tensors(form, T, gate="-0.5").items()}
    S0, do, dS = cotangents(T)
    errors = compared(tile(chunk(form)), head(form, drawn), exact(of, drawn, S0, do, dS), S0, do, dS)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", ["retention", "gated_deltanet", "kda", "gla", "rwkv6", "rwkv7", "dplr"])
def test_a_hard_reset(name: str) -> None:
    """g = -inf at some tokens: the past is gone, everything is finite and right, and so is every gradient."""
    form, T = normal(name), 100
    drawn = tensors(form, T, seed=1, gate="-0.5")
    gate = next(i for i in form.inputs if i.domain.kind == "log_decay")
    if gate.axes and "t" in gate.axes:
        for token in (0, 13, 63, 64, 90, 91):
            drawn[gate.name][:, token] = -torch.inf
    else:
        drawn[gate.name][:] = -torch.inf
    S0, do, dS = cotangents(T)
    errors = compared(tile_graph(name), head(form, drawn), exact(spec(name), drawn, S0, do, dS), S0, do, dS)
    assert max(errors.values()) < TOLERANCE, errors


def test_a_reset_of_some_channels() -> None:
    form, T = normal("kda"), 80
    drawn = tensors(form, T, gate="-2.5")
    drawn["g"][:, 7, :, 1] = -torch.inf
    drawn["g"][:, 70, :, 2:] = -torch.inf
    S0, do, dS = cotangents(T)
    errors = compared(tile_graph("kda"), head(form, drawn), exact(spec("kda"), drawn, S0, do, dS), S0, do, dS)
    assert max(errors.values()) < TOLERANCE, errors


def own_work(graph: TileGraph) -> set[int]:
    """The nodes of the work on inputs that a spec asks for itself, and its gate: what stands before the chunk algebra."""
    form = graph.form
    build = _Builder(form, graph.graph)
    rows = [form.direct, form.decay]
    rows += [x for e in form.events for x in (e.static, e.writer.vector)] + [c.reader.vector for c in form.corrections]
    rows += [x for o in form.outputs for x in (o.gain, o.reader.vector)]
    return {n.index for n in topological(build.row(x) for x in rows)}


@pytest.mark.parametrize("name", [*ZOO, *SPECIAL])
def test_every_exponent_is_a_sum_of_log_decays(name: str) -> None:
    """Of the gate itself: cumulative over a segment, over all tokens of the chunk, or of one token; or a difference of two that is cut at 0
    before exp. Never positive."""
    graph = tile_graph(name) if name in ZOO else tile(special(name))
    build, spelled = _Builder(graph.form, graph.graph), own_work(graph)
    raw, gate = build.raw_gate(), build.gate()
    nodes = topological([graph.output, graph.state, graph.d_start, *(n for _, n in graph.d_inputs)])
    exponents = [n.args[0] for n in nodes if isinstance(n.op, Map) and n.op.fn == "exp" and n.index not in spelled]
    decays = [n for n in nodes if isinstance(n.op, Decay)]
    assert (len(exponents) + len(decays) > 0) == (graph.form.decay_axis != "none")

    def is_sum(node: Node, of: Node | None) -> bool:
        if isinstance(node.op, Rows) and node.op.kind == "last":
            node = node.args[0]
        return node is of or (isinstance(node.op, Segment | Sum) and node.args[0] is of)

    def is_cut(node: Node) -> bool:
        return isinstance(node.op, Map) and node.op.fn == "at_most_zero"

    assert all(is_sum(x, gate) or is_sum(x, raw) or is_cut(x) for x in exponents)
    for decay in decays:  # the one difference: of two sums of the same finite gate, masked to s <= t (strict: s < t) before exp
        assert isinstance(decay.op, Decay)
        read, _, write, _ = decay.args
        finite = read.args[0]
        assert isinstance(finite.op, Map) and finite.op.fn == "finite" and finite.args[0] is raw
        assert is_sum(read, finite) and is_sum(write, finite)
        assert isinstance(read.op, Segment) and isinstance(write.op, Segment)
        assert decay.op.strict or read.op.exclusive <= write.op.exclusive, "positive at s = t"


@pytest.mark.parametrize("name", ZOO)
def test_the_reverse_scan_does_not_depend_on_the_state(name: str) -> None:
    graph = tile_graph(name)
    assert graph.start not in topological([graph.d_start])
    broken = replace(graph, d_start=graph.graph.mul(graph.d_start, graph.start))
    with pytest.raises(VerifyError, match="depends on the state"):
        broken.verify()


@pytest.mark.parametrize("name", ZOO)
def test_the_forward_depends_on_no_cotangent(name: str) -> None:
    graph = tile_graph(name)
    roles = {n.op.role for n in topological([graph.output, graph.state]) if isinstance(n.op, Load)}
    assert roles <= {"input", "state"}


def test_an_output_with_wrong_axes_is_refused() -> None:
    graph = tile_graph("kda")
    with pytest.raises(VerifyError, match="output has axes"):
        replace(graph, output=graph.state).verify()


def test_padding_is_never_seen() -> None:
    """What stands on the padding rows of a ragged chunk does not matter: softplus(0) is not 0, and is masked."""
    graph = tile_graph("mamba2")
    assert any(isinstance(n.op, Valid) for n in topological([graph.state]))


def test_a_graph_is_the_same_in_every_build() -> None:
    first, second = tile(chunk(normal("rwkv7"))), tile(chunk(normal("rwkv7")))
    assert str(first) == str(second)


def test_the_text_is_the_derivation() -> None:
    lines = [" ".join(line.split()) for line in str(tile_graph("gated_deltanet")).splitlines()]
    starts = [
        "score_a_w = (k k^T) * exp(D_t - D_s), s < t",
        "inverse = (I - L)^-1",
        "U = inverse Y",
        "dY = inverse^T dU",
        "dg = ",
    ]
    for start in starts:
        assert any(line.startswith(start) for line in lines), start
    phases = [line.split(":")[0] for line in str(tile_graph("kda")).splitlines() if line and not line.startswith(" ")]
    assert phases == ["tile graph of kda", "chunk-local", "carried", "reverse", "gradients"]


def test_a_row_belongs_to_the_line_that_reads_or_writes_along_it() -> None:
    """And a decay to its own, whatever is computed first."""
    text = (
        "q: key\ne: key\nw: key\nv: value\na: key\nb: scalar\nc: scalar\n\n"
        "S = S @ diag(exp(-softplus(a)))\n"
        "S = S - sigmoid(b) * (S @ l2norm(e)) @ l2norm(e).T\n"
        "S = S + tanh(c) * v @ l2norm(w).T\n"
        "o = S @ silu(q)\n"
    )
    nodes = list(tile(chunk(form_of(text))).graph.table.values())[::-1]  # the first of a kind last
    lines = {n.op.fn: n.line for n in nodes if isinstance(n.op, Map)}
    assert [lines[fn] for fn in ("softplus", "floor", "tanh")] == [9, 9, 11]
    sums = {n.args[0].args[0].op.name: n.line for n in nodes if isinstance(n.op, Sum) and isinstance(n.args[0].args[0].op, Load)}
    assert sums["e"] == 10 and sums["w"] == 11
