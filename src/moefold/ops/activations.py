"""GLU activations: act(gate) * up, as autograd functions and, for one expert's rows, into preallocated buffers.

Every autograd function here saves its inputs for backward and nothing else; autograd would save silu(gate) and, where
rows have weights, the activation before its weight: as much again as the hidden rows that the next matmul saves.
Backward computes the activation once more, elementwise and so with the same bits. ``swiglu_reference`` is the plain
form. ``weighted_activation`` multiplies by a weight per row in the same pass.

A ``GLU`` works on one expert's rows of 2F entries, the gates and then the ups. Its backward needs the activation for
the weight gradient of the down projection. Recomputing it from the output of the first GEMM is cheaper than saving it,
while the rows are in the cache. ``SwiGLU`` is written by hand; other activations use autograd, and ``AutogradGLU`` is
the reference of ``SwiGLU`` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

# gpt-oss: inputs are clamped, and x * sigmoid(1.702 x) approximates GELU.
LIMIT = 7.0
STEEPNESS = 1.702


class _SavesTensors(Protocol):
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _Swiglu.apply(gate, up)
    return out


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SavesTensors, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: _SavesTensors, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: the gate is clamped from above only, and up is offset by 1."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (STEEPNESS * gate).sigmoid() * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


def weighted_activation(gate_up_XG: Tensor, weight_X: Tensor | None, activation: str = "swiglu") -> Tensor:
    """act(gate, up) of every row, times the row's weight if there is one, in the dtype of the rows."""
    out_XF: Tensor
    if activation != "swiglu":
        out_XF = _RecomputedActivation.apply(gate_up_XG, weight_X, activation)
        return out_XF
    if weight_X is None:
        return swiglu(*gate_up_XG.chunk(2, dim=-1))
    out_XF = _WeightedSwiglu.apply(gate_up_XG, weight_X)
    return out_XF


def weighted_activation_reference(gate_up_XG: Tensor, weight_X: Tensor | None, activation: str = "swiglu") -> Tensor:
    """Multiplied in the wider of the two dtypes: the weight's gradient is a sum over a whole row."""
    gate_XF, up_XF = gate_up_XG.chunk(2, dim=-1)
    out_XF = swiglu_reference(gate_XF, up_XF) if activation == "swiglu" else ACTIVATIONS[activation](gate_XF, up_XF)
    return out_XF if weight_X is None else (out_XF * weight_X[:, None]).to(out_XF.dtype)


class _WeightedSwiglu(torch.autograd.Function):
    """Products are written in the dtype of the rows where they are computed, and both halves of the gradient into one
    tensor, so that nothing is cast or joined."""

    @staticmethod
    def forward(ctx: _SavesTensors, gate_up_XG: Tensor, weight_X: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_XG, weight_X)
        gate_XF, up_XF = gate_up_XG.chunk(2, dim=-1)
        act_XF = F.silu(gate_XF).mul_(up_XF)
        return torch.mul(act_XF, weight_X[:, None], out=act_XF)

    @staticmethod
    def backward(ctx: _SavesTensors, grad_XF: Tensor) -> tuple[Tensor, Tensor]:
        gate_up_XG, weight_X = ctx.saved_tensors
        gate_XF, up_XF = gate_up_XG.chunk(2, dim=-1)
        dgate_up_XG = torch.empty_like(gate_up_XG, memory_format=torch.contiguous_format)
        dgate_XF, dup_XF = dgate_up_XG.chunk(2, dim=-1)
        silu_XF = F.silu(gate_XF)
        wide_XF = grad_XF.to(torch.promote_types(grad_XF.dtype, weight_X.dtype))
        dweight_X = (wide_XF * (silu_XF * up_XF)).sum(-1)
        dact_XF = torch.mul(wide_XF, weight_X[:, None], out=torch.empty_like(silu_XF))
        torch.mul(silu_XF, dact_XF, out=dup_XF)
        torch.ops.aten.silu_backward.grad_input(dact_XF.mul_(up_XF), gate_XF, grad_input=dgate_XF)
        return dgate_up_XG, dweight_X


class _NamesActivation(_SavesTensors, Protocol):
    activation: str


