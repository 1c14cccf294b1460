"""The chunked op in text: its kernels, and the launches of forward and backward. Part of emit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .fuse import fuse_sums
from .lower import ROW, by_pointer, by_row, lower, rows_name
from .normalize import NormalForm
from .ops import Dot, Inverse, Node, per_channel
from .schedule import CONSTANTS, Buffer, Kernel, Schedule
from .scores import expand, kinds
from .statements import Loop, Lowered

INDENT = "    "
LEVELS = "for i_l in tl.range(0, levels(C), num_stages=1):  # blocks of 2, 4, ... C tokens"


@dataclass(frozen=True, slots=True)
class KernelText:
    """One `@triton.jit` function."""

    name: str
    doc: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]
    tensors: tuple[Buffer, ...] = ()  # those that it is handed, of a chunk kernel
    extras: tuple[str, ...] = ()  # arguments behind the tensors: those that rows are read from, their steps, and constants of the spec
    steps: tuple[str, ...] = ()  # parameters whose values are nothing to specialise on
    facts: str = ""  # of a chunk kernel: its row in the table that block sizes are chosen from


def kernel_texts(kernel: Kernel, plan: Schedule, name: str) -> list[KernelText]:
    """The functions of one kernel: indices, masks, the state that enters, the statements, the state that leaves."""
    texts = []
    graph, found = plan.tile.graph, kinds(kernel)
    for each in found:
        made = expand(each, graph)
        lowered = lower(fuse_sums(made, graph) if each.walk == "parallel" else made, graph.names, f"{name}.rec")
        body = _parallel(lowered) if each.walk == "parallel" else _scan(lowered)
        lines = _program(each, body, shares=len(found) > 1)
        steps = tuple(f"{name}_step_{axis}" for name in lowered.steps_of for axis in "bth")
        extras = (*lowered.rows_of, *(f"*token_steps({name})" for name in lowered.steps_of), *lowered.constants)
        text = re.sub(r"#.*", "", "\n".join(lines))
        tensors = tuple(b for b in pointers(each) if re.search(rf"\b{b.name}\b", text))
        parameters = tuple(_parameters(each, tensors, lowered, steps, text))
        doc = _doc(each, shares=len(found) > 1)
        texts.append(KernelText(f"chunk_{each.label}_kernel", doc, parameters, lines, tensors, extras, steps, _facts(made)))
    return texts


def _program(kernel: Kernel, body: tuple[str, ...], *, shares: bool) -> tuple[str, ...]:
    """What one program does. A kernel that shares the chunks with another has nothing to do at those of the other kind. (An early return
    would take the function apart into blocks, which the pipeliner for Blackwell does not take.) Steep chunks are few, as a rule: a program
    looks at several at once."""
    if not shares and kernel.falls is None:
        return (*_indices(kernel, body), *body)
    (sums,) = {n.args[-1] for n in kernel.computed() if per_channel(n)}
    (rows,) = [rows_name(kernel, b) for b in kernel.loads if b.node is sums]
    steep = f"is_steep({rows} + i_c * C * {ROW}, T - i_t * C, {ROW}, C, K, SPAN)"
    if kernel.falls == "even":
        body = _under(f"if not {steep}:", body)
        return (*_indices(kernel, body), *body)
    body = _under(f"if {steep}:", body) if shares else body
    loop = _under("for i_p in range(i_first, tl.minimum(i_first + GROUP, n_chunks)):", (*_indices(kernel, body), *body))
    some = f"if any_steep({rows}, i_first, n_chunks, T, N, H, {ROW}, C, K, SPAN, GROUP):"
    return ("i_first = tl.program_id(0) * GROUP", *(_under(some, loop) if shares else loop))


def _under(head: str, lines: Iterable[str]) -> tuple[str, ...]:
    return (head, *(INDENT + line for line in lines))


def _doc(kernel: Kernel, *, shares: bool) -> str:
    walks = {
        "parallel": f"One program {'GROUP chunks and heads' if kernel.falls == 'steep' else 'a chunk and head'}",
        "forward": "One program a head and tile of value channels, first chunk to last",
        "backward": "One program a head and tile of value channels, last chunk to first",
    }
    chunks = f", where {'their' if kernel.falls == 'steep' else 'its'} decay is {kernel.falls}" if shares else ""
    return f"{kernel.doc[0].upper()}{kernel.doc[1:]}. {walks[kernel.walk]}{chunks}."


def pointers(kernel: Kernel) -> tuple[Buffer, ...]:
    """The tensors of a kernel, in order, each once. Of some it reads rows alone, by a pointer of their own."""
    ends = [b for b in (kernel.first, kernel.last) if b is not None]
    return tuple({b.name: b for b in (*kernel.loads, *kernel.stores, *ends)}.values())


def _parameters(kernel: Kernel, tensors: Sequence[Buffer], lowered: Lowered, steps: tuple[str, ...], text: str) -> list[str]:
    names = [*(b.name for b in tensors), *(f"{n}_rows" for n in lowered.rows_of), *steps]
    sizes = ["T", "N", "n_chunks"] if kernel.falls == "steep" else ["T", "N"]
    return [*names, *lowered.constants, *sizes, *(f"{c}: tl.constexpr" for c in CONSTANTS if re.search(rf"\b{c}\b", text))]


def _indices(kernel: Kernel, body: tuple[str, ...]) -> list[str]:
    """Where this program stands. Heads are neighbours in memory, so they are neighbours in the grid."""
    text = "\n".join(body)
    lines: list[str] = []
    if kernel.walk == "parallel":
        lines = [] if kernel.falls == "steep" else ["i_p = tl.program_id(0)"]
        lines += ["i_h = i_p % H", "i_t = (i_p // H) % N", "i_b = i_p // (H * N)", "i_bh = i_b * H + i_h"]
        lines += ["i_c = i_bh.to(tl.int64) * N + i_t"] if "i_c" in text else []
        lines += ["i_row = i_b.to(tl.int64) * T + i_t * C"] if "i_row" in text else []
        lines += ["o_t = tl.arange(0, C)"] if re.search(r"\b(o_t|m_t)\b", text) else []
        lines += ["m_t = i_t * C + o_t < T"] if "m_t" in text else []
        lines += ["o_v = tl.arange(0, BV)"] if "o_v" in text else []
        return lines
    lines = ["NV: tl.constexpr = (V + BV - 1) // BV", "i_v = tl.program_id(0) % NV", "i_bh = tl.program_id(0) // NV"]
    lines += ["i_h = i_bh % H"] if "i_h" in text else []
    lines += ["i_b = i_bh // H"] if re.search(r"\b(i_b|i_row)\b", text) else []
    lines += ["o_t = tl.arange(0, C)"] if "o_t" in text or "m_t" in text else []
    return [*lines, "o_v = i_v * BV + tl.arange(0, BV)", "o_k = tl.arange(0, BK)"]


def _parallel(lowered: Lowered) -> tuple[str, ...]:
    lines = list(lowered.head)
    for loop in lowered.loops:
        lines += _loop(loop)
    return tuple(lines)


def _loop(loop: Loop) -> list[str]:
    """A pass over the key tiles, perhaps with one over the levels of a steep chunk in it. No stages then: only a loop that no other stands
    in is pipelined."""
    levels = loop.inner
    body = list(loop.body)
    if levels is not None:
        body += [*levels.start, LEVELS, *(INDENT + line for line in levels.body), *levels.after]
    if not body:
        return list(loop.after)
    lines = [*loop.start, f"for i_k in tl.range(0, passes(K, BK, T), num_stages={'STAGES' if levels is None else 1}):"]
    if any("o_k" in line for line in body):
        lines.append(f"{INDENT}o_k = i_k * BK + tl.arange(0, BK)")
    return [*lines, *(INDENT + line for line in body), *loop.after]


def _scan(lowered: Lowered) -> tuple[str, ...]:
    kernel = lowered.kernel
    text = "\n".join(lowered.body)
    assert kernel.first is not None
    place = "i_bh.to(tl.int64) * (K * V) + o_k[None, :] * V + o_v[:, None]"
    inside = "(o_v[:, None] < V) & (o_k[None, :] < K)"
    lines = [
        f"if {kernel.first.name} is None:",
        f"{INDENT}b_S = tl.zeros((BV, BK), tl.float32)",
        "else:",
        f"{INDENT}b_S = tl.load({kernel.first.name} + {place}, mask={inside}, other=0.0).to(tl.float32)  # [BV, BK]",
        *lowered.head,
        "for i in tl.range(0, N, num_stages=STAGES):",
        f"{INDENT}i_t = {'i' if kernel.walk == 'forward' else 'N - 1 - i'}",
    ]
    lines += [f"{INDENT}i_c = i_bh.to(tl.int64) * N + i_t"] if "i_c" in text else []
    lines += [f"{INDENT}i_row = i_b.to(tl.int64) * T + i_t * C"] if "i_row" in text else []
    lines += [f"{INDENT}m_t = i_t * C + o_t < T"] if "m_t" in text else []
    lines += [INDENT + line for line in lowered.body]
    if kernel.last is not None:
        lines += [f"if {kernel.last.name} is not None:", f"{INDENT}tl.store({kernel.last.name} + {place}, b_S, mask={inside})"]
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class LaunchText:
    """The launches of the chunked op, as lines of its autograd function."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    saved: tuple[str, ...]
    tiles: tuple[str, ...]  # rows of the table of tile counts, for the choice of block sizes
    kernels: tuple[str, ...]
    inverse_dtype: str
    gradients: tuple[str, ...]  # one expression an input, in order


