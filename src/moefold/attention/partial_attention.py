"""Partial attention: over some of the keys now and the others when they arrive, merged to the same output.

A part's softmax is over its own keys only. Its log-sum-exp says how much weight those keys would have among more, so
two parts merge into what one softmax over both would have given:

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 * exp(lse_1 - lse) + out_2 * exp(lse_2 - lse)

A sink is one more part that has a weight and no value. Backward needs no merging: given the *whole* output and its
log-sum-exp, the gradients of the parts only add up.

``FUSED`` runs on torch's CPU kernel and ``EFFICIENT`` on its memory-efficient kernel for GPUs, which never write the
scores down; ``PLAIN`` is their reference, on any device.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.ops.fp32_linear import upcast

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_efficient_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
# Of the memory-efficient kernel: rows of a head are loaded in so many bytes, and the log-sum-exp of queries is padded
# to a multiple of so many.
_ROW_BYTES, _LSE_MULTIPLE = 16, 32


class AttendPart(Protocol):
    def __call__(
        self, q_BHnC: Tensor, k_BJmC: Tensor, v_BJmU: Tensor, *, scale: float, causal: bool, mask_nm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, n, U] and log-sum-exp [B, H, n], -inf where a query sees none of these keys."""
        ...


class PartGradients(Protocol):
    def __call__(
        self,
        grad_BHnU: Tensor,
        q_BHnC: Tensor,
        k_BJmC: Tensor,
        v_BJmU: Tensor,
        out_BHnU: Tensor,
        lse_BHn: Tensor,
        *,
        scale: float,
        causal: bool,
        mask_nm: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What this part adds to the gradients of q, k and v; ``out`` and ``lse`` are those of all parts together."""
        ...


class Parts(NamedTuple):
    """One way to compute parts: forward and backward."""

    attend: AttendPart
    gradients: PartGradients


def parts_for(device: torch.device) -> Parts:
    return FUSED if device.type == "cpu" else EFFICIENT


# ---- what is saved for backward ----


def compact(x: Tensor) -> Tensor:
    """A copy of what is a small part of its storage: saved for backward, it would keep all of it.

    The values of latent attention are such a view; the other part of their storage is copied into the keys.
    """
    whole = x.untyped_storage().nbytes() <= x.numel() * x.element_size()
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def narrowed(out_BHnU: Tensor) -> Tensor:
    """A slice of a padded output in memory of its own, row by row with all heads of a row together."""
    whole = out_BHnU.untyped_storage().nbytes() <= out_BHnU.numel() * out_BHnU.element_size()
    return out_BHnU if whole else out_BHnU.transpose(1, 2).contiguous().transpose(1, 2)


# ---- putting parts together ----


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Make one part (``out``, ``lse``) of two, in place; ``lse`` has the shape of ``out`` without its last dimension.

    A part may be empty, or blind in some rows (-inf).
    """
    total = torch.logaddexp(lse, more_lse)
    finite = _no_infinity(total)
    out.mul_(lse.sub_(finite).exp_().unsqueeze(-1))
    out.add_(more * (more_lse - finite).exp_().unsqueeze(-1))
    lse.copy_(total)


def merge_sinks_(out_nHU: Tensor, lse_nH: Tensor, sinks_H: Tensor) -> None:
    """One more logit per head that takes its share of the weight, in place."""
    total = torch.logaddexp(lse_nH, sinks_H.to(lse_nH.dtype))
    out_nHU.mul_(lse_nH.sub_(total).exp_().unsqueeze(-1))
    lse_nH.copy_(total)


def sink_gradients(grad_nHU: Tensor, out_nHU: Tensor, lse_nH: Tensor, sinks_H: Tensor) -> Tensor:
    """[H]: a sink draws weight away from all that the queries see, in proportion to its own."""
    weight_nH = (sinks_H.to(lse_nH.dtype) - lse_nH).exp()
    gradients_H = torch.empty_like(sinks_H)
    # One head at a time: the float32 product of all heads would be the largest tensor of the backward.
    for head in range(sinks_H.shape[0]):
        seen_n = (upcast(grad_nHU[:, head]) * upcast(out_nHU[:, head])).sum(-1)
        gradients_H[head] = -(weight_nH[:, head] * seen_n).sum()
    return gradients_H


# ---- the plain way ----


def attend_part_plain(
    q_BHnC: Tensor, k_BJmC: Tensor, v_BJmU: Tensor, *, scale: float, causal: bool, mask_nm: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads = q_BHnC.shape[1]
    scores = _scores(q_BHnC, _per_query_head(k_BJmC, heads), scale, causal, mask_nm)
    lse = scores.logsumexp(-1)
    share = (scores - _no_infinity(lse).unsqueeze(-1)).exp()
    return (share @ upcast(_per_query_head(v_BJmU, heads))).to(v_BJmU.dtype), lse


def part_gradients_plain(
    grad_BHnU: Tensor,
    q_BHnC: Tensor,
    k_BJmC: Tensor,
    v_BJmU: Tensor,
    out_BHnU: Tensor,
    lse_BHn: Tensor,
    *,
    scale: float,
    causal: bool,
    mask_nm: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = q_BHnC.shape[1], k_BJmC.shape[1]
    k, v = _per_query_head(k_BJmC, heads), upcast(_per_query_head(v_BJmU, heads))
    grad, out = upcast(grad_BHnU), upcast(out_BHnU)
    scores = _scores(q_BHnC, k, scale, causal, mask_nm)
    share = (scores - _no_infinity(lse_BHn).unsqueeze(-1)).exp()
    grad_share = grad @ v.transpose(-1, -2)
    grad_scores = share * (grad_share - (grad * out).sum(-1, keepdim=True)) * scale
    dq = grad_scores @ upcast(k)
    dk = grad_scores.transpose(-1, -2) @ upcast(q_BHnC)
    dv = share.transpose(-1, -2) @ grad
    return dq, _per_kv_head(dk, kv_heads), _per_kv_head(dv, kv_heads)


# ---- the CPU's fused way ----


def attend_part_fused(
    q_BHnC: Tensor, k_BJmC: Tensor, v_BJmU: Tensor, *, scale: float, causal: bool, mask_nm: Tensor | None
) -> tuple[Tensor, Tensor]:
    value_dim, dim = v_BJmU.shape[-1], max(q_BHnC.shape[-1], v_BJmU.shape[-1])
    if _nothing(q_BHnC, k_BJmC):
        out = q_BHnC.new_zeros(*q_BHnC.shape[:-1], value_dim)
        return out, upcast(out.new_full(q_BHnC.shape[:-1], -torch.inf))
    q, k, v = (_padded(x, dim) for x in (q_BHnC, k_BJmC, v_BJmU))
    out, lse = _flash_forward(q, k, v, 0.0, causal, attn_mask=_additive(mask_nm, q), scale=scale)
    if mask_nm is not None:
        # The kernel calls the log-sum-exp of a query that sees nothing 0, which would be the weight of a whole key.
        lse = lse.masked_fill(~mask_nm.any(-1), -torch.inf)
    return out[..., :value_dim], lse


def part_gradients_fused(
    grad_BHnU: Tensor,
    q_BHnC: Tensor,
    k_BJmC: Tensor,
    v_BJmU: Tensor,
    out_BHnU: Tensor,
    lse_BHn: Tensor,
    *,
    scale: float,
    causal: bool,
    mask_nm: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    value_dim, dim = v_BJmU.shape[-1], max(q_BHnC.shape[-1], v_BJmU.shape[-1])
    if _nothing(q_BHnC, k_BJmC):
        return torch.zeros_like(q_BHnC), torch.zeros_like(k_BJmC), torch.zeros_like(v_BJmU)
    grad, q, k, v, out = (_padded(x, dim) for x in (grad_BHnU, q_BHnC, k_BJmC, v_BJmU, out_BHnU))
    # A query that sees nothing anywhere: with an infinite log-sum-exp all its shares are exp(-inf) = 0.
    lse = lse_BHn.masked_fill(lse_BHn == -torch.inf, torch.inf)
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=_additive(mask_nm, q), scale=scale)
    return dq[..., : q_BHnC.shape[-1]], dk[..., : k_BJmC.shape[-1]], dv[..., :value_dim]


# ---- the GPUs' memory-efficient way ----


def attend_part_efficient(
    q_BHnC: Tensor, k_BJmC: Tensor, v_BJmU: Tensor, *, scale: float, causal: bool, mask_nm: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Without a mask; values may be narrower than keys."""
    if not _is_efficient(q_BHnC, k_BJmC, v_BJmU, mask_nm):
        return attend_part_plain(q_BHnC, k_BJmC, v_BJmU, scale=scale, causal=causal, mask_nm=mask_nm)
    heads, num = q_BHnC.shape[1:3]
    k, v = _per_query_head(k_BJmC, heads), _per_query_head(v_BJmU, heads)
    out, lse, _, _ = _efficient_forward(q_BHnC, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., :num]


def part_gradients_efficient(
    grad_BHnU: Tensor,
    q_BHnC: Tensor,
    k_BJmC: Tensor,
    v_BJmU: Tensor,
    out_BHnU: Tensor,
    lse_BHn: Tensor,
    *,
    scale: float,
    causal: bool,
    mask_nm: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_efficient(q_BHnC, k_BJmC, v_BJmU, mask_nm):
        return part_gradients_plain(
            grad_BHnU, q_BHnC, k_BJmC, v_BJmU, out_BHnU, lse_BHn, scale=scale, causal=causal, mask_nm=mask_nm
        )
    heads, kv_heads = q_BHnC.shape[1], k_BJmC.shape[1]
    k, v = _per_query_head(k_BJmC, heads), _per_query_head(v_BJmU, heads)
    # Shares of padded queries, and of those that see nothing anywhere, are exp(-inf) = 0.
    seen = lse_BHn.masked_fill(lse_BHn == -torch.inf, torch.inf)
    lse = F.pad(seen, (0, -seen.shape[-1] % _LSE_MULTIPLE), value=torch.inf).contiguous()
    # Of dropout, which there is none of.
    seed = torch.zeros((), dtype=torch.int64, device=q_BHnC.device)
    dq, dk, dv, _ = _efficient_backward(
        grad_BHnU, q_BHnC, k, v, None, out_BHnU, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, _per_kv_head(dk, kv_heads), _per_kv_head(dv, kv_heads)


def _is_efficient(q: Tensor, k: Tensor, v: Tensor, mask_nm: Tensor | None) -> bool:
    if mask_nm is not None or _nothing(q, k) or q.dtype == torch.float64:
        return False
    return all(x.shape[-1] * x.element_size() % _ROW_BYTES == 0 and x.stride(-1) == 1 for x in (q, k, v))


PLAIN = Parts(attend_part_plain, part_gradients_plain)
FUSED = Parts(attend_part_fused, part_gradients_fused)
EFFICIENT = Parts(attend_part_efficient, part_gradients_efficient)


def _scores(q_BHnC: Tensor, k_BHmC: Tensor, scale: float, causal: bool, mask_nm: Tensor | None) -> Tensor:
    scores = upcast(q_BHnC @ k_BHmC.transpose(-1, -2)) * scale
    if causal:
        mask_nm = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask_nm is None else scores.masked_fill(~mask_nm, -torch.inf)


def _per_query_head(x_BJmC: Tensor, heads: int) -> Tensor:
    if x_BJmC.shape[1] == heads:
        return x_BJmC
    return x_BJmC.repeat_interleave(heads // x_BJmC.shape[1], dim=1)


def _per_kv_head(x_BHmC: Tensor, kv_heads: int) -> Tensor:
    return x_BHmC.unflatten(1, (kv_heads, -1)).sum(2)


def _no_infinity(lse: Tensor) -> Tensor:
    """-inf less -inf would be no number; any finite one in its place makes every share exp(-inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _nothing(q: Tensor, k: Tensor) -> bool:
    """The kernel divides by these sizes."""
    return q.numel() == 0 or k.numel() == 0


def _padded(x: Tensor, dim: int) -> Tensor:
    """The kernel needs one head dim for queries, keys and values; zeros change nothing."""
    return x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1]))


def _additive(mask_nm: Tensor | None, q: Tensor) -> Tensor | None:
    if mask_nm is None:
        return None
    return torch.zeros(mask_nm.shape, dtype=q.dtype, device=q.device).masked_fill(~mask_nm, -torch.inf)
