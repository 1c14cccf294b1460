"""The recurrent op in text: one token at a time, printed from the lines of the spec as the normal form keeps them. Part of emit.

Its backward is reverse mode over the graph of one token. States are kept at every P-th token; between two of them they are computed
again into a scratch of P states, so that nothing of size T x K x V is ever stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sympy import Expr

from .emit_chunk import INDENT, KernelText
from .graph import Graph
from .lower import Lowering
from .normalize import Column, NormalForm, Row
from .ops import Axes, Load, Node, Sum, topological
from .schedule import Buffer, Kernel
from .statements import assemble
from .translate import translate
from .vjp import gradients


@dataclass(frozen=True, slots=True)
class RecurrentText:
    """Kernels, and how the op calls them."""

    kernels: tuple[KernelText, ...]
    whole_values: bool  # a sum over value channels of the state: no tiles of value channels
    forward_arguments: tuple[str, ...]
    backward_arguments: tuple[str, ...]
    gradients: tuple[tuple[str, str, str], ...]  # input, allocation of its gradient, expression of the result


@dataclass(frozen=True, slots=True)
class TokenGraph:
    """One token of one head: state [v, k] in and out, output [v], and the gradients."""

    graph: Graph
    start: Node
    state: Node
    output: Node
    d_start: Node
    d_inputs: tuple[tuple[str, Node], ...]


def token_graph(normal: NormalForm) -> TokenGraph:
    """The updates and the output of the normal form as tile operations."""
    graph = Graph()
    start = graph.load("state", ("v", "k"), "state")
    versions = [start]

    def elementwise(expr: Expr, *, factor: bool = False) -> Node:
        return translate(graph, expr, normal.inputs, padded=False, token=True, factor=factor)

    def row(r: Row) -> Node:
        reads = [graph.mul(elementwise(x.gain), graph.sum(graph.mul(versions[x.version], elementwise(x.vector)), "k")) for x in r.reads]
        return graph.add(elementwise(r.static), *reads)

    def column(c: Column) -> Node:
        reads = [graph.mul(elementwise(x.gain), graph.sum(graph.mul(versions[x.version], elementwise(x.vector)), "v")) for x in c.reads]
        return graph.add(elementwise(c.static), *reads)

    for update in normal.updates:
        graph.line = update.line
        kept = [graph.mul(elementwise(k.value, factor=True), elementwise(k.key, factor=True), versions[k.version]) for k in update.keeps]
        written = [graph.mul(row(r), column(c)) for r, c in update.outers]
        versions.append(graph.expand(graph.add(*kept, *written), ("v", "k")))
    graph.line = normal.output_line
    output = graph.name(graph.expand(row(normal.output), ("v",)), "o")
    d_output, d_state = graph.load("do", ("v",), "cotangent"), graph.load("dstate", ("v", "k"), "cotangent")
    tensors = [i for i in normal.inputs if i.axes is not None]
    leaves = [graph.load(i.name, _token_axes(tuple(i.axes or ()))) for i in tensors]
    found = gradients(graph, {output: d_output, versions[-1]: d_state}, [*leaves, start])
    named = tuple((i.name, graph.name(found[leaf], f"d{i.name}")) for i, leaf in zip(tensors, leaves, strict=True))
    return TokenGraph(graph, start, versions[-1], output, found[start], named)


def _token_axes(axes: Axes) -> Axes:
    return tuple(a for a in axes if a != "t")


class _TokenLowering(Lowering):
    """Vectors of one token by pointer; everything varies with the token but per-head parameters."""

    heads: frozenset[str]

    def scope(self, node: Node) -> int:
        if node.index not in self.loops:
            own = isinstance(node.op, Load) and node.op.name not in self.heads
            self.loops[node.index] = 1 if own else max((self.scope(a) for a in node.args), default=0)
        return self.loops[node.index]

    def emit(
        self,
        node: Node,
        text: str,
        scope: int,
        *,
        plain: bool,
        binary: bool = False,
        name: str | None = None,
        axes: Axes = (),
        rank: int = 0,
    ) -> str:
        """Values before the loop are called h_: two bodies follow, and neither may take such a name for a value of its own."""
        if scope == 0:
            name = "h_" + (name or self.label(node, axes)).removeprefix("b_")
        return Lowering.emit(self, node, text, scope, plain=plain, binary=binary, name=name, axes=axes, rank=rank)

    def _carried(self, node: Node) -> bool:
        return self.kernel.carry is not None and node is self.kernel.carry[0]

    def address(self, buffer: Buffer) -> str:
        name, axes = buffer.name, buffer.node.axes
        index = "i_h" if name in self.heads else "i_x"
        if axes == ("v", "k"):
            return "b_P"  # the state before the token, computed again
        if not axes:
            return f"tl.load({name} + {index}).to(tl.float32)"
        size = axes[0].upper()
        return f"tl.load({name} + {index} * {size} + o_{axes[0]}, mask=o_{axes[0]} < {size}, other=0.0).to(tl.float32)"


def recurrent_text(normal: NormalForm) -> RecurrentText:
    """Forward and backward kernels of one spec."""
    token = token_graph(normal)
    heads = frozenset(i.name for i in normal.inputs if i.axes is not None and "t" not in i.axes)
    forward = _forward_kernel(token, normal, heads)
    backward, rows = _backward_kernel(token, normal, heads)
    whole = any(isinstance(n.op, Sum) and n.op.axis == "v" and "k" in n.args[0].axes for n in topological([token.state, token.output]))
    return RecurrentText((forward, backward), whole, forward.parameters, backward.parameters, rows)


def _lowering(
    token: TokenGraph, loads: list[Buffer], stores: list[Buffer], carry: tuple[Node, Node] | None, heads: frozenset[str], spec: str
) -> _TokenLowering:
    kernel = Kernel("token", "forward", tuple(loads), tuple(stores), carry, None, None, "")
    work = _TokenLowering(kernel, token.graph.names, spec, taken={b.name for b in loads} | {"b_S", "b_P", "b_D"})
    work.heads = heads
    return work


def _leaves(token: TokenGraph, targets: list[Node], *, without: set[str]) -> list[Buffer]:
    leaves = [n for n in topological(targets) if isinstance(n.op, Load)]
    return [Buffer(n.op.name, n, "token", False) for n in leaves if isinstance(n.op, Load) and n.op.name not in without]


INDICES = (
    "NV: tl.constexpr = (V + BV - 1) // BV",
    "i_v = tl.program_id(0) % NV",
    "i_bh = tl.program_id(0) // NV",
    "i_h = i_bh % H",
    "i_b = (i_bh // H).to(tl.int64)",
)
OFFSETS = ("o_v = i_v * BV + tl.arange(0, BV)", "o_k = tl.arange(0, BK)", "m_s = (o_v[:, None] < V) & (o_k[None, :] < K)")
STATE = "{name} + {index} * (K * V) + o_k[None, :] * V + o_v[:, None]"  # [K, V] in memory, [BV, BK] here


def _step(
    token: TokenGraph, loads: list[Buffer], heads: frozenset[str], spec: str, *, output: bool
) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Statements before the loop and in it that take b_S one token further."""
    work = _lowering(token, loads, [], (token.start, token.state), heads, spec)
    if output:
        value = work.number(token.output, ("v",))
        work.line(1, f"tl.store(o + i_x * V + o_v, {value}, mask=o_v < V)", token.output, ("v",))
    work.line(1, f"b_S = {work.number(token.state, ('v', 'k'))}", token.state, ("v", "k"), last=True)
    lowered = assemble(work)
    return list(lowered.head), list(lowered.body), lowered.constants


