"""sample: inputs of a recurrence drawn by domain, everything an op makes of them, and the error against a reference.

Works from the literal table INPUTS of an emitted package, and imports torch only: an emitted package can be tested and
timed where the compiler is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# name, axes ("t" [B,T,H], "tk" [B,T,H,K], "tv" [B,T,H,V], "" [H], "k" [H,K], "v" [H,V]), kind of domain, low, high
InputRow = tuple[str, str, str, float, float]

# The regimes of a log decay, a token: from no forgetting at all to a past that is gone below the range of fp32.
GATES: Mapping[str, float] = {"0": 0.0, "-1e-3": -1e-3, "-0.5": -0.5, "-2.5": -2.5, "-5": -5.0, "-20": -20.0, "-100": -100.0}
MIXED = "mixed"
REGIMES = (*GATES, MIXED)

_JITTER = 0.05  # of a gate, relative: small enough that -100 stays below the normal range of fp32
_LEAN = 0.5  # length of the noise beside a unit vector that leans against the one before it

# The least rms that counts, by the dtype of the inputs: below it a result is 0 to a kernel. A log decay under -87 is a reset, though 1e-38
# is left; and fp16 has fewer digits under 6e-5, its least normal number, and no number under 6e-8.
FLOORS: Mapping[torch.dtype, float] = {torch.float16: torch.finfo(torch.float16).tiny} | dict.fromkeys(
    (torch.float64, torch.float32, torch.bfloat16), 1e-25
)


def draw(
    inputs: Sequence[InputRow],
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
) -> dict[str, Tensor]:
    """One tensor an input, in the order of the table, the same for the same seed and device.

    Keys and values come in `dtype`; gates, scalars and parameters of a head in fp32, or in fp64 where that is `dtype`.
    `gate` puts every log decay into one of REGIMES; None draws what a trained layer has, a retention of 0.8 to 1 a token.
    Unit keys lean against the unit key before them, so that a transition I + a b^T or I - beta k k^T made of neighbours
    contracts on average and a long recurrence stays bounded.
    """
    random = torch.Generator(device).manual_seed(seed)
    leading: dict[str, Tensor] = {}
    drawn: dict[str, Tensor] = {}
    for name, axes, kind, low, high in inputs:
        shape = _shape(axes, B, T, H, K, V)
        noise = torch.randn(shape, generator=random, device=device)
        match kind:
            case "real":
                value = noise
            case "unit_norm":
                value = F.normalize(noise, dim=-1)
                if axes in leading:
                    value = F.normalize(_LEAN * value - leading[axes], dim=-1)
                leading[axes] = value
            case "log_decay":
                value = F.logsigmoid(noise) / 16 if gate is None else _gate(gate, noise, 3 if axes.startswith("t") else 1, random)
            case "unit":
                value = torch.sigmoid(noise)
            case "interval":
                value = _inside(noise, low, high)
            case _:
                raise ValueError(f"input {name}: unknown kind of domain {kind!r}, expected real, unit_norm, log_decay, unit or interval")
        drawn[name] = value.clamp(low, high).to(dtype if is_operand(axes, kind) else torch.promote_types(dtype, torch.float32))
    return drawn


def is_operand(axes: str, kind: str) -> bool:
    """Whether an input is a key or a value of a token, which kernels multiply in the input dtype; all else stays in fp32."""
    return axes in ("tk", "tv") and kind != "log_decay"


def loose(inputs: Sequence[InputRow]) -> frozenset[str]:
    """The gradients that ten times the limit is for: a gate's is as small as what is left of the past, and a per-head parameter's is a sum
    over all tokens that cancels."""
    return frozenset(f"d{name}" for name, axes, kind, _, _ in inputs if kind == "log_decay" or "t" not in axes)


def has_gate(inputs: Sequence[InputRow]) -> bool:
    """Whether a gate regime changes anything that `draw` returns."""
    return any(kind == "log_decay" for _, _, kind, _, _ in inputs)


def results(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: Mapping[str, Tensor],
    output_grad: Tensor,
    *,
    initial_state: Tensor | None = None,
    state_grad: Tensor | None = None,
) -> dict[str, Tensor]:
    """All that an op makes of its inputs, by name: o, state, and d<input> of <o, output_grad> + <state, state_grad>.

    The final state is asked for, and returned, when `state_grad` is given. What the loss does not depend on has gradient 0.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    keywords: dict[str, object] = {}
    if initial_state is not None:
        leaves["initial_state"] = initial_state.detach().requires_grad_()
    if state_grad is not None:
        keywords["output_final_state"] = True
    o, state = op(**leaves, **keywords)
    outputs, upstream = {"o": o}, [output_grad.to(o.dtype)]
    if state_grad is not None:
        assert state is not None, "output_final_state=True returned no state"
        outputs["state"] = state
        upstream.append(state_grad.to(state.dtype))
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream, allow_unused=True)
    found = {name: value.detach() for name, value in outputs.items()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def error(x: Tensor, ref: Tensor, floor: float = FLOORS[torch.float32]) -> float:
    """rms(x - ref) / rms(ref), in fp64; inf when x is not finite where ref is.

    `floor` is the least rms of ref that counts.
    """
    if x.shape != ref.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)} against {tuple(ref.shape)} of the reference")
    if ref.numel() == 0:
        return 0.0
    exact = ref.double()
    ratio = (_rms(x.double() - exact) / _rms(exact).clamp_min(floor)).item()
    return ratio if math.isfinite(ratio) else math.inf


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _shape(axes: str, B: int, T: int, H: int, K: int, V: int) -> tuple[int, ...]:
    match axes:
        case "t" | "tk" | "tv" | "" | "k" | "v":
            extent = {"k": (K,), "v": (V,)}
            return ((B, T, H) if axes.startswith("t") else (H,)) + extent.get(axes.removeprefix("t"), ())
        case _:
            raise ValueError(f"unknown axes {axes!r}, expected one of 't' 'tk' 'tv' '' 'k' 'v'")


def _gate(regime: str, noise: Tensor, token_axes: int, random: torch.Generator) -> Tensor:
    """A log decay around one value, or around a value a token (a head, without a time axis) chosen among all of them."""
    if regime == MIXED:
        values = noise.new_tensor(tuple(GATES.values()))
        token = noise.shape[:token_axes]
        choice = torch.randint(len(values), token, generator=random, device=noise.device)
        centre = values[choice].reshape(*token, *(1,) * (noise.ndim - token_axes))
    elif regime in GATES:
        centre = noise.new_tensor(GATES[regime])
    else:
        raise ValueError(f"unknown gate regime {regime!r}, expected one of {', '.join(REGIMES)}")
    return centre * (1 + _JITTER * noise.clamp(-1, 1))


def _inside(noise: Tensor, low: float, high: float) -> Tensor:
    """Spread over an interval; half-open ones thin out away from their end."""
    if math.isfinite(low) and math.isfinite(high):
        return low + (high - low) * torch.sigmoid(noise)
    if math.isfinite(low):
        return low + noise.abs()
    if math.isfinite(high):
        return high - noise.abs()
    return noise
