"""The stages of the zoo, compiled once a run, and inputs of one head to run them on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recgen.chunk import ChunkForm, chunk
from recgen.normalize import NormalForm, normalize
from recgen.parse import parse
from recgen.reference import reference_source
from recgen.resources import find, folder
from recgen.sample import REGIMES, draw, has_gate
from recgen.schedule import Schedule, schedule
from recgen.spec import Spec
from recgen.tile import TileGraph, tile

K, V = 4, 3
TINY = 1e-36  # of a log decay floored at -87, exp(-87) is left: 1e-38 a token
Array = NDArray[np.float64]


@lru_cache
def spec(name: str) -> Spec:
    source = find(name, folder("specs"))
    return parse(source.text, source.path, source.name)


@lru_cache
def normal(name: str) -> NormalForm:
    return normalize(spec(name))


@lru_cache
def chunk_form(name: str) -> ChunkForm:
    return chunk(normal(name))


@lru_cache
def tile_graph(name: str) -> TileGraph:
    return tile(chunk_form(name))


@lru_cache
def plan(name: str) -> Schedule:
    return schedule(tile_graph(name))


def form_of(text: str, name: str = "probe") -> NormalForm:
    """The normal form of a spec given as text."""
    return normalize(parse(text, f"{name}.rec", name))


def tensors(form: NormalForm, T: int, *, seed: int = 0, gate: str | None = None) -> dict[str, Tensor]:
    """One input of each declared, [1,T,1,.] in fp64."""
    rows = [(i.name, "".join(i.axes), i.domain.kind, i.domain.low, i.domain.high) for i in form.inputs if i.axes is not None]
    return draw(rows, 1, T, 1, K, V, seed=seed, dtype=torch.float64, gate=gate)


def regimes(form: NormalForm) -> tuple[str | None, ...]:
    """The gate regimes that change anything for a form, and what a trained layer has."""
    gated = has_gate([(i.name, "", i.domain.kind, i.domain.low, i.domain.high) for i in form.inputs])
    return (None, *REGIMES) if gated else (None,)


def head(form: NormalForm, drawn: dict[str, Tensor]) -> dict[str, Any]:
    """The one head of what `tensors` drew, as arrays, with sizes and consts: what the NumPy meanings take."""
    env: dict[str, Any] = {"K": K, "V": V}
    for i in form.inputs:
        if i.axes is None:
            assert i.default is not None
            env[i.name] = float(i.default.subs({s: env[s.name] for s in i.default.free_symbols}))
        else:
            x = drawn[i.name].numpy()
            env[i.name] = x[0, :, 0] if "t" in i.axes else x[0]
    return env


def reference(of: Spec) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The printed token loop."""
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(reference_source(of), names)  # what the compiler prints is what is tested
    found: Callable[..., tuple[Tensor, Tensor | None]] = names[f"reference_{of.name}"]
    return found


def error(x: Array, ref: Array) -> float:
    """rms(x - ref) / rms(ref); a difference below TINY counts as none. inf when x is not finite."""
    assert x.shape == ref.shape
    if x.size == 0:
        return 0.0
    difference, scale = (math.sqrt(float(np.mean(np.square(y)))) for y in (x - ref, ref))
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference < TINY else difference / max(scale, TINY)
