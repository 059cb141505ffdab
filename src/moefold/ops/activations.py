"""GLU activations: act(gate) * up.

``swiglu`` saves only its two inputs for backward; autograd would save silu(gate) as well. ``swiglu_reference`` is the
plain form. ``weighted_activation`` multiplies by a weight per row in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

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
    if activation == "swiglu" and weight_X is not None:
        weighted_XF: Tensor = _WeightedSwiglu.apply(gate_up_XG, weight_X)
        return weighted_XF
    out_XF = ACTIVATIONS[activation](*gate_up_XG.chunk(2, dim=-1))
    return out_XF if weight_X is None else (out_XF * weight_X[:, None]).to(out_XF.dtype)


def weighted_activation_reference(gate_up_XG: Tensor, weight_X: Tensor | None, activation: str = "swiglu") -> Tensor:
    """Multiplied in the wider of the two dtypes: the weight's gradient is a sum over a whole row."""
    gate_XF, up_XF = gate_up_XG.chunk(2, dim=-1)
    out_XF = swiglu_reference(gate_XF, up_XF) if activation == "swiglu" else ACTIVATIONS[activation](gate_XF, up_XF)
    return out_XF if weight_X is None else (out_XF * weight_X[:, None]).to(out_XF.dtype)


class _SavesTensors(Protocol):
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _WeightedSwiglu(torch.autograd.Function):
    """Saves what autograd would: gate and up, the activation and the weights. Products are written in the dtype of the
    rows where they are computed, and both halves of the gradient into one tensor, so that nothing is cast or joined."""

    @staticmethod
    def forward(ctx: _SavesTensors, gate_up_XG: Tensor, weight_X: Tensor) -> Tensor:
        gate_XF, up_XF = gate_up_XG.chunk(2, dim=-1)
        act_XF = F.silu(gate_XF).mul_(up_XF)
        ctx.save_for_backward(gate_XF, up_XF, act_XF, weight_X)
        return torch.mul(act_XF, weight_X[:, None], out=torch.empty_like(act_XF))

    @staticmethod
    def backward(ctx: _SavesTensors, grad_XF: Tensor) -> tuple[Tensor, Tensor]:
        gate_XF, up_XF, act_XF, weight_X = ctx.saved_tensors
        dgate_up_XG = gate_XF.new_empty(gate_XF.shape[0], 2 * gate_XF.shape[1])
        dgate_XF, dup_XF = dgate_up_XG.chunk(2, dim=-1)
        wide_XF = grad_XF.to(torch.promote_types(grad_XF.dtype, weight_X.dtype))
        dweight_X = (wide_XF * act_XF).sum(-1)
        dact_XF = torch.mul(wide_XF, weight_X[:, None], out=torch.empty_like(act_XF))
        torch.mul(F.silu(gate_XF), dact_XF, out=dup_XF)
        torch.ops.aten.silu_backward.grad_input(dact_XF.mul_(up_XF), gate_XF, grad_input=dgate_XF)
        return dgate_up_XG, dweight_X
