"""A gated activation and its derivative on one expert's rows, written into buffers that are already there.

r rows, F hidden width, G = 2F: the gate's half, then the other.

The backward needs the activation again, for the weight gradient of the product that follows it. Computing it from what
the first product left is cheaper than keeping it, and both happen while the rows are in the cache. ``SwigluGate`` is
written out by hand; any other activation is differentiated by autograd, and is the twin of the first as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moefold.ops.activations import ACTIVATIONS


class Gate(Protocol):
    def forward(self, gate_up_rG: Tensor, act_rF: Tensor) -> None:
        """Write the activation."""
        ...

    def backward(
        self, gate_up_rG: Tensor, dact_rF: Tensor, weight_r: Tensor, dgate_up_rG: Tensor, act_rF: Tensor
    ) -> Tensor:
        """From the gradient of the unweighed activation, which may be overwritten: write the gradient of its input and
        the activation, both times the rows' weights; return the weights' own gradients, float32 or wider."""
        ...


class SwigluGate:
    def forward(self, gate_up_rG: Tensor, act_rF: Tensor) -> None:
        gate_rF, up_rF = gate_up_rG.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate_rF, out=act_rF)
        act_rF.mul_(up_rF)

    def backward(
        self, gate_up_rG: Tensor, dact_rF: Tensor, weight_r: Tensor, dgate_up_rG: Tensor, act_rF: Tensor
    ) -> Tensor:
        gate_rF, up_rF = gate_up_rG.chunk(2, dim=-1)
        dgate_rF, dup_rF = dgate_up_rG.chunk(2, dim=-1)
        weight_r1 = weight_r[:, None].to(act_rF.dtype)
        silu_rF = torch.ops.aten.silu(gate_rF)
        torch.mul(silu_rF, up_rF, out=act_rF)
        dweight_r = _row_sums(dgate_rF, dact_rF, act_rF)
        act_rF.mul_(weight_r1)
        dact_rF.mul_(weight_r1)
        torch.mul(dact_rF, silu_rF, out=dup_rF)
        dact_rF.mul_(up_rF)
        torch.ops.aten.silu_backward.grad_input(dact_rF, gate_rF, grad_input=dgate_rF)
        return dweight_r


class AutogradGate:
    def __init__(self, activation: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.activation = activation

    def forward(self, gate_up_rG: Tensor, act_rF: Tensor) -> None:
        act_rF.copy_(self.activation(*gate_up_rG.chunk(2, dim=-1)))

    def backward(
        self, gate_up_rG: Tensor, dact_rF: Tensor, weight_r: Tensor, dgate_up_rG: Tensor, act_rF: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            given_rG = gate_up_rG.detach().requires_grad_()
            made_rF = self.activation(*given_rG.chunk(2, dim=-1))
        weight_r1 = weight_r[:, None].to(act_rF.dtype)
        (dgiven_rG,) = torch.autograd.grad(made_rF, given_rG, dact_rF * weight_r1)
        dweight_r = _row_sums(act_rF, dact_rF, made_rF.detach())
        dgate_up_rG.copy_(dgiven_rG)
        torch.mul(made_rF.detach(), weight_r1, out=act_rF)
        return dweight_r


def _row_sums(scratch_rF: Tensor, a_rF: Tensor, b_rF: Tensor) -> Tensor:
    """Each row's scalar product, summed in float32 at least; ``scratch`` is overwritten."""
    wide = torch.float64 if a_rF.dtype == torch.float64 else torch.float32
    return torch.mul(a_rF, b_rF, out=scratch_rF).sum(-1, dtype=wide)


def gate_named(activation: str) -> Gate:
    return SwigluGate() if activation == "swiglu" else AutogradGate(ACTIVATIONS[activation])