def launch_text(plan: Schedule, normal: NormalForm, texts: Sequence[KernelText]) -> LaunchText:
    """Allocations and launches in order; `texts` are the kernels, forward then backward."""
    of_kernel = {text.name: text for text in texts}
    saved = {b.name for b in plan.saved}
    forward = _launches(plan.forward, of_kernel, set(), saved)
    backward = _launches(plan.backward, of_kernel, set(saved), set())
    return LaunchText(
        tuple(forward),
        tuple(backward),
        tuple(b.name for b in plan.saved),
        tuple(text.facts for text in texts),
        tuple(text.name for text in texts),
        "tl.float16" if _bounded(normal) else "tl.float32",
        tuple(_gradient(name, plan, node) for name, node in plan.tile.d_inputs),
    )


def _bounded(normal: NormalForm) -> bool:
    """Whether every factor of the correction's keys has a bounded domain: then the inverse's entries stay in the range of fp16."""
    bounded = {
        i.name
        for i in normal.inputs
        if i.domain.kind in ("unit", "unit_norm", "interval") and max(abs(i.domain.low), abs(i.domain.high)) < 1e3
    }
    bounded |= {i.name for i in normal.inputs if i.domain.kind == "unit_norm"}
    rows = [row for step in normal.steps for e in step.events if e.read is not None for row in (e.read, e.write)]
    return all(s.name in bounded for row in rows for s in row.free_symbols)


