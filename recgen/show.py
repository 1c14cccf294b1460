"""show: the text of a TileGraph and of a Schedule: what `explain` prints of them."""

from __future__ import annotations

import re

from .chunk_text import columns
from .cost import Sizes, flops
from .ops import Inverse, Load, Map, Mask, Node, Score, Segment, Valid, topological
from .schedule import Buffer, Kernel, Layout, Schedule
from .scores import kinds
from .show_maths import Names
from .tile import TileGraph

B, T, H = 8, 4096, 16  # of a schedule's costs; K and V are its sizes
WIDTH = 88  # of an operation; a longer sum goes on on the next line

_PHASES = (
    ("chunk-local", "what the inputs of a chunk alone decide: all chunks at once"),
    ("carried", "what needs the state S0 that enters the chunk: from the first chunk to the last"),
    ("reverse", "what the gradient of S0 needs of dO and of the gradient dS1 of the chunk's end: from the last chunk to the first"),
    ("gradients", "the rest of the inputs' gradients, each under the first input that needs it: all chunks at once"),
)


def show_graph(tile: TileGraph) -> str:
    """Every value of one chunk, forward then backward, by phase."""
    sizes, names = Sizes(t=tile.chunk), Names(tile)
    shown = [n for n in names.shown() if not isinstance(n.op, Load)]
    out = [f"tile graph of {tile.form.normal.name}: one chunk of {sizes.t} tokens, one head, K = {sizes.k}, V = {sizes.v}", ""]
    out += [*_graph_legend(tile, names), ""]
    out += _leaves(names, sizes)
    for phase, what in _PHASES:
        nodes = [n for n in shown if names.phase[n.index] == phase]
        if not nodes:
            continue
        count = sum(flops(n, sizes) for n in names.nodes if names.phase[n.index] == phase)
        out += ["", f"{phase}: {what}; {_count(count)} flops"]
        groups = _by_input(tile, names, nodes) if phase == "gradients" else [("", nodes)]
        lines = iter(_table([_line(n, names, sizes) for _, group in groups for n in group]))
        for label, group in groups:
            out += ["", f"  {label}"] if label else []
            out += [line for _ in group for line in next(lines)]
    return "\n".join(out)


def _graph_legend(tile: TileGraph, names: Names) -> list[str]:
    ops = [n.op for n in names.nodes]
    rows = [
        ("[t, k]", "axes: t the token that reads, s the one that wrote, k a key channel, v a value channel"),
        ("x y^T, x * y", "a matrix product; a product entry by entry, along missing axes repeated; x^T of a vector: over s, not t"),
        ("dx", "the gradient of x, by reverse mode over the lines above it"),
        ("1.05M", "flops of matrix products"),
    ]
    if any(isinstance(op, Segment) for op in ops):
        rows.append(("segment sum", "cumulative inside blocks of tokens: nothing is subtracted, exp of it is at most 1"))
    if any(isinstance(op, Mask | Score) for op in ops):
        rows.append(("x, s < t", "x at the pairs (t, s) where that holds, 0 elsewhere"))
    if any(isinstance(op, Score) and op.decay == "key" for op in ops):
        rows.append(("exp(G_t - G_s)", "per channel: matrix products around a row of G, or of its halves of halves where it falls steeply"))
    if any(isinstance(op, Score) and op.decay == "scalar" for op in ops):
        rows.append(("exp(D_t - D_s)", "0 where R_t is not R_s: D sums the log decays but for the resets (exp is 0), which R counts"))
    if any(isinstance(op, Inverse) for op in ops):
        rows.append(("(I - L)^-1", "never differentiated: with U = (I - L)^-1 Y, dY = (I - L)^-T dU and dL = dY U^T"))
    if any(isinstance(op, Valid) for op in ops):
        rows.append(("valid(x)", "x, and 0 on the padding of a ragged last chunk"))
    if any(isinstance(op, Map) and op.fn == "quotient" for op in ops):
        rows.append(("x / y", "0 where x is 0"))
    return columns(rows)


def _leaves(names: Names, sizes: Sizes) -> list[str]:
    rows = []
    for role, what in (("input", "inputs"), ("state", "state"), ("cotangent", "gradients from outside")):
        leaves = [n for n in names.nodes if isinstance(n.op, Load) and n.op.role == role]
        rows.append((what, ", ".join(f"{names.names[n.index]} {_shape(n, sizes)}" for n in leaves)))
    return columns(rows)


def _by_input(tile: TileGraph, names: Names, nodes: list[Node]) -> list[tuple[str, list[Node]]]:
    """Under each input the nodes that its gradient needs and none before it does."""
    left, groups = dict.fromkeys(nodes), list[tuple[str, list[Node]]]()
    for name, target in tile.d_inputs:
        needed = [n for n in topological([target]) if n in left]
        for n in needed:
            del left[n]
        other = names.bound(target)[0]
        groups.append((f"for {name}" if other == f"d{name}" else f"for {name}: d{name} = {other}", needed))
    return groups