def _beside(head: Sequence[str], later: Sequence[str]) -> tuple[list[str], Callable[[str], str]]:
    """The statements of `later` that `head` lacks, and their names where `head` has one for another value: `name = text  # comment`."""
    taken = {line.split(" = ")[0] for line in head}
    names: dict[str, str] = {}

    def renamed(line: str) -> str:
        return re.sub(r"\bh_\w+", lambda found: names.get(found[0], found[0]), line)

    more: list[str] = []
    for line in map(renamed, later):
        if line in head:
            continue
        name = line.split(" = ")[0]
        if name in taken:
            names[name] = f"{name}_back"
        more.append(renamed(line))
    return more, renamed


def _forward_kernel(token: TokenGraph, normal: NormalForm, heads: frozenset[str]) -> KernelText:
    loads = _leaves(token, [token.output, token.state], without={"state"})
    head, body, constants = _step(token, loads, heads, f"{normal.name}.rec", output=True)
    state = STATE.format(name="{name}", index="{index}")
    entering = state.format(name="initial_state", index="i_bh.to(tl.int64)")
    lines = [
        *INDICES,
        *OFFSETS,
        "if initial_state is None:",
        f"{INDENT}b_S = tl.zeros((BV, BK), tl.float32)",
        "else:",
        f"{INDENT}b_S = tl.load({entering}, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]",
        *head,
        "for i_t in range(0, T):",
        f"{INDENT}i_x = (i_b * T + i_t) * H + i_h",
        f"{INDENT}if checkpoints is not None:",
        f"{INDENT * 2}if i_t % P == 0:",
        f"{INDENT * 3}tl.store({state.format(name='checkpoints', index='(i_bh.to(tl.int64) * tl.cdiv(T, P) + i_t // P)')}, b_S, mask=m_s)",
        *(INDENT + line for line in body),
        "if final_state is not None:",
        f"{INDENT}tl.store({state.format(name='final_state', index='i_bh.to(tl.int64)')}, b_S, mask=m_s)",
    ]
    names = [b.name for b in loads]
    parameters = [*names, "o", "initial_state", "final_state", "checkpoints", *constants, "T", "P"]
    return KernelText(
        "recurrent_forward_kernel",
        "Token by token: one program a head and tile of value channels.",
        (*parameters, "H: tl.constexpr", "K: tl.constexpr", "V: tl.constexpr", "BK: tl.constexpr", "BV: tl.constexpr"),
        tuple(lines),
    )


