"""emit: the stages of one spec become the files of its package. Python decides what stands in them, Jinja lays it out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sympy import pycode

from . import inlined
from .chunk import ChunkForm
from .emit_chunk import KernelText, kernel_texts, launch_text
from .emit_recurrent import RecurrentText, recurrent_text
from .emit_torch import torch_text
from .normalize import Input, NormalForm
from .reference import reference_source
from .resources import folder
from .schedule import Schedule
from .spec import Spec
from .tile import TileGraph


@dataclass(frozen=True, slots=True)
class Argument:
    """An input as the emitted validator sees it."""

    name: str
    axes: str
    operand: bool  # meets the tensor cores as it is: shares one dtype with the other operands
    domain: str
    low: float
    high: float


def emit(spec: Spec, normal: NormalForm, form: ChunkForm | None, tile: TileGraph | None, plan: Schedule | None) -> dict[str, str]:
    """Relative file names and their text, not formatted yet."""
    environment = Environment(
        loader=FileSystemLoader(str(folder("templates"))), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    recurrent = recurrent_text(normal)
    chunked = [] if plan is None else [t for k in (*plan.forward, *plan.backward) for t in kernel_texts(k, plan, normal.name)]
    kernels = [*chunked, *recurrent.kernels]
    met = plan.operands() | {_value(normal).name} if plan is not None else frozenset()  # the values' dtype is that of all operands
    arguments = tuple(
        Argument(i.name, "".join(i.axes), i.name in met, i.domain.kind, i.domain.low, i.domain.high)
        for i in normal.inputs
        if i.axes is not None
    )
    constants = tuple((i.name, pycode(i.default)) for i in normal.inputs if i.axes is None)
    names = [normal.name, *([f"chunk_{normal.name}"] if plan is not None else []), f"recurrent_{normal.name}"]
    context = {
        "name": normal.name,
        "doc": normal.doc,
        "equation": "\n".join(line.rstrip() for line in spec.source.splitlines() if re.match(r"\s*\w+\s*=", line)),
        "arguments": arguments,
        "constants": constants,
        "raw_decays": _raw_decays(normal),
        "exports": sorted(names),
        "all": sorted([*names, f"reference_{normal.name}", "INPUTS"]),
        "inputs": [repr((a.name, a.axes, a.domain, a.low, a.high)) for a in arguments],
        "kernels": kernels,
        "primitives": _primitives(kernels),
        "recurrent": recurrent,
        "chunk": None if plan is None else launch_text(plan, normal, chunked),
        "torch_chunk": None if tile is None else torch_text(tile),
        "runtime": inlined.text("runtime").rstrip(),
        **_calls(normal, recurrent, plan),
        "obstacle": normal.obstacle,
        "reference": reference_source(spec),
    }
    files = [
        "__init__.py",
        "op.py",
        "launch.py",
        "kernels.py",
        "reference.py",
        "test_parity.py",
        *(["torch_chunk.py"] if tile is not None else []),
    ]
    rendered = {file: environment.get_template(f"{file}.j2").render(context) for file in files}
    return rendered | {f"{normal.name}.rec": "".join(f"{line}\n" for line in spec.source.splitlines())}


def _raw_decays(normal: NormalForm) -> list[str]:
    """The inputs of a token that nothing but the decay is made of, and that are no log of it: they take it from one end to the other."""
    decays = {symbol for step in normal.steps for symbol in step.decay.free_symbols}
    rows = [row for step in normal.steps for e in step.events for row in (e.read, e.write, e.static) if row is not None]
    rows += [row for read in normal.reads for row in (read.query, read.gain)]
    elsewhere = {symbol for row in (*rows, normal.direct) for symbol in row.free_symbols}
    only = {symbol.name for symbol in decays - elsewhere}
    return [i.name for i in normal.inputs if i.name in only and "t" in (i.axes or ()) and i.domain.kind != "log_decay"]


def _value(normal: NormalForm) -> Input:
    """The input whose dtype is that of the output."""
    return next(i for i in normal.inputs if "v" in (i.axes or ()) and "t" in (i.axes or ()))


def _calls(normal: NormalForm, recurrent: RecurrentText, plan: Schedule | None) -> dict[str, object]:
    """The pieces of signatures and calls that the templates put together."""
    tensors = [i for i in normal.inputs if i.axes is not None]
    constants = [i.name for i in normal.inputs if i.axes is None]
    tiles = {i.name for i in tensors if len(i.axes or ()) == 2}
    value = _value(normal)
    kinds = {("t",): "[B,T,H]", ("t", "k"): "[B,T,H,K]", ("t", "v"): "[B,T,H,V]", (): "[H]", ("k",): "[H,K]", ("v",): "[H,V]"}
    what = {"log_decay": ", log of a retention (<= 0)", "unit": ", in [0, 1]", "unit_norm": ", of unit norm"}
    shapes: dict[str, list[str]] = {}
    for i in tensors:
        shapes.setdefault(kinds[tuple(i.axes or ())] + what.get(i.domain.kind, ""), []).append(i.name)
    return {
        "signature": ", ".join([*(i.name for i in tensors), *(f"{c}=None" for c in constants)]),
        "tensors": ", ".join(i.name for i in tensors),
        "first": tensors[0].name,
        "value": value.name,
        "value_index": tensors.index(value),
        "summary": normal.doc.strip().splitlines()[0] if normal.doc.strip() else f"The recurrence of {normal.name}.rec.",
        "argument_doc": [
            *(f"{', '.join(names)}: {shape}." for shape, names in shapes.items()),
            *(f"{i.name}: a number, {i.default} by default." for i in normal.inputs if i.axes is None),
        ],
        "constant_names": "".join(f"{c}, " for c in constants),
        "constant_parameters": "".join(f", {c}" for c in constants),
        "constant_arguments": "".join(f", {c}" for c in constants),
        "contiguous": "(" + "".join(f"addressable({i.name}), " if i.name in tiles else f"dense({i.name}), " for i in tensors) + ")",
        "recurrent_forward": ", ".join(p for p in recurrent.forward_arguments if ":" not in p and p not in ("T", "P")),
        "recurrent_backward": ", ".join(p for p in recurrent.backward_arguments if ":" not in p and p not in ("T", "P", "M")),
    }


def _primitives(kernels: Sequence[KernelText]) -> list[str]:
    """The source of the constant functions that the kernels call, and of those that these call."""
    text = "\n".join(line for kernel in kernels for line in kernel.lines)
    sources = inlined.functions("primitives")
    wanted = {name for name in sources if re.search(rf"\b{name}\(", text)}
    while more := {n for n in sources for w in wanted if n not in wanted and n in re.findall(r"\w+", sources[w])}:
        wanted |= more
    return [source for name, source in sources.items() if name in wanted]
