"""tile: ChunkForm -> TileGraph: the chunk equations as a DAG of tile operations, and their gradients by reverse mode over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from sympy import Expr

from .chunk import CHUNK, ChunkForm, Correction, Reader, Write, Writer
from .errors import VerifyError
from .graph import Graph
from .meaning import Array, evaluate
from .ops import Axes, Axis, Node, Sum, topological
from .translate import translate
from .vjp import gradients


@dataclass(frozen=True, slots=True)
class TileGraph:
    """One chunk of one head, forward and backward.

    state and output: [v, k] at the chunk's end and [t, v]; start: the state that enters. d_output, d_state: the cotangents that come in;
    d_inputs: the gradient of every tensor input, a per-head parameter's being this chunk's share; d_start: that of `start`.
    """

    form: ChunkForm
    graph: Graph
    start: Node
    state: Node
    output: Node
    d_state: Node
    d_output: Node
    d_inputs: tuple[tuple[str, Node], ...]
    d_start: Node
    chunk: int = CHUNK

    def verify(self) -> None:
        for label, node, axes in (
            ("output", self.output, ("t", "v")),
            ("state", self.state, ("v", "k")),
            ("d_start", self.d_start, ("v", "k")),
        ):
            if node.axes != axes:
                raise VerifyError(f"{label} has axes {node.axes}, not {axes}")
        for leaf in topological([self.d_start]):
            if leaf is self.start:
                raise VerifyError("the reverse scan depends on the state: the recurrence is not linear")

    def __str__(self) -> str:
        from .show import show_graph

        return show_graph(self)

    def run(self, env: Mapping[str, Array], start: Array, d_output: Array | None = None, d_state: Array | None = None) -> TileRun:
        """The NumPy meaning over a whole sequence of one head: [T, .] arrays, state [V, K]."""
        return _run(self, env, start, d_output, d_state)


@dataclass(frozen=True, slots=True)
class TileRun:
    """What a run over a sequence gives: output [T, V], state [V, K], and the gradients when cotangents came in."""

    output: Array
    state: Array
    d_inputs: dict[str, Array]
    d_start: Array | None


@dataclass(slots=True)
class _Builder:
    """Translates the chunk equations of one form."""

    form: ChunkForm
    graph: Graph

    def raw_gate(self) -> Node | None:
        """One token's log decay, [t] or [t, k]; 0 on padding rows."""
        if self.form.decay_axis == "none":
            return None
        axes: Axes = ("t",) if self.form.decay_axis == "scalar" else ("t", "k")
        with self.graph.at(self.form.decay_line):
            return self.graph.expand(translate(self.graph, self.form.decay, self.form.normal.inputs, decay=True), axes)

    def gate(self) -> Node | None:
        """The log decay, no lower than what fp32 can tell from nothing: -inf and -1e9 leave later sums their precision."""
        raw = self.raw_gate()
        if raw is None:
            return None
        with self.graph.at(self.form.decay_line):
            return self.graph.map("floor", raw)

    def position(self, gate: Node, after: bool) -> Node:
        """G, the cumulative log decay of the chunk, with the own token's decay or without."""
        with self.graph.at(self.form.decay_line):
            return self.graph.name(self.graph.segment(gate, CHUNK, exclusive=not after), "G" if after else "G_before")

    def row(self, vector: Expr) -> Node:
        return translate(self.graph, vector, self.form.normal.inputs)

    def key_row(self, of: Reader | Writer) -> Node:
        with self.graph.at(of.line):
            return self.row(of.vector)

    def from_start(self, reader: Reader) -> Node:
        """exp of the decay between the chunk's start and the reader; 1 without decay."""
        gate = self.gate()
        if gate is None:
            return self.graph.const(1.0)
        with self.graph.at(self.form.decay_line):
            return self.graph.name(self.graph.exp(self.position(gate, reader.after)), "decay_in")

    def to_end(self, writer: Writer) -> Node:
        gate = self.gate()
        if gate is None:
            return self.graph.const(1.0)
        with self.graph.at(self.form.decay_line):
            rest = self.graph.segment(gate, CHUNK, reverse=True, exclusive=writer.after)
            return self.graph.name(self.graph.exp(rest), "decay_out")

    def over_chunk(self, gate: Node) -> Node:
        with self.graph.at(self.form.decay_line):
            total = self.graph.sum(gate, "t") if gate.axes == ("t",) else self.graph.rows(self.position(gate, True), "last")
            return self.graph.name(self.graph.exp(total), "decay_all")

    def score(self, reader: Reader, writer: Writer) -> Node:
        """reader_t . exp(G'_t - G'_s) writer_s over the pairs that see each other, [t, s]. With a decay it is one node, which the kernels
        turn into matrix products; what scales whole rows or columns of it stands outside."""
        graph, gate, kind = self.graph, self.gate(), writer.seen_by(reader)
        a, kappa = self.key_row(reader), self.key_row(writer)
        if gate is None:
            return graph.mask(graph.dot("tk,sk->ts", a, kappa), kind)
        (a, read_scales), (kappa, write_scales) = (self._rows_alone(row, gate) for row in (a, kappa))
        own = kind == "causal" and reader.after and not writer.after  # its own token's decay lies between
        causal = kind == "causal" and not own
        if gate.axes == ("t",):
            core = graph.score(a, kappa, self._place(reader.after), self._place(writer.after), causal=causal)
        else:
            read, write, sums = (self.position(gate, after) for after in (reader.after, writer.after, True))
            core = graph.score(a, kappa, (read,), (write,), sums, causal=causal)
        if own:
            core = graph.add(core, graph.diagonal(graph.sum(graph.mul(a, kappa, graph.exp(gate)), "k")))
        graph.name(core, f"score_{reader.name}_{writer.name}")
        return graph.mul(*read_scales, *(graph.along(f) if f.axes == ("t",) else f for f in write_scales), core)

    def _rows_alone(self, row: Node, gate: Node) -> tuple[Node, list[Node]]:
        """A key row, and what scales it as a whole. What a row is normalised by stays with it where its scores are kept in the operands'
        dtype: of raw rows they may be too large."""
        core, scales = self.graph.split_scales(row)
        inside = [f for f in scales if "k" in f.axes or ("k" in gate.axes and _over_keys(f))]
        return self.graph.mul(core, *inside), [f for f in scales if f not in inside]

    def _place(self, after: bool) -> tuple[Node, Node]:
        """The cumulative log decay without its resets, and how many there were: with the own token's decay or without."""
        graph, raw = self.graph, self.raw_gate()
        assert raw is not None
        parts = (("finite", "D"), ("resets", "R"))
        with self.graph.at(self.form.decay_line):
            sums = [(graph.segment(graph.map(fn, raw), CHUNK, exclusive=not after), name) for fn, name in parts]
        decay, resets = (graph.name(x, name if after else f"{name}_before") for x, name in sums)
        return decay, resets

    def read(self, reader: Reader, start: Node) -> Node:
        """The reader against the state that enters the chunk, [t, v]."""
        decayed = self.graph.mul(self.key_row(reader), self.from_start(reader))
        if self.form.decay_axis == "key":
            self.graph.name(decayed, f"{reader.name}_in")
        return self.graph.dot("tk,vk->tv", decayed, start)


