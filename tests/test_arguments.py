"""Wrong calls of an emitted op: TypeError or ValueError that names the argument, what was expected and what came, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recgen

B, T, H, K, V = 2, 20, 3, 8, 4


@pytest.fixture(scope="module")
def op() -> Callable[..., Any]:
    return recgen.load("gated_deltanet")


def inputs(**changed: object) -> dict[str, Any]:
    """A right call of gated_deltanet but for what is `changed`."""
    q, k = torch.randn(2, B, T, H, K)
    made = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": torch.randn(B, T, H, V)}
    made |= {"g": -torch.rand(B, T, H), "beta": torch.rand(B, T, H)}
    return made | changed


def test_the_right_call_is_right(op: Callable[..., Any]) -> None:
    o, state = op(**inputs(), output_final_state=True, initial_state=torch.zeros(B, H, K, V))
    assert o.shape == (B, T, H, V)
    assert state.shape == (B, H, K, V)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.randn(T, H, K)}, ValueError, r"q must be \[B,T,H,K\], got shape \(20, 3, 8\)"),
    ({"g": torch.randn(B, T, H, 1)}, ValueError, r"g must be \[B,T,H\], got shape \(2, 20, 3, 1\)"),
    ({"k": torch.randn(B, T, H, K + 1)}, ValueError, r"k must be \[B,T,H,K\] with K = 8 as in q, got shape \(2, 20, 3, 9\)"),
    ({"v": torch.randn(B, T + 1, H, V)}, ValueError, r"v must be \[B,T,H,V\] with T = 20 as in q, got shape \(2, 21, 3, 4\)"),
    ({"beta": torch.rand(B, T, H + 1)}, ValueError, r"beta must be \[B,T,H\] with H = 3 as in q, got shape \(2, 20, 4\)"),
    ({"q": torch.randn(B, T, 0, K)}, ValueError, r"q must be \[B,T,H,K\] with H of at least 1, got shape \(2, 20, 0, 8\)"),
    ({"v": torch.randn(B, T, H, 0)}, ValueError, r"v must be \[B,T,H,V\] with V of at least 1, got shape \(2, 20, 3, 0\)"),
    ({"q": torch.ones(B, T, H, K, dtype=torch.int64)}, TypeError, "q must be a floating-point tensor, got torch.int64"),
    ({"v": torch.ones(B, T, H, V, dtype=torch.complex64)}, TypeError, "v must be a floating-point tensor, got torch.complex64"),
    ({"v": [1.0]}, TypeError, r"v must be a tensor \[B,T,H,V\], got list"),
    ({"beta": 1.0}, TypeError, r"beta must be a tensor \[B,T,H\], got float"),
    ({"g": None}, TypeError, r"g must be a tensor \[B,T,H\], got NoneType"),
    ({"v": torch.randn(B, T, H, V, device="meta")}, ValueError, "v must be on cpu as q, got meta"),
    (
        {"initial_state": torch.zeros(B, H, V, K)},
        ValueError,
        r"initial_state must be \[B,H,K,V\] = \(2, 3, 8, 4\), got shape \(2, 3, 4, 8\)",
    ),
    ({"initial_state": torch.zeros(H, K, V)}, ValueError, r"initial_state must be \[B,H,K,V\] = \(2, 3, 8, 4\), got shape \(3, 8, 4\)"),
    ({"initial_state": 0.0}, TypeError, r"initial_state must be a tensor \[B,H,K,V\], got float"),
    (
        {"initial_state": torch.zeros(B, H, K, V, dtype=torch.int32)},
        TypeError,
        "initial_state must be a floating-point tensor, got torch.int32",
    ),
    ({"initial_state": torch.zeros(B, H, K, V, device="meta")}, ValueError, "initial_state must be on cpu as q, got meta"),
    ({"scale": "large"}, TypeError, "scale must be a number or None, got str"),
    ({"scale": torch.ones(1)}, TypeError, "scale must be a number or None, got Tensor"),
    ({"mode": "fast"}, ValueError, "mode must be 'auto', 'chunk' or 'recurrent', got 'fast'"),
    ({"gate": torch.rand(B, T, H)}, TypeError, "unexpected keyword argument 'gate'"),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG, ids=[f"{next(iter(c))}: {m[:40]}" for c, _, m in WRONG])
def test_a_wrong_argument_is_named(op: Callable[..., Any], changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        op(**inputs(**changed))
    assert "gated_deltanet" in str(caught.value)


@pytest.mark.parametrize("mode", ["auto", "chunk", "recurrent"])
def test_tensors_without_data_are_refused(op: Callable[..., Any], mode: str) -> None:
    with pytest.raises(ValueError, match="q must be on a CPU or a GPU, got meta"):
        op(**{name: x.to("meta") for name, x in inputs().items()}, mode=mode)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("mode", ["auto", "chunk", "recurrent"])
def test_products_under_autocast_keep_their_dtypes(op: Callable[..., Any], mode: str, tokens: int) -> None:
    some = {name: x[:, :1].repeat_interleave(tokens, 1) for name, x in inputs().items()}
    outside, _ = op(**some, mode=mode)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = op(**some, mode=mode)
    assert torch.equal(inside, outside)


def test_a_missing_argument_is_named(op: Callable[..., Any]) -> None:
    some = inputs()
    del some["beta"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'beta'"):
        op(**some)


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
def test_each_mode_is_checked_under_its_own_name(op: Callable[..., Any], mode: str) -> None:
    module = __import__("sys").modules[op.__module__.rpartition(".")[0]]
    function = getattr(module, f"{mode}_gated_deltanet")
    with pytest.raises(ValueError, match=rf"^{mode}_gated_deltanet: q must be"):
        function(**inputs(q=torch.randn(B, T, H, K, 1)))


def test_a_parameter_of_heads_is_checked() -> None:
    op = recgen.load("mamba2")
    tensors: dict[str, Tensor] = {}
    sizes = {"t": (B, T, H), "tk": (B, T, H, K), "tv": (B, T, H, V), "": (H,), "k": (H, K), "v": (H, V)}
    module = __import__("sys").modules[op.__module__.rpartition(".")[0]]
    for name, axes, *_ in module.INPUTS:
        tensors[name] = torch.rand(sizes[axes])
    (head,) = [name for name, axes, *_ in module.INPUTS if axes == ""][:1]
    op(**tensors)
    with pytest.raises(ValueError, match=re.escape(f"{head} must be [H] with H = 3")):
        op(**tensors | {head: torch.rand(H + 1)})
    with pytest.raises(ValueError, match=re.escape(f"{head} must be [H], got shape (1, 3)")):
        op(**tensors | {head: torch.rand(1, H)})


@pytest.mark.parametrize(
    ("dtype", "wide", "message"),
    [
        (torch.bfloat16, {"K": 257, "V": 8}, "K must be at most 256 on cuda, got 257 in q"),
        (torch.bfloat16, {"K": 8, "V": 300}, "V must be at most 256 on cuda, got 300 in v"),
        (torch.float64, {"K": 8, "V": 8}, "q must be float32, float16 or bfloat16 on cuda, got torch.float64"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_before_a_launch(
    op: Callable[..., Any], dtype: torch.dtype, wide: dict[str, int], message: str
) -> None:
    launch = __import__("sys").modules[f"{op.__module__.rpartition('.')[0]}.launch"]
    table = __import__("sys").modules[op.__module__].ARGUMENTS
    shape = launch.Shape(B, T, H, wide["K"], wide["V"], (dtype,) * len(table), torch.device("cuda"))
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        launch.check_kernels("gated_deltanet", table, shape)


def test_values_share_the_dtype_of_the_operands(op: Callable[..., Any]) -> None:
    launch = __import__("sys").modules[f"{op.__module__.rpartition('.')[0]}.launch"]
    table = __import__("sys").modules[op.__module__].ARGUMENTS
    dtypes = tuple(torch.float32 if a.name in ("v", "g", "beta") else torch.bfloat16 for a in table)
    with pytest.raises(TypeError, match=r"v must be torch.bfloat16 as q, got torch.float32"):
        launch.check_kernels("gated_deltanet", table, launch.Shape(B, T, H, K, V, dtypes, torch.device("cuda")))
