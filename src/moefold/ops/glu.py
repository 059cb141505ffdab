"""A GLU activation, forward and backward, on one expert's rows, written into preallocated buffers.

A row has 2F entries: the gates, then the ups. Backward needs the activation for the weight gradient of the down
projection. Recomputing it from the output of the first GEMM is cheaper than saving it, while the rows are in the cache.
``SwiGLU`` is written by hand; other activations use autograd, and ``AutogradGLU`` is the reference of ``SwiGLU`` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moefold.ops.activations import ACTIVATIONS


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