class _RecomputedActivation(torch.autograd.Function):
    """Any other activation: autograd's own backward of the plain form, recomputed from its inputs."""

    @staticmethod
    def forward(ctx: _NamesActivation, gate_up_XG: Tensor, weight_X: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up_XG, *(() if weight_X is None else (weight_X,)))
        ctx.activation = activation
        return weighted_activation_reference(gate_up_XG, weight_X, activation)

    @staticmethod
    def backward(ctx: _NamesActivation, grad_XF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        gate_up_XG, weight_X = leaves if len(leaves) == 2 else (leaves[0], None)
        with torch.enable_grad():
            out_XF = weighted_activation_reference(gate_up_XG, weight_X, ctx.activation)
        dgate_up_XG, *dweight_X = torch.autograd.grad(out_XF, leaves, grad_XF)
        return dgate_up_XG, dweight_X[0] if dweight_X else None, None


class GLU(Protocol):
    def forward(self, gate_up_XG: Tensor, act_XF: Tensor) -> None:
        """Write the activation."""
        ...

    def backward(
        self, gate_up_XG: Tensor, dact_XF: Tensor, weight_X: Tensor, dgate_up_XG: Tensor, act_XF: Tensor
    ) -> Tensor:
        """From the gradient of the unweighted activation, which may be overwritten: write the gradient of its input and
        the activation, both times the rows' weights; return the gradients of the weights, in float32 or float64."""
        ...


class SwiGLU:
    def forward(self, gate_up_XG: Tensor, act_XF: Tensor) -> None:
        gate_XF, up_XF = gate_up_XG.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate_XF, out=act_XF)
        act_XF.mul_(up_XF)

    def backward(
        self, gate_up_XG: Tensor, dact_XF: Tensor, weight_X: Tensor, dgate_up_XG: Tensor, act_XF: Tensor
    ) -> Tensor:
        gate_XF, up_XF = gate_up_XG.chunk(2, dim=-1)
        dgate_XF, dup_XF = dgate_up_XG.chunk(2, dim=-1)
        weight_X1 = weight_X[:, None].to(act_XF.dtype)
        silu_XF = torch.ops.aten.silu(gate_XF)
        torch.mul(silu_XF, up_XF, out=act_XF)
        dweight_X = _row_sums(dgate_XF, dact_XF, act_XF)
        act_XF.mul_(weight_X1)
        dact_XF.mul_(weight_X1)
        torch.mul(dact_XF, silu_XF, out=dup_XF)
        dact_XF.mul_(up_XF)
        torch.ops.aten.silu_backward.grad_input(dact_XF, gate_XF, grad_input=dgate_XF)
        return dweight_X


class AutogradGLU:
    def __init__(self, activation: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.activation = activation

    def forward(self, gate_up_XG: Tensor, act_XF: Tensor) -> None:
        act_XF.copy_(self.activation(*gate_up_XG.chunk(2, dim=-1)))

    def backward(
        self, gate_up_XG: Tensor, dact_XF: Tensor, weight_X: Tensor, dgate_up_XG: Tensor, act_XF: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            gate_up_leaf_XG = gate_up_XG.detach().requires_grad_()
            out_XF = self.activation(*gate_up_leaf_XG.chunk(2, dim=-1))
        weight_X1 = weight_X[:, None].to(act_XF.dtype)
        (dleaf_XG,) = torch.autograd.grad(out_XF, gate_up_leaf_XG, dact_XF * weight_X1)
        dweight_X = _row_sums(act_XF, dact_XF, out_XF.detach())
        dgate_up_XG.copy_(dleaf_XG)
        torch.mul(out_XF.detach(), weight_X1, out=act_XF)
        return dweight_X


def _row_sums(scratch_XF: Tensor, a_XF: Tensor, b_XF: Tensor) -> Tensor:
    """Each row's dot product, summed in float32 or float64; ``scratch_XF`` is overwritten."""
    acc_dtype = torch.float64 if a_XF.dtype == torch.float64 else torch.float32
    return torch.mul(a_XF, b_XF, out=scratch_XF).sum(-1, dtype=acc_dtype)


def glu_named(activation: str) -> GLU:
    return SwiGLU() if activation == "swiglu" else AutogradGLU(ACTIVATIONS[activation])
