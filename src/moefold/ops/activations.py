"""GLU activations: act(gate) * up.

``swiglu`` saves only its two inputs for backward; autograd would save silu(gate) as well. ``swiglu_reference`` is the
plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# gpt-oss: inputs are clamped, and x * sigmoid(1.702 x) approximates GELU.
LIMIT = 7.0
STEEPNESS = 1.702


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _Swiglu.apply(gate, up)
    return out


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
    """gpt-oss: the gate is clamped from above only, and up is offset by 1."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (STEEPNESS * gate).sigmoid() * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


def weighted_activation(gate_up_XG: Tensor, weight_X: Tensor | None, activation: str = "swiglu") -> Tensor:
    """act(gate, up) of every row, times the row's weight if there is one, in the dtype of the rows."""
    out_XF = ACTIVATIONS[activation](*gate_up_XG.chunk(2, dim=-1))
    return out_XF if weight_X is None else (out_XF * weight_X[:, None]).to(out_XF.dtype)