def _gradient(name: str, plan: Schedule, node: Node) -> str:
    """What the backward returns for an input. Two inputs may have one gradient: it is stored under the name of the first."""
    stored = next(b.name for kernel in plan.backward for b in kernel.stores if b.node is node)
    if "t" in node.axes:
        return stored if stored == f"d{name}" else f"{stored}.to({name}.dtype)"
    return f"{stored}.sum((0, 2)).to({name}.dtype)"


def _allocate(*alike: Buffer) -> str:
    """One allocation: of one tensor, or of several matrices of one size and dtype."""
    buffer, name = alike[0], ", ".join(b.name for b in alike)
    axes = buffer.node.axes
    count, apart = (f"{len(alike)}, ", ".unbind()") if len(alike) > 1 else ("", "")
    width = {"k": "K", "v": "V", "s": "C"}
    match (buffer.layout, axes):
        case ("token", ("t",)):
            return f"{name} = torch.empty((B, T, H), dtype={name.removeprefix('d')}.dtype, device=device)"
        case ("token", (_, a)):
            source = name.removeprefix("d") if name != "o" else None
            dtype = f"{source}.dtype" if source else "dtype"
            return f"{name} = new_tiles((B, T, H, {width[a]}), {dtype}, device)"
        case ("share", ()):
            return f"{name} = torch.empty((B, H, N), dtype=torch.float32, device=device)"
        case ("share", (a,)):
            return f"{name} = torch.empty((B, H, N, {width[a]}), dtype=torch.float32, device=device)"
        case ("chunk", ()):
            return f"{name} = torch.empty((B * H, N), dtype=torch.float32, device=device)"
        case ("chunk", ("t",)):
            return f"{name} = torch.empty(({count}B * H, N * C), dtype=torch.float32, device=device){apart}"
        case ("chunk", (a,)):
            return f"{name} = new_tiles((B * H * N, {width[a]}), torch.float32, device)"
        case ("chunk", ("v", "k")):
            return f"{name} = new_tiles((B * H * N, V, K), dtype, device)"
        case ("chunk", (_, a)):
            dtype = "dtype" if buffer.operand else "torch.float32"
            return f"{name} = new_tiles(({count}B * H, N * C, {width[a]}), {dtype}, device){apart}"
        case _:
            raise ValueError(f"no allocation for {buffer}")


