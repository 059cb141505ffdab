"""The gated activations: half of the hidden width decides how much of the other half passes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

# gpt-oss: entries are bounded, and a steeper sigmoid stands in for the GELU.
LIMIT = 7.0
STEEPNESS = 1.702


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: a closed gate is not bounded from below; an idle ``up`` lets the gate through, hence the one more."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (STEEPNESS * gate).sigmoid() * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}
