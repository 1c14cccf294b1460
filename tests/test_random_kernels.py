"""Recurrences drawn from the grammar, through the interpreted kernels: forward and every gradient against the token loop in fp64.

Widths that are no power of two and a ragged last chunk. The limit is wide, since what a drawn recurrence makes of rounding is its own; a
wrong mask, a wrong scale or a missing term is far beyond it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import recgen
from recgen.normalize import normalize
from recgen.parse import parse
from recgen.sample import draw, error, results
from tests.interpreter import Interpret, interpreter
from tests.strategies import CROWDED, NORMED_READ, TWO_READS, recurrences

SPECS = int(os.environ.get("RECGEN_SPECS", "20"))
LIMIT = 1e-3  # of rms(x - ref) / rms(ref)
FLOOR = 1e-3  # the least rms that counts, of the largest there is
K, V = 24, 20


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    with interpreter() as call:
        yield call


def errors(text: str, T: int, gate: str | None) -> dict[str, float]:
    """The error of the chunked op, by name."""
    op = recgen.compile(text, name="drawn")
    package = sys.modules[op.__module__.rpartition(".")[0]]
    inputs = draw(package.INPUTS, 1, T, 1, K, V, seed=T, dtype=torch.float32, gate=gate)
    random = torch.Generator().manual_seed(T)
    state, d_state = (torch.randn(1, 1, K, V, generator=random) for _ in range(2))
    upstream = torch.randn(1, T, 1, V, generator=random)

    def run(function: object, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        given = {name: x.to(dtype) for name, x in inputs.items()}
        return results(function, given, upstream.to(dtype), initial_state=state.to(dtype), state_grad=d_state.to(dtype))  # type: ignore[arg-type]

    found, exact = run(package.chunk_drawn, torch.float32), run(package.reference_drawn, torch.float64)
    least = FLOOR * max(x.square().mean().sqrt().item() for x in exact.values())
    return {name: error(found[name], x, least) for name, x in exact.items()}


@settings(
    max_examples=SPECS,
    deadline=None,
    derandomize="RECGEN_SPECS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@example(text=TWO_READS, T=33, gate="-5")
@example(text=NORMED_READ, T=33, gate="-5")
@example(text=CROWDED, T=33, gate=None)
@example(text=CROWDED, T=33, gate="mixed")
@given(text=recurrences(), T=st.sampled_from([1, 33, 65]), gate=st.sampled_from([None, "0", "-0.5", "-5", "mixed"]))
def test_interpreted_kernels_are_the_token_loop(interpret: Interpret, text: str, T: int, gate: str | None) -> None:
    if normalize(parse(text, "drawn.rec", "drawn")).obstacle is None:
        found = interpret(errors, text, T, gate)
        assert all(x < LIMIT for x in found.values()), found
