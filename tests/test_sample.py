"""Drawn inputs lie where their domain says, come out the same again, and keep a recurrence bounded; an error is a ratio."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recgen.sample import GATES, REGIMES, InputRow, draw, error, has_gate, results

INF = math.inf
GATED_DELTA: tuple[InputRow, ...] = (
    ("q", "tk", "real", -INF, INF),
    ("k", "tk", "unit_norm", -INF, INF),
    ("v", "tv", "real", -INF, INF),
    ("g", "t", "log_decay", -INF, 0.0),
    ("beta", "t", "unit", 0.0, 1.0),
)
B, T, H, K, V = 2, 33, 3, 24, 40
Draw = Callable[..., dict[str, Tensor]]


def drawn(table: tuple[InputRow, ...], **options: object) -> dict[str, Tensor]:
    return draw(table, B, T, H, K, V, **{"seed": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axes", "shape"), [("t", (B, T, H)), ("tk", (B, T, H, K)), ("tv", (B, T, H, V)), ("", (H,)), ("k", (H, K)), ("v", (H, V))]
)
@pytest.mark.parametrize("kind", ["real", "unit", "log_decay"])
def test_a_shape_follows_from_the_axes(axes: str, shape: tuple[int, ...], kind: str) -> None:
    for gate in (None, *REGIMES):
        assert drawn((("x", axes, kind, -INF, INF),), gate=gate)["x"].shape == shape


def test_order_names_and_dtypes() -> None:
    values = drawn(GATED_DELTA, dtype=torch.bfloat16)
    assert list(values) == ["q", "k", "v", "g", "beta"]
    assert [x.dtype for x in values.values()] == [torch.bfloat16] * 3 + [torch.float32] * 2
    assert {x.dtype for x in drawn(GATED_DELTA, dtype=torch.float64).values()} == {torch.float64}


def test_a_decay_a_channel_and_a_parameter_stay_in_fp32() -> None:
    table = (("w", "tk", "log_decay", -INF, 0.0), ("u", "k", "real", -INF, INF))
    assert {x.dtype for x in drawn(table, dtype=torch.float16).values()} == {torch.float32}


def test_the_same_seed_draws_the_same() -> None:
    one, again, other = (drawn(GATED_DELTA, seed=seed, gate="mixed") for seed in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_values_lie_in_their_domain() -> None:
    table = (
        ("x", "t", "unit", 0.0, 1.0),
        ("y", "t", "interval", -2.0, 3.0),
        ("z", "t", "interval", 1.0, INF),
        ("g", "tk", "log_decay", -0.1, 0.0),
    )
    values = drawn(table)
    for name, _, _, low, high in table:
        assert values[name].min() >= low and values[name].max() <= high
    assert values["y"].min() < 0 < values["y"].max()
    torch.testing.assert_close(drawn(GATED_DELTA)["k"].norm(dim=-1), torch.ones(B, T, H))


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_regime_holds_every_decay_near_its_value(gate: str) -> None:
    g = drawn(GATED_DELTA, gate=gate)["g"]
    assert (g - GATES[gate]).abs().max() <= 0.05 * abs(GATES[gate]) * 1.001
    assert GATES[gate] == 0 or g.unique().numel() > 1


def test_minus_100_is_below_the_normal_range_of_fp32() -> None:
    assert drawn(GATED_DELTA, gate="-100")["g"].exp().max() < torch.finfo(torch.float32).tiny


def test_mixed_changes_from_token_to_token_and_not_within_one() -> None:
    g = drawn((("g", "tk", "log_decay", -INF, 0.0),), gate="mixed")["g"]
    assert (g == 0).all(-1).any() and (g < -90).all(-1).any()
    assert ((g < -90).any(-1) == (g < -90).all(-1)).all()


def test_only_gates_follow_the_regime() -> None:
    one, other = drawn(GATED_DELTA, gate="-5"), drawn(GATED_DELTA, gate="-20")
    assert [name for name in one if not torch.equal(one[name], other[name])] == ["g"]
    assert has_gate(GATED_DELTA) and not has_gate(GATED_DELTA[:3])


def test_a_pair_of_unit_keys_keeps_the_state_bounded() -> None:
    """S <- S (I + a b^T) over two thousand tokens, and S <- S (I - k k^T), without any decay."""
    for sign, names in ((1, ("a", "b")), (-1, ("k", "k"))):
        table = tuple((name, "tk", "unit_norm", -INF, INF) for name in dict.fromkeys(names))
        keys = draw(table, 1, 2000, 1, 16, 16, seed=5, dtype=torch.float64)
        state = torch.eye(16, dtype=torch.float64)
        for a, b in zip(*(keys[name][0, :, 0] for name in names), strict=True):
            state = state + sign * (state @ a).outer(b) + 0.01 * torch.eye(16)
            assert state.norm() < 10


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown gate regime '-7'"):
        drawn(GATED_DELTA, gate="-7")
    with pytest.raises(ValueError, match="input x: unknown kind of domain 'integer'"):
        drawn((("x", "t", "integer", 0.0, 1.0),))
    with pytest.raises(ValueError, match="unknown axes 'kt'"):
        drawn((("x", "kt", "real", 0.0, 1.0),))


def test_error_is_relative() -> None:
    ref = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert error(ref, ref) == 0
    assert error((1.01 * ref).float(), ref) == pytest.approx(0.01, rel=1e-4)
    assert error(torch.empty(0), torch.empty(0)) == 0


def test_error_of_what_is_not_a_number_is_inf() -> None:
    assert error(torch.tensor([math.nan, 1.0]), torch.ones(2)) == INF
    assert error(torch.tensor([INF, 1.0]), torch.ones(2)) == INF


def test_zero_is_right_for_what_fp32_cannot_hold_and_noise_is_not() -> None:
    ref = torch.full((4,), 1e-43, dtype=torch.float64)
    assert error(torch.zeros(4), ref) < 1e-4
    assert error(torch.full((4,), 1e-9), ref) > 1
    assert error(torch.zeros(4), torch.zeros(4)) == 0


def test_error_refuses_broadcasting() -> None:
    with pytest.raises(ValueError, match=r"shapes differ: \(2, 1\) against \(2, 2\)"):
        error(torch.ones(2, 1), torch.ones(2, 2))


def running_sum(
    q: Tensor, v: Tensor, unused: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    total = v.cumsum(1) + (0 if initial_state is None else initial_state)
    return q * total, total[:, -1] if output_final_state else None


def test_results_name_every_output_and_gradient() -> None:
    q, v, unused, state = torch.rand(1, 3, 2), torch.rand(1, 3, 2), torch.rand(2), torch.rand(1, 1, 2)
    found = results(running_sum, {"q": q, "v": v, "unused": unused}, torch.ones(1, 3, 2), initial_state=state, state_grad=torch.ones(1, 2))
    assert list(found) == ["o", "state", "dq", "dv", "dunused", "dinitial_state"]
    torch.testing.assert_close(found["dq"], v.cumsum(1) + state)
    torch.testing.assert_close(found["dv"], q.flip(1).cumsum(1).flip(1) + 1)
    torch.testing.assert_close(found["dinitial_state"], q.sum(1, keepdim=True) + 1)
    assert not found["dunused"].any()


def test_results_without_a_state() -> None:
    q = torch.rand(1, 3, 2)
    assert list(results(running_sum, {"q": q, "v": q, "unused": q}, torch.ones(1, 3, 2))) == ["o", "dq", "dv", "dunused"]