def _backward_kernel(token: TokenGraph, normal: NormalForm, heads: frozenset[str]) -> tuple[KernelText, tuple[tuple[str, str, str], ...]]:
    spec = f"{normal.name}.rec"
    loads_step = _leaves(token, [token.state], without={"state"})
    head, step, constants_step = _step(token, loads_step, heads, spec, output=False)
    targets = [n for _, n in token.d_inputs]
    loads = _leaves(token, [*targets, token.d_start], without={"dstate"})
    d_state = token.graph.load("dstate", ("v", "k"), "cotangent")
    work = _lowering(token, loads, [], (d_state, token.d_start), heads, spec)
    sums: list[str] = []
    ends: list[str] = []
    rows: list[tuple[str, str, str]] = []
    for name, node in token.d_inputs:
        value = work.number(node, node.axes)
        per_head, axes = name in heads, node.axes
        size = axes[0].upper() if axes else "1"
        offset = f" + o_{axes[0]}" if axes else ""
        mask = f", mask=o_{axes[0]} < {size}" if axes else ""
        shape = ("" if "v" in axes else "NV, ") + ("B, H" if per_head else "B, T, H") + (f", {size}" if axes else "")
        total = f"d{name}" if "v" in axes else f"d{name}.sum(0)"
        if per_head:
            block = f"b_d{name}_all"
            sums.append(f"{block} = tl.zeros((B{size},), tl.float32)" if axes else f"{block} = 0.0")
            work.line(1, f"{block} += {value}", node, axes)
            where = f"({'' if 'v' in axes else 'i_v.to(tl.int64) * M + '}i_bh) * {size}{offset}"
            ends.append(f"tl.store(d{name} + {where}, {block}{mask})")
            total = f"{total}.sum(0)"
        else:
            where = f"({'' if 'v' in axes else 'i_v.to(tl.int64) * M * T + '}i_x) * {size}{offset}"
            work.line(1, f"tl.store(d{name} + {where}, {value}{mask})", node, axes)
        rows.append((name, f"d{name} = torch.empty(({shape}), dtype=torch.float32, device=device)", f"{total}.to({name}.dtype)"))
    work.line(1, f"b_D = {work.number(token.d_start, ('v', 'k'))}", token.d_start, ("v", "k"), last=True)
    lowered = assemble(work)
    more, renamed = _beside(head, lowered.head)
    body = [renamed(re.sub(r"\bb_S\b", "b_D", line)) for line in lowered.body]
    state = STATE.format(name="{name}", index="{index}")
    whole = "i_bh.to(tl.int64)"
    scratch = state.format(name="scratch", index=f"({whole} * P + i_t - i_first)")
    kept = state.format(name="checkpoints", index=f"({whole} * n_pieces + n_pieces - 1 - i_piece)")
    lines = [
        *INDICES,
        *OFFSETS,
        "if d_final_state is None:",
        f"{INDENT}b_D = tl.zeros((BV, BK), tl.float32)",
        "else:",
        f"{INDENT}b_D = tl.load({state.format(name='d_final_state', index=whole)}, mask=m_s, other=0.0).to(tl.float32)  # [BV, BK]",
        *sums,
        *head,
        *more,
        "n_pieces = tl.cdiv(T, P)",
        "for i_piece in range(0, n_pieces):",
        f"{INDENT}i_first = (n_pieces - 1 - i_piece) * P",
        f"{INDENT}i_last = tl.minimum(i_first + P, T)",
        f"{INDENT}b_S = tl.load({kept}, mask=m_s, other=0.0)  # [BV, BK]",
        f"{INDENT}for i_t in range(i_first, i_last):",
        f"{INDENT * 2}i_x = (i_b * T + i_t) * H + i_h",
        f"{INDENT * 2}tl.store({scratch}, b_S, mask=m_s)",
        *(INDENT * 2 + line for line in step),
        f"{INDENT}tl.debug_barrier()  # the scratch is read by other threads than wrote it",
        f"{INDENT}for i_back in range(0, i_last - i_first):",
        f"{INDENT * 2}i_t = i_last - 1 - i_back",
        f"{INDENT * 2}i_x = (i_b * T + i_t) * H + i_h",
        f"{INDENT * 2}b_P = tl.load({scratch}, mask=m_s, other=0.0)  # [BV, BK]",
        *(INDENT * 2 + line for line in body),
        f"{INDENT}tl.debug_barrier()",
        *ends,
        "if d_initial_state is not None:",
        f"{INDENT}tl.store({state.format(name='d_initial_state', index=whole)}, b_D, mask=m_s)",
    ]
    inputs = list(dict.fromkeys(b.name for b in (*loads, *loads_step) if b.name not in ("do", "state")))
    constants = sorted({*constants_step, *lowered.constants})
    parameters = [
        *inputs,
        "do",
        *(f"d{n}" for n, _ in token.d_inputs),
        "checkpoints",
        "scratch",
        "d_final_state",
        "d_initial_state",
        *constants,
        "T",
        "P",
        "M",
    ]
    kernel = KernelText(
        "recurrent_backward_kernel",
        "Tokens in reverse, states computed again from the kept ones; shares of key-side gradients by tile of value channels.",
        (*parameters, "H: tl.constexpr", "K: tl.constexpr", "V: tl.constexpr", "BK: tl.constexpr", "BV: tl.constexpr"),
        tuple(lines),
    )
    return kernel, tuple(rows)