def _pass(kernel: Kernel, buffer: Buffer) -> str:
    """How a buffer is handed to a kernel: tiles as descriptors, and the vectors of a scan; other vectors as pointers."""
    name, axes = buffer.name, buffer.node.axes
    block = {"t": "C", "k": "at.BK", "v": "at.BV", "s": "C"}
    if by_row(kernel, buffer):
        return f"row_tiles({name}, {block[axes[0]]})"
    if buffer.layout == "state" or len(axes) < 2 or by_pointer(kernel, buffer):
        return name
    if buffer.layout == "token":
        tiles = f"token_tiles({name}, C, {block[axes[1]]})"
    elif axes == ("v", "k"):
        tiles = f"tiles({name}, at.BV, at.BK)"
    else:
        tiles = f"tiles({name}, C, {block[axes[1]]})"
    return f"{name} if at.direct else {tiles}" if kernel.walk != "parallel" and buffer in kernel.stores else tiles


def _launches(kernels: Sequence[Kernel], texts: Mapping[str, KernelText], made: set[str], saved: set[str]) -> list[str]:
    """Allocations and launches. What is alike and lives equally long is allocated together. Which of the states are None is part of what a
    kernel is specialised on."""
    lines: list[str] = []
    for kernel in kernels:
        groups: dict[object, list[Buffer]] = {}
        for b in (b for b in kernel.stores if b.name not in made):
            axes = b.node.axes
            alike = b.layout == "chunk" and axes[:1] == ("t",)
            groups.setdefault((axes, b.operand, b.name in saved) if alike else b.name, []).append(b)
        made |= {b.name for b in kernel.stores}
        lines += [_allocate(*group) for group in groups.values()]
        states = [f"{b.name} is None" for b in (kernel.first, kernel.last) if b is not None]
        for each in kinds(kernel):
            text = texts[f"chunk_{each.label}_kernel"]
            arguments = [*(_pass(each, b) for b in text.tensors), *text.extras]
            key = ", ".join((f'"{each.label}"', "shape", *states))
            lines += [f"at = configure({key})", f"at({', '.join(arguments)})"]
    return lines


def _facts(kernel: Kernel) -> str:
    """How many tiles of each shape an iteration of the kernel's loop loads, and what it is: the facts that block sizes follow from.
    A tile in fp32 counts twice."""
    counts = {"tk": 0, "tv": 0, "ts": 0, "vk": 0}
    for buffer in kernel.loads:
        key = "".join(buffer.node.axes)
        if key in counts:
            counts[key] += 1 if buffer.operand else 2
    inside = kernel.computed()
    dots = sum(isinstance(n.op, Dot) for n in inside)
    keeps = any(b.node.axes == ("v", "k") for b in kernel.stores)
    solves = any(isinstance(n.op, Inverse) for n in inside)
    numbers = ", ".join(map(str, (*counts.values(), dots, kernel.falls is not None, kernel.falls == "steep", keeps, solves)))
    return f'"{kernel.label}": Facts("{kernel.walk}", {numbers})'