def tile(form: ChunkForm) -> TileGraph:
    """The graph of a chunk: corrected value rows, output, state; then every gradient."""
    graph = Graph()
    build = _Builder(form, graph)
    start = graph.load("state", ("v", "k"), "state")
    rows = _solve(build, start)
    rows += [(w, graph.name(_value_row(build, w), w.name)) for w in form.writes]
    output = _output(build, rows, start)
    state = _state(build, rows, start)
    d_output, d_state = graph.load("do", ("t", "v"), "cotangent"), graph.load("dstate", ("v", "k"), "cotangent")
    tensors = [i for i in form.normal.inputs if i.axes is not None]
    leaves = [graph.load(i.name, tuple(i.axes or ())) for i in tensors]
    found = gradients(graph, {output: d_output, state: d_state}, [*leaves, start])
    d_inputs = tuple((i.name, graph.name(found[leaf], f"d{i.name}")) for i, leaf in zip(tensors, leaves, strict=True))
    result = TileGraph(form, graph, start, state, output, d_state, d_output, d_inputs, graph.name(found[start], "dS0"))
    result.verify()
    return result


def _over_keys(scale: Node) -> bool:
    """Whether it is made from a sum over key channels, as a norm is."""
    return any(isinstance(n.op, Sum) and n.op.axis == "k" for n in topological([scale]))


def _value_row(build: _Builder, event: Write | Correction) -> Node:
    build.graph.line = event.line
    node = build.row(event.static)
    return node if node.axes == () and event.static == 0 else build.graph.expand(node, ("t", "v"))


def _solve(build: _Builder, start: Node) -> list[tuple[Correction | Write, Node]]:
    """The rows U of the corrections, by elimination over them: each diagonal block is unit lower triangular, its inverse a node."""
    form, graph = build.form, build.graph
    right: list[Node] = []
    for c in form.corrections:
        y = graph.add(_value_row(build, c), build.read(c.reader, start))
        for w in form.writes:
            coupling = graph.name(build.score(c.reader, w.writer), "M")
            y = graph.add(y, graph.dot("ts,sv->tv", coupling, _value_row(build, w)))
        right.append(graph.name(y, f"Y{c.name[1:]}"))
    count = len(form.corrections)
    lower = [[_coupling(build, c, d) for d in form.corrections] for c in form.corrections]
    inverses: list[Node] = []
    for i in range(count):
        graph.line = form.corrections[i].line
        graph.name(lower[i][i], f"L{form.corrections[i].name[1:]}")
        inverses.append(graph.name(graph.inverse(lower[i][i]), f"inverse{form.corrections[i].name[1:]}"))
        for j in range(i + 1, count):
            for m in range(i + 1, count):
                lower[j][m] = graph.add(lower[j][m], graph.dot("tr,rs->ts", lower[j][i], graph.solve(inverses[i], lower[i][m])))
            right[j] = graph.add(right[j], graph.dot("ts,sv->tv", lower[j][i], graph.solve(inverses[i], right[i])))
    rows: list[Node] = [start] * count
    for i in reversed(range(count)):
        y = right[i]
        for m in range(i + 1, count):
            y = graph.add(y, graph.dot("ts,sv->tv", lower[i][m], rows[m]))
        rows[i] = graph.name(graph.solve(inverses[i], y), form.corrections[i].name)
    return [(c, row) for c, row in zip(form.corrections, rows, strict=True)]


