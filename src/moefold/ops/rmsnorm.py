"""Root-mean-square normalisation, of a whole vector and of one that is spread over ranks.

T tokens or heads of tokens, D width, d this rank's part of the width; r one over the root mean square of a row, w the
weight.

The division happens in float32 (float64 stays float64), the weight multiplies after the cast back: the order in which
the published models were trained.

Kept for the backward are the input and one number per row. With p = dy * x, entry by entry, both gradients are products
with p: that of w is the sum over rows of r p, and that of a row

    dx = r w dy - x r^3 (p . w) / D.

Two numbers per row need the whole width, the sum of squares and p . w: where it is spread, ranks add up just these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.ops.fp32_linear import upcast

# Adds up what each rank has of a number per row; backward adds up too.
SumHeads = Callable[[Tensor], Tensor]


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, then weigh its entries."""
    return rms_norm_spread(x_TD, weight_D, eps, x_TD.shape[-1], _all_here)


def rms_norm_spread(x_Td: Tensor, weight_d: Tensor, eps: float, full_dim: int, sum_heads: SumHeads) -> Tensor:
    """The same when this rank holds only a part of each row; ``sum_heads`` adds what the other parts have."""
    out_Td: Tensor = _RMSNorm.apply(x_Td, weight_d, eps, full_dim, sum_heads)
    return out_Td


def rms_norm_reference(
    x_Td: Tensor, weight_d: Tensor, eps: float, full_dim: int, sum_heads: SumHeads = lambda x: x
) -> Tensor:
    """The twin of both: as papers write it, with gradients by autograd."""
    wide_Td = upcast(x_Td)
    mean_T1 = sum_heads(wide_Td.square().sum(-1, keepdim=True)) / full_dim
    return weight_d.to(x_Td.dtype) * (wide_Td * torch.rsqrt(mean_T1 + eps)).to(x_Td.dtype)


def _all_here(x_T1: Tensor) -> Tensor:
    return x_T1


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Td: Tensor, weight_d: Tensor, eps: float, full_dim: int, sum_heads: SumHeads) -> Tensor:
        wide_Td = upcast(x_Td)
        r_T1 = (sum_heads(_squares(x_Td, wide_Td)) / full_dim).add_(eps).rsqrt_()
        ctx.save_for_backward(x_Td, weight_d, r_T1)
        ctx.full_dim, ctx.sum_heads = full_dim, sum_heads
        return _times(wide_Td, r_T1, wide_Td is not x_Td).to(x_Td.dtype).mul_(weight_d.to(x_Td.dtype))

    @staticmethod
    def backward(ctx: Any, grad_Td: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_Td, weight_d, r_T1 = ctx.saved_tensors
        wide_Td, wide_grad_Td, wide_weight_d = upcast(x_Td), upcast(grad_Td), upcast(weight_d.to(x_Td.dtype))
        p_Td = wide_grad_Td * wide_Td
        dx_Td = dweight_d = None
        if ctx.needs_input_grad[1]:
            dweight_d = torch.mv(p_Td.flatten(0, -2).t(), r_T1.flatten()).to(weight_d.dtype)
        if ctx.needs_input_grad[0]:
            share_T1 = ctx.sum_heads((p_Td @ wide_weight_d).unsqueeze(-1)) * r_T1.pow(3).div_(-ctx.full_dim)
            dx_Td = _times(wide_grad_Td, wide_weight_d, wide_grad_Td is not grad_Td)
            dx_Td = dx_Td.mul_(r_T1).addcmul_(wide_Td, share_T1).to(x_Td.dtype)
        return dx_Td, dweight_d, None, None, None


def _squares(x: Tensor, wide: Tensor) -> Tensor:
    """The sum of every row's. A norm needs one pass and loses half a digit, which narrow inputs do not have."""
    if wide is x:
        return wide.square().sum(-1, keepdim=True)
    return torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()


def _times(x: Tensor, factor: Tensor, own: bool) -> Tensor:
    """In place where ``x`` is nobody else's."""
    return x.mul_(factor) if own else x * factor
