"""The emitted torch path of a tile graph, as a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor

from recgen.emit_torch import torch_text
from recgen.resources import folder
from recgen.tile import TileGraph

Call = Callable[..., tuple[Tensor, Tensor | None]]


def source(graph: TileGraph) -> str:
    """The text of torch_chunk.py."""
    templates = Environment(loader=FileSystemLoader(str(folder("templates"))), undefined=StrictUndefined, autoescape=False)
    name = graph.form.normal.name
    return templates.get_template("torch_chunk.py.j2").render(name=name, torch_chunk=torch_text(graph), equation="")


def compiled(graph: TileGraph, K: int, V: int) -> Call:
    """The op with its consts at their defaults, called like a reference."""
    scope: dict[str, Any] = {}
    exec(source(graph), scope)
    normal = graph.form.normal
    sizes = {"K": K, "V": V}
    defaults = {i.name: i.default for i in normal.inputs if i.default is not None}
    consts = {name: float(x.subs({s: sizes[s.name] for s in x.free_symbols})) for name, x in defaults.items()}
    op = scope[f"torch_chunk_{normal.name}"]

    def call(*, initial_state: Tensor | None = None, output_final_state: bool = False, **inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        o, state = op(**inputs, **consts, initial_state=initial_state)
        return o, state if output_final_state else None

    return call
