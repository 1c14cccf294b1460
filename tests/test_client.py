"""A client: Qwen3-Next of transformers, tiny and with random weights, on the emitted Gated DeltaNet in place of its own two functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import recgen
from recgen.sample import error
from tests.interpreter import Interpret, interpreter

pytestmark = pytest.mark.client
pytest.importorskip("transformers", reason="needs the extra client")

# Of rms(x - ref) / rms(ref) in fp32. 1.1e-6 and 5.5e-6 were measured; transformers' own two functions differ by 1.6e-6 and 6.5e-6.
LOGITS, GRADIENTS = 3e-6, 2e-5
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 4,  # three of Gated DeltaNet, one of attention
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    with interpreter() as call:
        yield call


def model(device: str = "cpu") -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(1)
    made = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, attn_implementation="eager"))
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):  # from heads that forget at once to heads that remember
            parameter.data = torch.linspace(-5.0, 2.5, parameter.numel())
    return made.to(device)


def tokens(device: str = "cpu", length: int = 70) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(2)).to(device)


def in_place_of(mode: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The emitted op under the signature of transformers' functions: heads in groups, keys and queries normalised inside."""
    op = recgen.load("gated_deltanet")

    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        group = value.shape[2] // key.shape[2]
        query, key = (x.repeat_interleave(group, 2) for x in (query, key))
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        return op(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state, mode=mode)

    return gated_delta_rule


@contextmanager
def emitted() -> Iterator[dict[str, mock.Mock]]:
    """Inside, the model runs on the emitted op. Yields the two functions, which count their calls."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    functions = {mode: mock.Mock(side_effect=in_place_of(mode)) for mode in ("chunk", "recurrent")}
    with ExitStack() as stack:
        for mode, function in functions.items():
            stack.enter_context(mock.patch.object(modeling_qwen3_next, f"torch_{mode}_gated_delta_rule", function))
        yield functions


def training_step(network: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of every parameter."""
    network.zero_grad(set_to_none=True)
    logits = network(ids, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


@torch.no_grad()
def decoded(network: Any, ids: Tensor, prefill: int) -> tuple[Tensor, Tensor]:
    """Logits of a prefill and of the tokens after it one by one; the state of the first layer at the end."""
    out = network(ids[:, :prefill], use_cache=True)
    logits = [out.logits]
    for t in range(prefill, ids.shape[1]):
        out = network(ids[:, t : t + 1], cache=out.cache, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1), out.cache.get_recurrent_state(0, state_idx=0)


def compare_training(device: str = "cpu", length: int = 70) -> dict[str, float]:
    """The largest difference of logits and of gradients between the model as it is and on the emitted op."""
    network, ids = model(device), tokens(device, length)
    logits, gradients = training_step(network, ids)
    with emitted() as functions:
        found, found_gradients = training_step(network, ids)
    assert [f.call_count for f in functions.values()] == [3, 0]
    assert found_gradients.keys() == gradients.keys()
    differences = {name: error(found_gradients[name], d) for name, d in gradients.items() if d.any()}
    assert {name for name in differences if name.endswith("A_log")}, "the gates are trained"
    return {"logits": error(found, logits), "gradients": max(differences.values())}


def compare_decoding(device: str = "cpu", length: int = 70, prefill: int = 37) -> dict[str, float]:
    """Prefill and decode on the emitted op, against the model as it is and against one pass."""
    network, ids = model(device), tokens(device, length)
    logits, state = decoded(network, ids, prefill)
    with emitted() as functions:
        found, found_state = decoded(network, ids, prefill)
        assert [f.call_count for f in functions.values()] == [3, 3 * (length - prefill)]
        whole, whole_state = decoded(network, ids, length)
    assert found_state.shape == state.shape == (2, SIZES["linear_num_value_heads"], 16, 24)
    return {
        "logits": error(found, logits),
        "state": error(found_state, state),
        "logits of one pass": error(found, whole),
        "state of one pass": error(found_state, whole_state),
    }


def test_training_on_the_torch_path() -> None:
    found = compare_training()
    assert found["logits"] <= LOGITS
    assert found["gradients"] <= GRADIENTS


def test_decoding_on_the_torch_path() -> None:
    assert max(compare_decoding().values()) <= LOGITS


def test_training_on_interpreted_kernels(interpret: Interpret) -> None:
    found = interpret(compare_training, length=35)
    assert found["logits"] <= LOGITS
    assert found["gradients"] <= GRADIENTS


def test_decoding_on_interpreted_kernels(interpret: Interpret) -> None:
    assert max(interpret(compare_decoding, length=20, prefill=17).values()) <= LOGITS


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """fp32 products are three tf32 products there."""
    assert max(compare_training("cuda").values()) <= 1e-4
    assert max(compare_decoding("cuda").values()) <= 1e-4
