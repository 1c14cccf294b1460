"""schedule: TileGraph -> Schedule: which kernel computes which node, and which values pass through memory between kernels.

Forward: prepare (chunks in parallel) -> scan with output. Backward: prepare -> states (forward scan again) -> reverse scan -> gradient
(chunks in parallel). What a kernel loads rather than computes again is a minimum cut between bytes and operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import networkx as nx

from .cost import SPECIAL, Sizes, seconds
from .errors import VerifyError
from .hardware import H200, Hardware
from .ops import Const, Dot, Inverse, Load, Map, Node, Pull, Rows, Score, Segment, Sum, TakeDiagonal, Valid, per_channel, topological
from .tile import TileGraph

SCAN = 0.5  # a scan has one program a head: an operation there costs half as much again
SERIAL = 10.0  # ... and one in which its warps wait for each other is on the path from state to state
COPIES = 64  # ... and on a vector of tokens it is done by every warp, in the layout of the tiles that the vector scales
PARALLEL = 1.0  # the gradient kernel is the largest: what it does twice, it does at full price

MANY = 12  # products in one kernel, beyond which its tiles no longer stay in registers

# The constants of a kernel, as far as it uses them; and what else its parameters and sizes are called.
CONSTANTS = ("H", "K", "V", "C", "BK", "BV", "ED", "XD", "PRECISION", "SPAN", "DIRECT", "STAGES", "GROUP")
KERNEL = frozenset({*CONSTANTS, "B", "T", "N", "M", "P", "NV", "n_chunks"})

Layout = Literal["token", "chunk", "head", "share", "state"]
Falls = Literal["even", "steep"]  # how a decay per channel may be, where it makes a difference: scores.py


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value in memory. token: the caller's [B,T,H,.]; chunk: [B,H,chunks,.], made here; head: a parameter; share: a chunk's part of a
    parameter's gradient; state: [B,H,K,V], the ends of a scan."""

    name: str
    node: Node
    layout: Layout
    operand: bool  # in the dtype of the matrix operands, otherwise fp32


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. walk: chunks in parallel, or one program scanning them; carry: the tile handed from chunk to chunk and its successor."""

    name: str
    walk: Literal["parallel", "forward", "backward"]
    loads: tuple[Buffer, ...]
    stores: tuple[Buffer, ...]
    carry: tuple[Node, Node] | None
    first: Buffer | None  # the state that enters the scan, if the caller gives one
    last: Buffer | None  # the state that leaves it
    doc: str
    falls: Falls | None = None  # the chunks that it is for, where two kernels share them

    @property
    def label(self) -> str:
        return f"{self.name}_steep" if self.falls == "steep" else self.name

    def held(self) -> frozenset[int]:
        """What it has without computing it: what it loads, and the state."""
        return frozenset({b.node.index for b in self.loads} | ({self.carry[0].index} if self.carry else set()))

    def targets(self) -> list[Node]:
        """What it is there for: what it stores, and the next state."""
        return [b.node for b in self.stores] + ([self.carry[1]] if self.carry else [])

    def computed(self) -> list[Node]:
        """What it computes from what it loads, arguments first."""
        have = self.held()
        nodes = topological(self.targets(), stop=lambda n: n.index in have or self.difference(n) is not None)
        return [n for n in nodes if n.index not in have]

    def difference(self, node: Node) -> tuple[Buffer, Buffer] | None:
        """Where the node is what a cumulative sum has left to the chunk's end, and the kernel loads both places: the end, and the place
        that is taken from it."""
        op = node.op
        if not (isinstance(op, Segment) and op.reverse and len(node.axes) == 2):
            return None
        places = {
            b.node.op.exclusive: b
            for b in self.loads
            if isinstance(b.node.op, Segment) and not b.node.op.reverse and b.node.args == node.args
        }
        end, place = places.get(False), places.get(not op.exclusive)
        return (end, place) if end is not None and place is not None else None

    def trimmed(self) -> Kernel:
        """The kernel without loads that a difference of two others stands for."""
        computed = self.computed()
        read = {a.index for n in computed for a in n.args} | {n.index for n in self.targets()}
        read |= {b.node.index for n in computed for b in self.difference(n) or ()}
        return replace(self, loads=tuple(b for b in self.loads if b.node.index in read))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The kernels of the chunked op in launch order; `saved` is what the forward keeps for the backward beside the inputs."""

    tile: TileGraph
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved: tuple[Buffer, ...]
    sizes: Sizes
    hardware: Hardware

    def verify(self) -> None:
        """Every kernel can compute what it stores from what it loads, and loads only what was written before."""
        written: set[str] = set()
        for kernel in (*self.forward, *self.backward):
            for buffer in kernel.loads:
                if buffer.layout == "chunk" and buffer.name not in written:
                    raise VerifyError(f"{kernel.name} loads {buffer.name} before a kernel wrote it")
            for node in kernel.computed():
                if isinstance(node.op, Load):
                    raise VerifyError(f"{kernel.name} needs {node.op.name}, which it does not load")
            written |= {b.name for b in kernel.stores}

    def operands(self) -> frozenset[str]:
        """Inputs that some kernel hands to a matrix product as they are loaded."""
        found: set[str] = set()
        for kernel in (*self.forward, *self.backward):
            for node in kernel.computed():
                found |= {a.op.name for a in _operands(node) if isinstance(a.op, Load) and a.op.role == "input"}
        return frozenset(found)

    def __str__(self) -> str:
        from .show import show_schedule

        return show_schedule(self)