def _coupling(build: _Builder, reads: Correction, writes: Correction) -> Node:
    build.graph.line = reads.line
    return build.score(reads.reader, writes.writer)


def _output(build: _Builder, rows: list[tuple[Correction | Write, Node]], start: Node) -> Node:
    """Reads with one gain share their scores."""
    form, graph = build.form, build.graph
    terms: list[Node] = []
    for gain in dict.fromkeys(o.gain for o in form.outputs):
        readers = [o for o in form.outputs if o.gain == gain]
        graph.line = readers[0].line
        inner = [build.read(o.reader, start) for o in readers]
        for event, row in rows:
            score = graph.add(*(build.score(o.reader, event.writer) for o in readers))
            inner.append(graph.dot("ts,sv->tv", graph.name(score, f"P{event.name[1:]}"), row))
        terms.append(graph.mul(build.row(gain), graph.add(*inner)))
    if form.direct != 0:
        terms.append(build.row(form.direct))
    return graph.name(graph.expand(graph.add(*terms), ("t", "v")), "o")


def _state(build: _Builder, rows: list[tuple[Correction | Write, Node]], start: Node) -> Node:
    graph, gate = build.graph, build.gate()
    terms = [start if gate is None else graph.mul(build.over_chunk(gate), start)]
    for event, row in rows:
        graph.line = event.line
        kappa = graph.mul(build.key_row(event.writer), build.to_end(event.writer))
        if build.form.decay_axis == "key":
            graph.name(kappa, f"{event.writer.name}_out")
        terms.append(graph.dot("tv,tk->vk", row, kappa))
    return graph.name(graph.add(*terms), "S1")


def _run(tile_graph: TileGraph, env: Mapping[str, Array], start: Array, d_output: Array | None, d_state: Array | None) -> TileRun:
    tensors = {i.name: i.axes for i in tile_graph.form.normal.inputs if i.axes is not None}
    size = tile_graph.chunk
    length = next(len(env[n]) for n, axes in tensors.items() if axes and axes[0] == "t")
    chunks = -(-length // size)
    sizes: dict[Axis, int] = {"t": size, "k": start.shape[1], "v": start.shape[0]}

    def cut(index: int) -> tuple[dict[str, Array], int]:
        rows = slice(index * size, min((index + 1) * size, length))
        count = rows.stop - rows.start
        local = {n: _pad(env[n][rows], size) if tensors.get(n, ())[:1] == ("t",) else env[n] for n in env}
        if d_output is not None:
            local["do"] = _pad(d_output[rows], size)
        return local, count

    states, outputs = [np.asarray(start, np.float64)], []
    for index in range(chunks):
        local, count = cut(index)
        values = evaluate([tile_graph.output, tile_graph.state], {**local, "state": states[-1]}, sizes, count)
        outputs.append(values[tile_graph.output.index][:count])
        states.append(values[tile_graph.state.index])
    output = np.concatenate(outputs) if outputs else np.zeros((0, start.shape[0]))
    if d_output is None:
        return TileRun(output, states[-1], {}, None)
    cotangent = np.zeros_like(states[-1]) if d_state is None else d_state
    parts: dict[str, list[Array]] = {n: [] for n, _ in tile_graph.d_inputs}
    for index in reversed(range(chunks)):
        local, count = cut(index)
        local |= {"state": states[index], "dstate": cotangent}
        targets = [n for _, n in tile_graph.d_inputs]
        values = evaluate([*targets, tile_graph.d_start], local, sizes, count)
        for name, node in tile_graph.d_inputs:
            value = np.broadcast_to(values[node.index], tuple(sizes[a] for a in node.axes))
            parts[name].append(value[:count] if node.axes[:1] == ("t",) else value)
        cotangent = values[tile_graph.d_start.index]
    d_inputs = {n: (np.concatenate(p[::-1]) if tensors[n][:1] == ("t",) else np.sum(p, axis=0)) for n, p in parts.items() if p}
    return TileRun(output, states[-1], d_inputs, cotangent)


def _pad(x: Array, size: int) -> Array:
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]))]) if len(x) < size else x
