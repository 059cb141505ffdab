"""Attention within short documents on a CPU, in bfloat16: torch's fused forward, and a backward of our own.

X is documents times key/value heads. Y is queries of one block times query heads that share a key/value head.

torch's fused backward for bfloat16 has a fixed cost per small block, which for short documents exceeds the work itself.
Here a block of queries, of all heads and documents at once, and the keys it can see go through five batched matmuls.
Two of them would lose digits: their results are rounded to bfloat16, and a score or its gradient is a small difference
of large numbers. So the difference is taken inside the matmul, which accumulates in float32. Queries get two more
columns that hold minus their log-sum-exp, as a sum of two numbers, and keys two columns of ones:

    share = exp(scale * (q . k - lse / scale))        dscore = share * (dout . v - dout . out)

The rounded numbers are then small where it matters. The query heads of a group are stacked as queries of one head, so
that the matmuls sum their gradients for the keys they share.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moefold.attention.partial_attention import FUSED, narrowed

# Longer documents are as fast with torch's own backward.
LONGEST = 2048
# Queries of a block: few, so that few masked scores are computed, but enough for an efficient matmul.
_QUERIES = 128
# Matmuls are faster with rows of a multiple of so many entries.
_MULTIPLE = 32


def suits(q_BHnC: Tensor, k_BJmC: Tensor) -> bool:
    """Whether causal attention of these is computed faster here."""
    on_cpu = q_BHnC.device.type == "cpu" and q_BHnC.dtype == torch.bfloat16
    return on_cpu and q_BHnC.shape[2] == k_BJmC.shape[2] <= LONGEST


def attend_short(q_BHnC: Tensor, k_BJmC: Tensor, v_BJmU: Tensor, scale: float) -> Tensor:
    """Each query sees the keys up to its own place. The reference is torch's ``scaled_dot_product_attention``."""
    out_BHnU: Tensor = _AttendShort.apply(q_BHnC, k_BJmC, v_BJmU, scale)
    return out_BHnU


class _AttendShort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHnC: Tensor, k_BJmC: Tensor, v_BJmU: Tensor, scale: float) -> Tensor:
        """Values that are narrower than keys are padded for the kernel, and saved as they were given."""
        out, lse_BHn = FUSED.attend(q_BHnC, k_BJmC, v_BJmU, scale=scale, causal=True, mask_nm=None)
        out_BHnU = narrowed(out)
        ctx.save_for_backward(q_BHnC, k_BJmC, v_BJmU, out_BHnU, lse_BHn)
        ctx.scale = scale
        return out_BHnU

    @staticmethod
    def backward(ctx: Any, grad_BHnU: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BHnC, k_BJmC, v_BJmU, out_BHnU, lse_BHn = ctx.saved_tensors
        return *_gradients(grad_BHnU, q_BHnC, k_BJmC, v_BJmU, out_BHnU, lse_BHn, ctx.scale), None


def _gradients(
    grad_BHnU: Tensor, q_BHnC: Tensor, k_BJmC: Tensor, v_BJmU: Tensor, out_BHnU: Tensor, lse_BHn: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups, (num, dim) = k_BJmC.shape[1], q_BHnC.shape[2:]
    # A power of 2 can be taken into the queries without loss; any other scale costs one more pass over the scores.
    inside, after = (scale, 1.0) if math.frexp(scale)[0] == 0.5 else (1.0, scale)
    dot_BHn = grad_BHnU.float().mul_(out_BHnU).sum(-1)
    q_Xgnw = _with_columns(_by_group(q_BHnC * inside if inside != 1.0 else q_BHnC, groups), lse_BHn / -after)
    grad_Xgnw = _with_columns(_by_group(grad_BHnU, groups), dot_BHn.neg_())
    k_Xmw, v_Xmw = (_with_columns(_by_group(x, groups), None).flatten(1, 2) for x in (k_BJmC, v_BJmU))
    later = _later(min(num, _QUERIES), q_BHnC.dtype)
    dq_XgnC = q_Xgnw.new_empty(*q_Xgnw.shape[:3], dim)
    dk_Xmw, dv_Xmw = (torch.zeros(x.shape, dtype=torch.float32) for x in (k_Xmw, v_Xmw))
    for start in range(0, num, _QUERIES):
        stop = min(start + _QUERIES, num)
        q_XYw, grad_XYw = (x[:, :, start:stop].flatten(1, 2) for x in (q_Xgnw, grad_Xgnw))
        share_XmY = _shares(k_Xmw[:, :stop], q_XYw, start, after, later)
        dscore_XmY = torch.bmm(v_Xmw[:, :stop], grad_XYw.mT).mul_(share_XmY)
        dv_Xmw[:, :stop] += torch.bmm(share_XmY, grad_XYw)
        dk_Xmw[:, :stop] += torch.bmm(dscore_XmY, q_XYw)
        dq_XYw = torch.bmm(dscore_XmY.mT, k_Xmw[:, :stop])
        dq_XgnC[:, :, start:stop] = dq_XYw.unflatten(1, (-1, stop - start))[..., :dim]
    pairs = ((dk_Xmw.mul_(after), k_BJmC), (dv_Xmw, v_BJmU))
    dk, dv = (x[..., : like.shape[-1]].to(like.dtype).view(like.shape) for x, like in pairs)
    return dq_XgnC.mul_(scale).view(q_BHnC.shape), dk, dv


def _shares(k_Xmw: Tensor, q_XYw: Tensor, start: int, scale: float, later: Tensor) -> Tensor:
    """[X, m, Y]: how much of each key every query takes. The last keys stand where the queries do."""
    share_XmY = torch.bmm(k_Xmw, q_XYw.mT)
    if scale != 1.0:
        share_XmY.mul_(scale)
    num_queries = k_Xmw.shape[1] - start
    by_head = share_XmY.unflatten(2, (-1, num_queries))
    by_head[:, start:] += later[:num_queries, :, :num_queries]
    return share_XmY.exp_()


def _later(num: int, dtype: torch.dtype) -> Tensor:
    """[keys, 1, queries]: minus infinity where the key comes later."""
    later = torch.ones(num, num, dtype=torch.bool).tril(-1)
    return torch.zeros(num, num, dtype=dtype).masked_fill(later, -torch.inf)[:, None]


def _by_group(x_BHnC: Tensor, groups: int) -> Tensor:
    return x_BHnC.unflatten(1, (groups, -1))


def _with_columns(x_BJgnC: Tensor, more_BHn: Tensor | None) -> Tensor:
    """[X, g, n, w]: with one more number per row, in two parts; with ones, which such numbers meet, if None."""
    batch, groups, heads, num, dim = x_BJgnC.shape
    out = x_BJgnC.new_empty(batch * groups, heads, num, -(-(dim + 2) // _MULTIPLE) * _MULTIPLE)
    out[..., dim + 2 :] = 0
    out[..., :dim].copy_(x_BJgnC.flatten(0, 1))
    if more_BHn is None:
        out[..., dim : dim + 2] = 1
        return out
    more = more_BHn.reshape(out.shape[:3])
    out[..., dim] = more
    out[..., dim + 1] = more - out[..., dim]
    return out
