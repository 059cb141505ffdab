"""RMSNorm, of full rows and of rows that are sharded over ranks.

The division is in float32 (float64 stays float64), and the weight multiplies after the cast back: the order in which
the published models were trained.

Saved for backward are the input and one number per row, r = 1 / rms. With p = dy * x (elementwise) and weight w, dw is
the sum over rows of r p, and

    dx = r w dy - x r^3 (p . w) / D.

Two numbers per row need the full row, the sum of squares and p . w: for sharded rows, ranks all-reduce only these.
Rows have any leading dims, tokens or tokens and heads; names without a suffix have these dims and one more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.ops.fp32_linear import upcast

# All-reduces a number per row over the ranks that hold the rest of the row; backward all-reduces too.
SumHeads = Callable[[Tensor], Tensor]


def rms_norm(x: Tensor, weight_Y: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, then multiply by the weight."""
    return rms_norm_spread(x, weight_Y, eps, x.shape[-1], _identity)


def rms_norm_spread(x: Tensor, weight_Y: Tensor, eps: float, full_dim: int, sum_heads: SumHeads) -> Tensor:
    """The same when this rank holds a shard of each row; ``sum_heads`` all-reduces over the shards."""
    out: Tensor = _RMSNorm.apply(x, weight_Y, eps, full_dim, sum_heads)
    return out


def rms_norm_reference(
    x: Tensor, weight_Y: Tensor, eps: float, full_dim: int, sum_heads: SumHeads = lambda x: x
) -> Tensor:
    """The reference of both: as papers write it, with gradients by autograd."""
    wide = upcast(x)
    mean = sum_heads(wide.square().sum(-1, keepdim=True)) / full_dim
    return weight_Y.to(x.dtype) * (wide * torch.rsqrt(mean + eps)).to(x.dtype)


def _identity(x: Tensor) -> Tensor:
    return x


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_Y: Tensor, eps: float, full_dim: int, sum_heads: SumHeads) -> Tensor:
        wide = upcast(x)
        rstd = (sum_heads(_squares(x, wide)) / full_dim).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_Y, rstd)
        ctx.full_dim, ctx.sum_heads = full_dim, sum_heads
        return _times(wide, rstd, wide is not x).to(x.dtype).mul_(weight_Y.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight_Y, rstd = ctx.saved_tensors
        wide, wide_grad, wide_weight_Y = upcast(x), upcast(grad), upcast(weight_Y.to(x.dtype))
        p = wide_grad * wide
        dx = dweight_Y = None
        if ctx.needs_input_grad[1]:
            # A sum over rows; autograd casts it to the dtype in which the weight collects its gradient.
            dweight_Y = torch.mv(p.flatten(0, -2).t(), rstd.flatten())
        if ctx.needs_input_grad[0]:
            scale = ctx.sum_heads((p @ wide_weight_Y).unsqueeze(-1)) * rstd.pow(3).div_(-ctx.full_dim)
            dx = _times(wide_grad, wide_weight_Y, wide_grad is not grad)
            dx = dx.mul_(rstd).addcmul_(wide, scale).to(x.dtype)
        return dx, dweight_Y, None, None, None


def _squares(x: Tensor, wide: Tensor) -> Tensor:
    """Sum of squares per row. vector_norm needs one pass and loses half a digit, which 16-bit inputs do not have."""
    if wide is x:
        return wide.square().sum(-1, keepdim=True)
    return torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()


def _times(x: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    return x.mul_(factor) if in_place else x * factor
