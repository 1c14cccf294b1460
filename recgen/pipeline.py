"""The compiler, on one page.

    text  -parse->      Spec        the lines of the recurrence, typed by axis             recgen/parse.py
          -normalize->  NormalForm  micro-steps S <- S Diag(exp(g)) + sum (nu + S a) kappa^T;
                                    knows no zoo and no variant's name any more            recgen/normalize.py
          -chunk->      ChunkForm   the same over a chunk of tokens: scores, one solve,
                                    output and next state                                  recgen/chunk.py
          -tile->       TileGraph   tile operations, and the backward derived from them    recgen/tile.py
          -schedule->   Schedule    kernels: what fuses, what is saved, tile sizes         recgen/schedule.py
          -emit->       files       the text of the package, from templates/               recgen/emit.py

A recurrence without a chunk form (NormalForm.obstacle says why) has no chunk, tile and schedule stage, and still gets its recurrent
kernels and its reference. `verify()` runs after every stage: what it raises is a fault of recgen, never of the spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from recgen.chunk import ChunkForm, chunk
from recgen.normalize import NormalForm, normalize
from recgen.parse import Spec, parse
from recgen.resources import Source
from recgen.schedule import Schedule, schedule
from recgen.tile import TileGraph, tile

Last = Literal["normal", "chunk", "tile", "schedule", "files"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Every stage of one spec, as far as it was compiled and has them."""

    source: Source
    spec: Spec
    normal: NormalForm
    chunk: ChunkForm | None
    tile: TileGraph | None
    schedule: Schedule | None
    files: dict[str, str]  # relative file name -> text, not formatted


class Stage(Protocol):
    def verify(self) -> None: ...


AnyStage = TypeVar("AnyStage", bound=Stage)


def compile_spec(source: Source, last: Last = "files") -> Compiled:
    """The line, for one spec; no stage behind `last` is run."""
    spec, normal = waist(source)
    has_form = normal.obstacle is None
    chunk_form = verified(chunk(normal)) if has_form and last != "normal" else None
    tile_graph = verified(tile(chunk_form)) if chunk_form is not None and last != "chunk" else None
    plan = verified(schedule(tile_graph)) if tile_graph is not None and last != "tile" else None
    files: dict[str, str] = {}
    if last == "files":
        from recgen.emit import emit  # nothing but the files needs a template

        files = emit(spec, normal, chunk_form, tile_graph, plan)
    return Compiled(source, spec, normal, chunk_form, tile_graph, plan, files)


def waist(source: Source) -> tuple[Spec, NormalForm]:
    """The line as far as the waist: all that a question about the recurrence itself needs."""
    spec = verified(parse(source.text, source.path, source.name))
    return spec, verified(normalize(spec))


def verified(stage: AnyStage) -> AnyStage:
    stage.verify()
    return stage
