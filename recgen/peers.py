"""peers: the same recurrences in other libraries, so that a time stands beside another one of the same run.

PEERS says, for each library and op, which function computes it and what each of its arguments is in terms of ours. Nothing
here is needed by recgen: a library is imported when its op is called. flash-linear-attention (fla) is read as of 0.6.0,
FlashQLA as of 0.1.3. Where FlashQLA and its TileLang can be imported, fla hands work over to them: time the two in processes
with different search paths.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

Inputs = Mapping[str, Tensor]
Call = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One op of another library.

    `arguments` gives each of its tensors: the name of ours, or how it is made from ours, before the clock starts. Only of
    the former can the gradients be compared.
    """

    module: str
    function: str
    arguments: Mapping[str, str | Callable[[Inputs], Tensor]]
    constants: Mapping[str, float | bool] = field(default_factory=dict)
    finish: Callable[[Tensor, Inputs], Tensor] | None = None  # what its output lacks, added after the clock stops
    shares: int = 1  # processes among which its many configurations are worth dividing when they are compiled ahead
    note: str = ""

    def load(self) -> Call:
        """The function itself, its constants bound. ImportError where the library, or something it needs, is missing."""
        call: Call = partial(getattr(importlib.import_module(self.module), self.function), **self.constants)
        if self.module.startswith("fla."):
            _allow_gated_backward()
        return call

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        return {
            name: inputs[source] if isinstance(source, str) else source(inputs).detach().contiguous()
            for name, source in self.arguments.items()
        }

    def finisher(self, inputs: Inputs) -> Callable[[Tensor], Tensor] | None:
        finish = self.finish
        return None if finish is None else lambda o: finish(o, inputs)

    def shared(self) -> dict[str, str]:
        """Its arguments that are our inputs, by their name here."""
        return {name: source for name, source in self.arguments.items() if isinstance(source, str)}


def missing(library: str) -> str | None:
    """What must be installed before any op of a library can be called; None when it can be."""
    if library not in PEERS:
        raise ValueError(f"unknown peer {library!r}, expected one of {', '.join(PEERS)}")
    package, pip = PACKAGES[library]
    return None if importlib.util.find_spec(package) else f"{package} (pip install {pip})"


@contextmanager
def tuning(*, milliseconds: float = 20, share: tuple[int, int] | None = None) -> Iterator[None]:
    """Shorten what Triton's autotuner does inside: each configuration is timed for `milliseconds` (its own default: 125).

    With `share` = (index, count) configurations index, index + count, ... are compiled and none is timed: several processes
    fill Triton's cache side by side, and the one that times configurations afterwards has the machine for itself.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    originals = {name: getattr(Autotuner, name) for name in ("do_bench", "prune_configs", "check_disk_cache")}

    def run_once(kernel: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
        kernel()
        return [0.0] * len(quantiles)

    def divided(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configurations = list(originals["prune_configs"](self, kwargs))
        index, count = share or (0, 1)
        return configurations[index::count] or configurations[:1]

    def forgotten(self: Any, key: object, configurations: object, benchmark: Callable[[], None]) -> bool:
        benchmark()  # and its result is not written down, since it says nothing about speed
        return False

    if share is None:
        Autotuner.do_bench = staticmethod(partial(do_bench, warmup=milliseconds / 4, rep=milliseconds))
    else:
        Autotuner.do_bench, Autotuner.prune_configs, Autotuner.check_disk_cache = staticmethod(run_once), divided, forgotten
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Autotuner, name, original)


def _allow_gated_backward() -> None:
    """Lift fla's refusal to run the backward of a scalar gate on Hopper under Triton 3.4 to 3.7.0.

    One of its kernels is miscompiled there (fla issue 640). Its time is still that of the work; its error stands beside it.
    """
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]


def _step(x: Inputs) -> Tensor:
    return F.softplus(x["dt"] + x["dt_bias"])  # [B,T,H]


_QKV: Mapping[str, str] = {"q": "q", "k": "k", "v": "v"}
_GATED_DELTA: Mapping[str, str] = {**_QKV, "g": "g", "beta": "beta"}
_LIFTED = "its refusal of this backward under Triton 3.4 to 3.7.0 on Hopper is lifted"

FLA: Mapping[str, Peer] = {
    "linear_attention": Peer("fla.ops.linear_attn", "chunk_linear_attn", _QKV, {"normalize": False}),
    "retention": Peer(
        "fla.ops.simple_gla",
        "chunk_simple_gla",
        {**_QKV, "g_gamma": lambda x: x["log_gamma"]},
        note="what chunk_retention calls, with our decay of a head in place of its fixed one; it has no gradient of the decay",
    ),
    "mamba2": Peer(
        "fla.ops.simple_gla",
        "chunk_simple_gla",
        {
            "q": "q",
            "k": "k",
            "v": lambda x: (_step(x).unsqueeze(-1) * x["v"]).to(x["v"].dtype),
            "g": lambda x: -x["A_log"].exp() * _step(x),
        },
        {"scale": 1.0},
        finish=lambda o, x: o + x["D"].unsqueeze(-1) * x["v"],
        note=f"the recurrence alone: g, dt v and D v are made outside the clock; {_LIFTED}",
    ),
    "gla": Peer("fla.ops.gla", "chunk_gla", {**_QKV, "g": "g"}, shares=3),
    "rwkv6": Peer("fla.ops.rwkv6", "chunk_rwkv6", {"r": "r", "k": "k", "v": "v", "w": "w", "u": "u"}, shares=3),
    "deltanet": Peer("fla.ops.delta_rule", "chunk_delta_rule", {**_QKV, "beta": "beta"}),
    "gated_deltanet": Peer("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _GATED_DELTA, shares=2, note=_LIFTED),
    "kda": Peer("fla.ops.kda", "chunk_kda", _GATED_DELTA, shares=5),
    "dplr": Peer("fla.ops.generalized_delta_rule", "chunk_dplr_delta_rule", {**_QKV, "a": "a", "b": "b", "gk": "g"}, shares=6),
    "rwkv7": Peer(
        "fla.ops.rwkv7",
        "chunk_rwkv7",
        {"r": "r", "w": "w", "k": "k", "v": "v", "a": lambda x: -x["kappa"], "b": lambda x: x["a"] * x["kappa"]},
        {"scale": 1.0, "safe_gate": True, "lower_bound": -0.6065306597126334, "chunk_size": 64},
        shares=6,
        note="with the bound on the decay, and so the chunk of 64, that its own layer asks for; -kappa and a kappa made outside the clock",
    ),
}

FLASH_QLA: Mapping[str, Peer] = {
    "gated_deltanet": Peer("flash_qla", "chunk_gated_delta_rule", _GATED_DELTA, note="K = V = 128, bf16 or fp16"),
}

PEERS: Mapping[str, Mapping[str, Peer]] = {"fla": FLA, "flash_qla": FLASH_QLA}
PACKAGES: Mapping[str, tuple[str, str]] = {  # what is imported, and what is installed for it
    "fla": ("fla", "flash-linear-attention==0.6.0"),
    "flash_qla": ("flash_qla", "flash-qla==0.1.3"),
}