def _line(node: Node, names: Names, sizes: Sizes) -> tuple[str, list[str], str, str, str]:
    """name, operation on one or several lines, shape, flops, spec line."""
    count = sum(flops(n, sizes) for n in names.parts(node))
    line = f"# {names.tile.form.normal.name}.rec:{node.line}" if node.line else ""
    return names.names[node.index], _wrap(names.maths(node)[0]), _shape(node, sizes), _count(count) if count else "", line


def _table(rows: list[tuple[str, list[str], str, str, str]]) -> list[list[str]]:
    """The lines of each row, aligned."""
    left, wide, shapes, counts = (
        max((len(cell) for cell in cells), default=0)
        for cells in ((r[0] for r in rows), (line for r in rows for line in r[1]), (r[2] for r in rows), (r[3] for r in rows))
    )
    table = []
    for name, (first, *more), shape, count, line in rows:
        head = f"  {name.ljust(left)} = {first.ljust(wide)}   {shape.ljust(shapes)}   {count.rjust(counts)}   {line}".rstrip()
        table.append([head, *(f"  {' ' * left}   {part}" for part in more)])
    return table


def _wrap(text: str) -> list[str]:
    """A long sum, cut before a + or -."""
    lines = [""]
    for part in re.split(r" (?=[+-] )", text):
        if lines[-1] and len(lines[-1]) + len(part) >= WIDTH:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return lines


def _shape(node: Node, sizes: Sizes) -> str:
    if not node.axes:
        return "a number"
    return f"[{', '.join(node.axes)}] {' x '.join(str(sizes.extent(a)) for a in node.axes)}"