@dataclass(slots=True)
class _Planner:
    """The dependencies of the nodes and the buffers named so far."""

    tile: TileGraph
    sizes: Sizes
    hardware: Hardware
    buffers: dict[int, Buffer]
    resident: frozenset[int]  # tiles whose rows are read from memory
    needs: dict[int, frozenset[str]] = field(default_factory=dict)  # what `depends` knows already
    rows: dict[int, Buffer] = field(default_factory=dict)  # inputs of one number a token, laid out chunk by chunk for the scans

    def depends(self, node: Node) -> frozenset[str]:
        """Which of state, dstate, do, inputs the node needs."""
        for n in topological([node], stop=lambda n: n.index in self.needs):
            if n.index not in self.needs:
                own = {n.op.name if n.op.role != "input" else "input"} if isinstance(n.op, Load) else set()
                self.needs[n.index] = frozenset(own).union(*(self.needs[a.index] for a in n.args))
        return self.needs[node.index]

    def cut(
        self,
        targets: Iterable[Node],
        given: set[int],
        storable: Callable[[Node], bool],
        pressure: float,
        made_before: frozenset[int] = frozenset(),
    ) -> tuple[Node, ...]:
        """The nodes that a kernel computing `targets` loads: a minimum cut between passing a value through memory and computing it here.

        given: values in memory already, which cost their load alone; only an elementwise one is ever made again. storable: what another
        kernel could store. pressure: how much dearer an operation is here than in the kernel that would make it for us. made_before: what
        is never made again. A kernel that makes values for us loads its inputs: that counts too.
        """
        targets = tuple(targets)
        graph = nx.DiGraph()
        goals = {n.index for n in targets}
        loaded = {i for i in given - goals if not isinstance(self.tile.graph.nodes[i].op, Map)}
        nodes = topological(targets, stop=lambda n: isinstance(n.op, Load) or n.index in loaded)

        def ticks(time: float) -> int:  # integers, so that the cut cannot depend on rounding
            return round(time * 1e15)

        for node in nodes:
            if isinstance(node.op, Const):
                continue
            load = self.bytes(node) / self.hardware.bandwidth
            made, here = (node.index, "made"), (node.index, "here")
            if isinstance(node.op, Load):
                graph.add_edge("source", here, capacity=ticks(load))
                if node.op.role == "input":
                    graph.add_edge((node.index, "maker"), "sink", capacity=ticks(load))
                continue
            if node.index in loaded:
                graph.add_edge("source", here, capacity=ticks(load))
                continue
            if node.index in goals or not (node.index in given or (storable(node) and node.axes != ("s",) and not _numbered(node))):
                graph.add_edge(made, here)
            else:
                graph.add_edge(made, here, capacity=ticks(load if node.index in given else 2 * load) + 1)
            in_chunks = per_channel(node) and pressure == SCAN  # how it is computed differs from chunk to chunk
            if node.index in self.resident or node.index in made_before or in_chunks:
                graph.add_edge("source", made)
            else:
                graph.add_edge("source", made, capacity=ticks(self.price(node, pressure) * self.seconds(node)))
            for arg in (a for a in node.args if not isinstance(a.op, Const)):
                graph.add_edge((arg.index, "here"), made)
                if node.index not in given and self.local(node):  # what the maker needs, down to the inputs
                    graph.add_edge(made, (arg.index, "maker"))
                    graph.add_edge((node.index, "maker"), (arg.index, "maker"))
        for target in targets:
            graph.add_edge((target.index, "here"), "sink")
        _, (before, _) = nx.minimum_cut(graph, "source", "sink")
        return tuple(
            n
            for n in nodes
            if not isinstance(n.op, Const)
            and (n.index, "here") not in before
            and (isinstance(n.op, Load) or n.index in loaded or (n.index, "made") in before)
        )

    def price(self, node: Node, pressure: float) -> float:
        """How much dearer the operation is in a kernel under `pressure` than in the kernel that would make it for us."""
        if pressure != SCAN:
            return pressure
        if isinstance(node.op, Segment | Sum | Inverse):
            return SERIAL
        return COPIES * SCAN if node.axes == ("t",) else SCAN

    def bytes(self, node: Node) -> int:
        """Gates stay fp32 whatever the operands are, and so does a tile that anything but a matrix product uses."""
        gates = {i.name for i in self.tile.form.normal.inputs if i.domain.kind == "log_decay"}
        wide = (
            (isinstance(node.op, Load) and node.op.name in gates)
            or isinstance(node.op, Segment | Rows)
            or (isinstance(node.op, Map) and node.op.fn == "exp")
        )
        return 4 * self.sizes.count(node) if wide else self.sizes.bytes(node)

    def local(self, node: Node) -> bool:
        """A kernel over chunks can make it before any scan: it varies with the chunk, needs inputs alone, and has no value channels."""
        return "v" not in node.axes and varies(node) and self.depends(node) <= {"input"}

    def seconds(self, node: Node) -> float:
        return seconds(node, self.sizes, self.hardware)

    def label(self, node: Node) -> str:
        """What a value in memory is called: as the tile stage calls it, else by what it is made of."""
        known = self.tile.graph.names.get(node.index)
        if known is not None:
            return known
        match node.op:
            case Load(name=name):
                return name
            case Dot():
                return "_".join(self.label(a) for a in node.args if self.short(a)) or f"product{node.index}"
            case TakeDiagonal() | Sum():
                inside = self.label(node.args[0])
                return (
                    f"{'diagonal' if isinstance(node.op, TakeDiagonal) else 'sum'}_{inside}" if len(inside) <= 24 else f"vector{node.index}"
                )
            case Map(fn="mul") if len(parts := [self.label(a) for a in node.args if self.short(a)]) > 0:
                return "_".join(parts)
            case Map(fn=fn) if fn in SPECIAL:
                return f"{fn}_chunks"
            case _:
                return f"x{node.index}"

    def short(self, node: Node) -> bool:
        """Whether the value has a name that can be part of another."""
        return isinstance(node.op, Load) or len(self.tile.graph.names.get(node.index, "-" * 12)) < 12

    def buffer(self, node: Node, *, name: str | None = None, layout: Layout | None = None) -> Buffer:
        known = self.buffers.get(node.index)
        if known is not None:
            return known
        if isinstance(node.op, Load):
            token = "t" in node.axes
            where: Layout = "token" if token else ("chunk" if node.op.role != "input" else "head")
            label = {"state": "states", "dstate": "d_states"}.get(node.op.name, node.op.name)
            made = Buffer(label, node, where, operand=False)
        else:
            made = Buffer(self.unused(name or self.label(node)), node, layout or "chunk", operand=False)
        self.buffers[node.index] = made
        return made

    def unused(self, name: str) -> str:
        """The name, with as many underscores behind it as it takes to be new."""
        inputs = {i.name for i in self.tile.form.normal.inputs}  # constants among them, which are parameters and no buffers
        taken = KERNEL | inputs | {b.name for b in (*self.buffers.values(), *self.rows.values())}
        while name in taken:
            name += "_"
        return name

    def in_scan(self, node: Node) -> Buffer:
        """Where a scan finds the value: a number of each token in a row that one copy fetches, where a kernel made that row."""
        return self.rows.get(node.index) or self.buffer(node)

    def lay_out(self, kernel: Kernel, nodes: Iterable[Node]) -> Kernel:
        """The kernel, which also lays out the numbers of tokens among `nodes`, [B,T,H] of the caller, chunk by chunk."""
        numbers = [n for n in nodes if isinstance(n.op, Load) and n.op.role == "input" and n.axes == ("t",)]
        for node in numbers:
            self.rows[node.index] = Buffer(self.unused(f"{self.buffer(node).name}_chunks"), node, "chunk", operand=False)
        loads = dict.fromkeys((*kernel.loads, *map(self.buffer, numbers)))
        return replace(kernel, loads=tuple(loads), stores=(*kernel.stores, *(self.rows[n.index] for n in numbers)))


