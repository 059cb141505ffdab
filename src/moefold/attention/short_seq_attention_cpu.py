"""Attention within short documents on a CPU, in a narrow format: torch's fused forward, and a backward of our own.

B documents of n tokens, H query heads, G key/value heads, h = H/G query heads of a group, d entries per head; j keys
and i queries of one block, w the width with its extra columns.

torch's fused backward for bfloat16 prepares anew for every small piece, which for short documents costs more than the
work itself. Here a block of queries, of all heads and documents at once, meets the keys it can see in five batched
products. Two of them would lose digits: their results are rounded to the narrow format, and a score or its gradient is
a small difference of large numbers. So the difference is taken inside the product, where sums are wide. Queries get two
more columns that hold minus their log-sum-exp, in two parts, and keys two columns of ones:

    share = exp(scale * (q . k - lse / scale))        dscore = share * (dout . v - dout . out)

What is rounded is small then, where it matters. The heads of a group stand above each other as queries of one head, so
that the products add up what they send to the keys they share.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Longer documents are as fast with torch's own backward.
LONGEST = 2048
# Queries of a block: few, so that little of what no query may see is computed, but enough for a product.
_QUERIES = 128
# Products like rows of a multiple of so many entries.
_MULTIPLE = 32


def suits(q_BHnd: Tensor, k_BGnd: Tensor) -> bool:
    """Whether causal attention of these is computed faster here."""
    on_cpu = q_BHnd.device.type == "cpu" and q_BHnd.dtype == torch.bfloat16
    return on_cpu and q_BHnd.shape[2] == k_BGnd.shape[2] <= LONGEST


def attend_short(q_BHnd: Tensor, k_BGnd: Tensor, v_BGnd: Tensor, scale: float) -> Tensor:
    """Each query sees the keys up to its own place. The twin is torch's ``scaled_dot_product_attention``."""
    out_BHnd: Tensor = _AttendShort.apply(q_BHnd, k_BGnd, v_BGnd, scale)
    return out_BHnd


class _AttendShort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHnd: Tensor, k_BGnd: Tensor, v_BGnd: Tensor, scale: float) -> Tensor:
        out_BHnd, lse_BHn = _flash_forward(q_BHnd, k_BGnd, v_BGnd, 0.0, True, scale=scale)
        ctx.save_for_backward(q_BHnd, k_BGnd, v_BGnd, out_BHnd, lse_BHn)
        ctx.scale = scale
        return out_BHnd

    @staticmethod
    def backward(ctx: Any, grad_BHnd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BHnd, k_BGnd, v_BGnd, out_BHnd, lse_BHn = ctx.saved_tensors
        return *_gradients(grad_BHnd, q_BHnd, k_BGnd, v_BGnd, out_BHnd, lse_BHn, ctx.scale), None


def _gradients(
    grad_BHnd: Tensor, q_BHnd: Tensor, k_BGnd: Tensor, v_BGnd: Tensor, out_BHnd: Tensor, lse_BHn: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups, (num, dim) = k_BGnd.shape[1], q_BHnd.shape[2:]
    # A power of 2 can be taken into the queries without loss; any other scale costs one more pass over the scores.
    inside, after = (scale, 1.0) if math.frexp(scale)[0] == 0.5 else (1.0, scale)
    dot_BHn = grad_BHnd.float().mul_(out_BHnd).sum(-1)
    q_Xhnw = _with_columns(_by_group(q_BHnd * inside if inside != 1.0 else q_BHnd, groups), lse_BHn / -after)
    grad_Xhnw = _with_columns(_by_group(grad_BHnd, groups), dot_BHn.neg_())
    k_Xnw, v_Xnw = (_with_columns(_by_group(x, groups), None).flatten(1, 2) for x in (k_BGnd, v_BGnd))
    later = _later(min(num, _QUERIES), q_BHnd.dtype)
    dq_Xhnd = q_Xhnw.new_empty(*q_Xhnw.shape[:3], dim)
    dk_Xnw, dv_Xnw = (torch.zeros(k_Xnw.shape, dtype=torch.float32) for _ in range(2))
    for start in range(0, num, _QUERIES):
        stop = min(start + _QUERIES, num)
        q_Xiw, grad_Xiw = (x[:, :, start:stop].flatten(1, 2) for x in (q_Xhnw, grad_Xhnw))
        share_Xji = _shares(k_Xnw[:, :stop], q_Xiw, start, after, later)
        dscore_Xji = torch.bmm(v_Xnw[:, :stop], grad_Xiw.mT).mul_(share_Xji)
        dv_Xnw[:, :stop] += torch.bmm(share_Xji, grad_Xiw)
        dk_Xnw[:, :stop] += torch.bmm(dscore_Xji, q_Xiw)
        dq_Xiw = torch.bmm(dscore_Xji.mT, k_Xnw[:, :stop])
        dq_Xhnd[:, :, start:stop] = dq_Xiw.unflatten(1, (-1, stop - start))[..., :dim]
    dk, dv = (x[..., :dim].to(k_BGnd.dtype).view(k_BGnd.shape) for x in (dk_Xnw.mul_(after), dv_Xnw))
    return dq_Xhnd.mul_(scale).view(q_BHnd.shape), dk, dv


def _shares(k_Xjw: Tensor, q_Xiw: Tensor, start: int, scale: float, later: Tensor) -> Tensor:
    """[X, j, i]: how much of each key every query takes. The last keys stand where the queries do."""
    share_Xji = torch.bmm(k_Xjw, q_Xiw.mT)
    if scale != 1.0:
        share_Xji.mul_(scale)
    num_queries = k_Xjw.shape[1] - start
    by_head = share_Xji.unflatten(2, (-1, num_queries))
    by_head[:, start:] += later[:num_queries, :, :num_queries]
    return share_Xji.exp_()


def _later(num: int, dtype: torch.dtype) -> Tensor:
    """[keys, 1, queries]: minus infinity where the key comes later."""
    later = torch.ones(num, num, dtype=torch.bool).tril(-1)
    return torch.zeros(num, num, dtype=dtype).masked_fill(later, -torch.inf)[:, None]


def _by_group(x_BHnd: Tensor, groups: int) -> Tensor:
    return x_BHnd.unflatten(1, (groups, -1))


def _with_columns(x_BGhnd: Tensor, more_BHn: Tensor | None) -> Tensor:
    """[B * G, h, n, w]: with one more number per row, in two parts; with ones, which such numbers meet, if None."""
    batch, groups, heads, num, dim = x_BGhnd.shape
    out = x_BGhnd.new_empty(batch * groups, heads, num, -(-(dim + 2) // _MULTIPLE) * _MULTIPLE)
    out[..., dim + 2 :] = 0
    out[..., :dim].copy_(x_BGhnd.flatten(0, 1))
    if more_BHn is None:
        out[..., dim : dim + 2] = 1
        return out
    more = more_BHn.reshape(out.shape[:3])
    out[..., dim] = more
    out[..., dim + 1] = more - out[..., dim]
    return out