def _count(value: float) -> str:
    """1.05M and the like."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


# the schedule


def show_schedule(plan: Schedule) -> str:
    """Every kernel with what it moves and computes, and the least time that takes; then the sums."""
    names = Names(plan.tile)
    costs = _Costs(plan, names)
    hardware = plan.hardware
    out = [
        f"schedule of {plan.tile.form.normal.name} on {hardware.name}",
        "",
        *columns(
            [
                ("shape", f"B = {B}, T = {T}, H = {H}, K = {plan.sizes.k}, V = {plan.sizes.v}, in bf16"),
                ("floor", "the larger of bytes / bandwidth and flops / matmul rate; every kernel reads and writes each value once"),
                (hardware.name, f"{_count(hardware.bandwidth)}B/s, {_count(hardware.matmul)}flop/s"),
                ("chunks", f"{costs.chunks} a sequence, of {plan.sizes.t} tokens"),
            ]
        ),
    ]
    made: set[int] = set()
    for stage, kernels in (("forward", plan.forward), ("backward", plan.backward)):
        for kernel in kernels:
            out += ["", *_kernel(kernel, stage, costs, made)]
    return "\n".join([*out, "", *_totals(costs)])


class _Costs:
    """Bytes, flops and time of a schedule's kernels, for the shape B, T, H."""

    def __init__(self, plan: Schedule, names: Names) -> None:
        self.plan, self.names, self.sizes = plan, names, plan.sizes
        self.chunks = -(-T // plan.sizes.t)
        self.gates = {i.name for i in plan.tile.form.normal.inputs if i.domain.kind == "log_decay"}

    def shape(self, buffer: Buffer) -> list[str | int]:
        """The extents in memory, those of the caller by letter."""
        axes: list[str | int] = [{"k": "K", "v": "V"}.get(a, self.sizes.t) for a in buffer.node.axes]
        leading: dict[Layout, list[str | int]] = {
            "token": ["B", "T", "H"],
            "chunk": ["B", "H", self.chunks],
            "share": ["B", "H", self.chunks],
            "head": ["H"],
            "state": ["B", "H"],
        }
        return leading[buffer.layout] + (axes[1:] if buffer.layout == "token" else axes)

    def narrow(self, buffer: Buffer) -> bool:
        """Whether it is held in 16 bits; a gate and its gradient never are."""
        return buffer.operand and buffer.name.removeprefix("d") not in self.gates and buffer.name not in self.gates

    def bytes(self, buffer: Buffer) -> int:
        letters = {"B": B, "T": T, "H": H, "K": self.sizes.k, "V": self.sizes.v}
        total = 2 if self.narrow(buffer) else 4
        for extent in self.shape(buffer):
            total *= letters[extent] if isinstance(extent, str) else extent
        return total

    def reads(self, kernel: Kernel) -> list[Buffer]:
        return [*kernel.loads, *([kernel.first] if kernel.first else [])]

    def writes(self, kernel: Kernel) -> list[Buffer]:
        return [*kernel.stores, *([kernel.last] if kernel.last else [])]

    def moved(self, kernel: Kernel) -> int:
        return sum(map(self.bytes, (*self.reads(kernel), *self.writes(kernel))))

    def flops(self, kernel: Kernel) -> int:
        return B * H * self.chunks * int(sum(flops(n, self.sizes) for n in kernel.computed()))

    def floor(self, kernel: Kernel) -> float:
        return max(self.moved(kernel) / self.plan.hardware.bandwidth, self.flops(kernel) / self.plan.hardware.matmul)


def _kernel(kernel: Kernel, stage: str, costs: _Costs, made: set[int]) -> list[str]:
    """One kernel; `made` are the nodes that a kernel before it has computed."""
    walk = {
        "parallel": f"{B * H * costs.chunks} chunks in parallel",
        "forward": f"{B * H} scans from the first chunk to the last",
        "backward": f"{B * H} scans from the last chunk to the first",
    }[kernel.walk]
    out = [f"{stage} {kernel.name}: {kernel.doc}; {walk}"]
    match kinds(kernel):
        case (_, _):
            out.append("  twice     for chunks where the decay is even, as counted here, and for those where it is steep")
        case (Kernel(falls="steep"),):
            out.append("  once      as for steep chunks, a product for each level in place of every one counted here")
    if kernel.carry:
        out.append(f"  carries   {' -> '.join(costs.names.bound(n)[0] for n in kernel.carry)}")
    out += _buffers("loads", costs.reads(kernel), costs)
    computed = [n for n in kernel.computed() if n.index not in costs.names.folded]
    fresh = [costs.names.names[n.index] for n in computed if n.index not in made]
    again = [costs.names.names[n.index] for n in computed if n.index in made]
    for label, values in (("computes", fresh), ("again", again)):
        out += [f"  {label if n == 0 else '':<8}  {line}" for n, line in enumerate(_lines(values))]
    made |= {n.index for n in kernel.computed()}
    out += _buffers("stores", costs.writes(kernel), costs)
    moved, done = costs.moved(kernel), costs.flops(kernel)
    memory, matmul = moved / costs.plan.hardware.bandwidth, done / costs.plan.hardware.matmul
    floor = f"{_us(costs.floor(kernel))}, {'memory' if memory >= matmul else 'matmul'}"
    return [*out, f"  floor     {floor}: {_mb(moved)} in {_us(memory)}, {_count(done)} flops in {_us(matmul)}"]


def _buffers(label: str, buffers: list[Buffer], costs: _Costs) -> list[str]:
    """name, the node it holds, shape, dtype, size."""
    rows = []
    for b in buffers:
        value = costs.names.bound(b.node)[0]
        shape = f"[{', '.join(map(str, costs.shape(b)))}]"
        name = b.name if value == b.name else f"{b.name} = {value}"
        rows.append((name, shape, "bf16" if costs.narrow(b) else "fp32", _mb(costs.bytes(b))))
    width = max((len(r[3]) for r in rows), default=0)
    lines = columns([(*r[:3], r[3].rjust(width)) for r in rows], indent="")
    return [f"  {label if n == 0 else '':<8}  {line}" for n, line in enumerate(lines)]


def _lines(words: list[str]) -> list[str]:
    """Words in lines of at most WIDTH characters."""
    lines = [""] if words else []
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) >= WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _totals(costs: _Costs) -> list[str]:
    """Sums over the kernels; what is kept between forward and backward; memory beside inputs and results."""
    plan = costs.plan
    both = (*plan.forward, *plan.backward)
    rows = [("", "bytes", "flops", "floor")]
    for label, kernels in (("forward", plan.forward), ("backward", plan.backward), ("forward + backward", both)):
        sums = sum(map(costs.moved, kernels)), sum(map(costs.flops, kernels)), sum(map(costs.floor, kernels))
        rows.append((label, _mb(sums[0]), _count(sums[1]), _us(sums[2])))
    wide = [max(len(r[i]) for r in rows) for i in range(4)]
    out = ["in all", *("  " + "   ".join([r[0].ljust(wide[0]), *(r[i].rjust(wide[i]) for i in (1, 2, 3))]).rstrip() for r in rows)]
    saved = {b.name: costs.bytes(b) for b in plan.saved}
    made, made_back = (
        {b.name: costs.bytes(b) for k in kernels for b in k.stores if b.layout in ("chunk", "share")}
        for kernels in (plan.forward, plan.backward)
    )
    peak = f"forward {_mb(sum(made.values()))}, backward {_mb(sum((saved | made_back).values()))}"
    kept = f"{', '.join(saved)}: {_mb(sum(saved.values()))}, beside the inputs" if saved else "the inputs alone"
    return [*out, "", *columns([("saved for the backward", kept), ("memory beside inputs and results", peak)], indent="")]


def _mb(value: float) -> str:
    return f"{value / 1e6:.1f} MB"


def _us(value: float) -> str:
    return f"{value * 1e6:.0f} us"
