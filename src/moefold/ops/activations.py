"""The gated activations: half of the hidden width decides how much of the other half passes.

``swiglu`` keeps its two inputs for the backward and nothing else; autograd would keep the gate after its sigmoid as
well. ``swiglu_reference`` is the twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# gpt-oss: entries are bounded, and a steeper sigmoid stands in for the GELU.
LIMIT = 7.0
STEEPNESS = 1.702


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    made: Tensor = _Swiglu.apply(gate, up)
    return made


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: a closed gate is not bounded from below; an idle ``up`` lets the gate through, hence the one more."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (STEEPNESS * gate).sigmoid() * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


def weighted_activation(gate_up_RG: Tensor, weight_R: Tensor | None, activation: str = "swiglu") -> Tensor:
    """act(gate, up) of every row, times the row's weight if there is one, in the format of the rows."""
    out_RF = ACTIVATIONS[activation](*gate_up_RG.chunk(2, dim=-1))
    return out_RF if weight_R is None else (out_RF * weight_R[:, None]).to(out_RF.dtype)