def _settle(plan: Schedule) -> Schedule:
    """A tile that passes between kernels as a matrix operand alone is kept in the operands' dtype, any other in fp32."""
    keep: set[str] = set()
    for kernel in (*plan.forward, *plan.backward):
        have = {b.node.index for b in kernel.loads}
        inside = topological((b.node for b in kernel.stores), stop=lambda n, have=have: n.index in have)  # type: ignore[misc]
        ends = {b.node.index for b in kernel.stores}
        for buffer in kernel.loads:
            users = [n for n in inside if buffer.node in n.args and n.index not in have]
            share = isinstance(buffer.node.op, Dot) and "v" not in buffer.node.axes  # of a gradient: scaled, and added to others
            if not all(buffer.node in _operands(n) for n in users) and buffer.node.index not in ends and not share:
                keep.add(buffer.name)

    def settled(buffer: Buffer) -> Buffer:
        tile = len(buffer.node.axes) == 2
        if buffer.layout == "chunk":
            return replace(buffer, operand=tile and (buffer.name not in keep or buffer.node.axes == ("v", "k")))
        return replace(buffer, operand=tile and buffer.layout == "token")

    def kernels(stage: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        settle = (replace(k, loads=tuple(map(settled, k.loads)), stores=tuple(map(settled, k.stores))) for k in stage)
        return tuple(k.trimmed() for k in settle)

    return replace(plan, forward=kernels(plan.forward), backward=kernels(plan.backward), saved=tuple(map(settled, plan.saved)))


def schedule(tile: TileGraph, hardware: Hardware = H200, sizes: Sizes | None = None) -> Schedule:
    """Cuts the graph into kernels."""
    resident = frozenset(n.args[-1].index for n in tile.graph.table.values() if isinstance(n.op, Rows) or per_channel(n))
    plan = _Planner(tile, sizes or Sizes(t=tile.chunk), hardware, {}, resident)
    for leaf in (n for n in tile.graph.table.values() if isinstance(n.op, Load)):
        plan.buffer(leaf)
    forward, saved = _forward(plan)
    backward = _backward(plan, saved)
    loaded = {b.name for kernel in backward for b in kernel.loads}
    saved = tuple(b for b in saved if b.name in loaded)
    result = _settle(Schedule(tile, forward, backward, saved, plan.sizes, hardware))
    result.verify()
    return result


def _operands(node: Node) -> tuple[Node, ...]:
    """The arguments that the operation hands to a matrix product as they are. A decay of one number stands outside of the product, one per
    channel scales the rows."""
    match node.op:
        case Dot():
            return node.args
        case Score(decay="scalar"):
            return node.args[:2]
        case Pull(decay="scalar"):
            return node.args[1:-4]
        case Pull():
            return node.args[:1]
        case _:
            return ()


def _numbered(node: Node) -> bool:
    """Whether it is a number times another value, which is as good to store and serves more."""
    return isinstance(node.op, Map) and node.op.fn == "mul" and isinstance(node.args[0].op, Const) and node.args[1].axes == node.axes


def varies(node: Node) -> bool:
    """Whether a value differs from chunk to chunk; a per-head parameter does not."""
    pending, seen = [node], {node.index}
    while pending:  # until the first such value: most lie near
        n = pending.pop()
        if isinstance(n.op, Valid) or (isinstance(n.op, Load) and ("t" in n.axes or n.op.role != "input")):
            return True
        pending += [a for a in n.args if a.index not in seen]
        seen |= {a.index for a in n.args}
    return False


def _prepare(plan: _Planner, suffix: str, wanted: list[Node], written: set[int], doc: str) -> list[Kernel]:
    """The kernels that make `wanted` from inputs and from what is `written`: first the tiles whose rows are read, then the rest."""
    targets = [n for n in wanted if not isinstance(n.op, Load) and n.index not in written]
    inside = topological(targets, stop=lambda n: n.index in written)
    resident = [n for n in inside if n.index in plan.resident and n.index not in written]
    kernels = [_over_chunks(plan, f"gates{suffix}", resident, written, "the cumulative log decay of each chunk")] if resident else []
    written = written | {n.index for n in resident}
    targets = [n for n in targets if n.index not in written]
    if targets:
        kernels.append(_over_chunks(plan, f"prepare{suffix}", targets, written, doc))
    return kernels


def _over_chunks(plan: _Planner, name: str, targets: list[Node], written: set[int], doc: str) -> Kernel:
    inside = topological(targets, stop=lambda n: n.index in written)
    loads = [n for n in inside if isinstance(n.op, Load) or n.index in written]
    return Kernel(name, "parallel", tuple(plan.buffer(n) for n in loads), tuple(plan.buffer(n) for n in targets), None, None, None, doc)


def _forward(plan: _Planner) -> tuple[tuple[Kernel, ...], tuple[Buffer, ...]]:
    tile = plan.tile
    loads = plan.cut([tile.output, tile.state], set(), plan.local, SCAN)
    loads = tuple(n for n in loads if n is not tile.start)
    prepare = _prepare(plan, "", list(loads), set(), "what depends on one chunk alone")
    if prepare:
        prepare[-1] = plan.lay_out(prepare[-1], loads)
    output = plan.buffer(tile.output, name="o", layout="token")
    scan = Kernel(
        "scan",
        "forward",
        tuple(map(plan.in_scan, loads)),
        (output,),
        (tile.start, tile.state),
        Buffer("initial_state", tile.start, "state", False),
        Buffer("final_state", tile.state, "state", False),
        "the state from chunk to chunk, and the output",
    )
    stored = [b for kernel in prepare for b in kernel.stores]
    saved = tuple(b for b in stored if not {"k", "v"} & set(b.node.axes))
    return (*prepare, scan), saved


def _groups(gradients: list[Node]) -> list[list[Node]]:
    """The gradients that one kernel makes. Where the key side alone is large, or made for two kinds of chunk, value rows get a kernel of
    their own."""
    key_side = [n for n in gradients if "v" not in n.axes]
    values = [n for n in gradients if "v" in n.axes]
    inside = topological(key_side)
    products = sum(isinstance(n.op, Dot | Score) or (isinstance(n.op, Pull) and not n.op.gate) for n in inside)
    if values and key_side and (products > MANY or any(per_channel(n) for n in inside)):
        return [values, key_side]
    return [gradients] if gradients else []


def _products(gradients: list[Node]) -> list[Node]:
    """Where the key side works through scores per channel: what it needs of products over value channels, which then get a kernel of their
    own: the cotangents of scores, and key tiles."""
    inside = topological(gradients)
    if not any(per_channel(n) for n in inside):
        return []
    over_values = {n.index for n in inside if "v" not in n.axes and any("v" in a.axes for a in n.args)}
    scores = {n.index for n in inside if n.index in over_values and n.axes == ("t", "s")}
    wanted = [n for n in inside if n.index in over_values - scores]
    wanted += [n for n in inside if n.index in scores and _used_beside_diagonal(n, inside)]
    wanted += [n for n in inside if isinstance(n.op, TakeDiagonal) and n.args[0].index in scores]
    return list(dict.fromkeys(wanted))


def _used_beside_diagonal(score: Node, inside: tuple[Node, ...]) -> bool:
    return any(score in n.args and not isinstance(n.op, TakeDiagonal) for n in inside)


def _backward(plan: _Planner, saved: tuple[Buffer, ...]) -> tuple[Kernel, ...]:
    tile = plan.tile
    given = {b.node.index for b in saved}
    backward_state = {n.index for n in topological([tile.d_start])}
    forward_state = {n.index for n in topological([tile.state])}

    def storable(node: Node) -> bool:
        if plan.local(node):
            return True
        needs = plan.depends(node)
        in_states = node.index in forward_state and "state" in needs and "t" in node.axes
        in_reverse = node.index in backward_state and "dstate" in needs and "t" in node.axes
        return in_states or in_reverse

    early = [n for n in dict.fromkeys(node for _, node in tile.d_inputs) if n.index in backward_state and "t" in n.axes]
    gradients = [n for n in dict.fromkeys(node for _, node in tile.d_inputs) if n not in early]
    final = {node: name for name, node in tile.d_inputs}
    tokens = {node.index: ("token" if "t" in node.axes else "share") for node in final}
    for name, node in tile.d_inputs:
        plan.buffer(node, name=f"d{name}", layout=tokens[node.index])  # type: ignore[arg-type]
    given |= {n.index for n in early}
    groups = _groups(gradients)
    products = _products(groups[-1]) if groups else []
    made = frozenset(n.index for n in products)
    groups = [left for group in groups if (left := [n for n in group if n.index not in made])]
    scans = [plan.cut([end], given, plan.local, SCAN) for end in (tile.state, tile.d_start)]
    loaded = given | {n.index for scan in scans for n in scan if plan.local(n) and not isinstance(n.op, Load)}
    cuts = [plan.cut(products, loaded, storable, PARALLEL)] if products else []
    given |= made
    cuts += [plan.cut(group, loaded | made, storable, PARALLEL, made) for group in groups]
    gradient_loads = tuple(dict.fromkeys(n for cut in cuts for n in cut if n not in products))
    forward_rows = [n for n in gradient_loads if "state" in plan.depends(n) and not isinstance(n.op, Load)]
    reverse_rows = [n for n in gradient_loads if "dstate" in plan.depends(n) and not isinstance(n.op, Load)]
    reverse_rows = list(dict.fromkeys([*early, *reverse_rows]))
    states_loads = plan.cut([tile.state, *forward_rows], given, plan.local, SCAN) if tile.start in gradient_loads or forward_rows else ()
    states_loads = tuple(n for n in states_loads if n is not tile.start)
    reverse_loads = tuple(n for n in plan.cut([tile.d_start, *reverse_rows], given, plan.local, SCAN) if n is not tile.d_state)
    needed = list(dict.fromkeys(n for n in (*states_loads, *reverse_loads, *gradient_loads) if plan.local(n)))
    kernels = _prepare(plan, "_backward", needed, {b.node.index for b in saved}, "what the forward did not keep")

    def buffers(nodes: Iterable[Node]) -> tuple[Buffer, ...]:
        return tuple(plan.buffer(n) for n in nodes)

    if tile.start in gradient_loads or forward_rows:
        keep = (tile.start,) if tile.start in gradient_loads else ()
        kernels.append(
            Kernel(
                "states",
                "forward",
                tuple(map(plan.in_scan, states_loads)),
                buffers((*keep, *forward_rows)),
                (tile.start, tile.state),
                Buffer("initial_state", tile.start, "state", False),
                None,
                "the states that enter the chunks, once more",
            )
        )
    keep = (tile.d_state,) if tile.d_state in gradient_loads else ()
    kernels.append(
        Kernel(
            "reverse",
            "backward",
            tuple(map(plan.in_scan, reverse_loads)),
            buffers((*keep, *reverse_rows)),
            (tile.d_state, tile.d_start),
            Buffer("d_final_state", tile.d_state, "state", False),
            Buffer("d_initial_state", tile.d_start, "state", False),
            "the state's gradient from the last chunk to the first",
        )
    )
    if products:
        loads, cuts = buffers(cuts[0]), cuts[1:]
        kernels.append(
            Kernel(
                "products",
                "parallel",
                loads,
                buffers(products),
                None,
                None,
                None,
                "the products over value channels that the key side needs",
            )
        )
    for group, cut in zip(groups, cuts, strict=True):
        values = len(groups) > 1 and "v" in group[0].axes
        name, side = ("gradient_values", "value-side ") if values else ("gradient", "")
        doc = f"the {side}gradients of the inputs, chunk by chunk"
        kernels.append(Kernel(name, "parallel", buffers(cut), buffers(group), None, None, None, doc))
    return tuple(kernels)
