"""RMSNorm, of full rows and of rows that are sharded over ranks.

The division is in float32 (float64 stays float64), and the weight multiplies after the cast back: the order in which
the published models were trained.

Saved for backward are the input and one number per row, r = 1 / rms. With p = dy * x (elementwise) and weight w, dw is
the sum over rows of r p, and

    dx = r w dy - x r^3 (p . w) / D.

Two numbers per row need the full row, the sum of squares and p . w: for sharded rows, ranks all-reduce only these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.ops.fp32_linear import upcast

# All-reduces a number per row over the ranks that hold the rest of the row; backward all-reduces too.
SumHeads = Callable[[Tensor], Tensor]


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, then multiply by the weight."""
    return rms_norm_spread(x_XD, weight_D, eps, x_XD.shape[-1], _identity)


def rms_norm_spread(x_XY: Tensor, weight_Y: Tensor, eps: float, full_dim: int, sum_heads: SumHeads) -> Tensor:
    """The same when this rank holds a shard of each row; ``sum_heads`` all-reduces over the shards."""
    out_XY: Tensor = _RMSNorm.apply(x_XY, weight_Y, eps, full_dim, sum_heads)
    return out_XY


def rms_norm_reference(
    x_XY: Tensor, weight_Y: Tensor, eps: float, full_dim: int, sum_heads: SumHeads = lambda x: x
) -> Tensor:
    """The reference of both: as papers write it, with gradients by autograd."""
    wide_XY = upcast(x_XY)
    mean_X1 = sum_heads(wide_XY.square().sum(-1, keepdim=True)) / full_dim
    return weight_Y.to(x_XY.dtype) * (wide_XY * torch.rsqrt(mean_X1 + eps)).to(x_XY.dtype)


def _identity(x_X1: Tensor) -> Tensor:
    return x_X1


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_XY: Tensor, weight_Y: Tensor, eps: float, full_dim: int, sum_heads: SumHeads) -> Tensor:
        wide_XY = upcast(x_XY)
        rstd_X1 = (sum_heads(_squares(x_XY, wide_XY)) / full_dim).add_(eps).rsqrt_()
        ctx.save_for_backward(x_XY, weight_Y, rstd_X1)
        ctx.full_dim, ctx.sum_heads = full_dim, sum_heads
        return _times(wide_XY, rstd_X1, wide_XY is not x_XY).to(x_XY.dtype).mul_(weight_Y.to(x_XY.dtype))

    @staticmethod
    def backward(ctx: Any, grad_XY: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_XY, weight_Y, rstd_X1 = ctx.saved_tensors
        wide_XY, wide_grad_XY, wide_weight_Y = upcast(x_XY), upcast(grad_XY), upcast(weight_Y.to(x_XY.dtype))
        p_XY = wide_grad_XY * wide_XY
        dx_XY = dweight_Y = None
        if ctx.needs_input_grad[1]:
            dweight_Y = torch.mv(p_XY.flatten(0, -2).t(), rstd_X1.flatten()).to(weight_Y.dtype)
        if ctx.needs_input_grad[0]:
            scale_X1 = ctx.sum_heads((p_XY @ wide_weight_Y).unsqueeze(-1)) * rstd_X1.pow(3).div_(-ctx.full_dim)
            dx_XY = _times(wide_grad_XY, wide_weight_Y, wide_grad_XY is not grad_XY)
            dx_XY = dx_XY.mul_(rstd_X1).addcmul_(wide_XY, scale_X1).to(x_XY.dtype)
        return dx_XY, dweight_Y, None, None, None


def _squares(x: Tensor, wide: Tensor) -> Tensor:
    """Sum of squares per row. vector_norm needs one pass and loses half a digit, which 16-bit inputs do not have."""
    if wide is x:
        return wide.square().sum(-1, keepdim=True)
    return torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()


def _times(x: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    return x.mul_(factor) if in_place else x * factor
