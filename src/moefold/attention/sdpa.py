"""Causal attention within packed documents: the plain way, and one that never materializes the scores.

Documents lie one after the other, each of its own length. Query head i attends to key/value head i // (H/J). A
window lets a token see that many positions back, itself included. A sink is a learned logit per head that takes part
in the softmax and has no value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.attention.mask_blocks import Sight, Stack, band, blocks, document_runs, stacks
from moefold.attention.partial_attention import FUSED, compact, narrowed
from moefold.attention.short_seq_attention_cpu import attend_short, suits
from moefold.ops.fp32_linear import upcast

Lengths = tuple[int, ...]


def attend(
    q_SHC: Tensor,
    k_SJC: Tensor,
    v_SJU: Tensor,
    lengths: Lengths,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Through torch's fused attention, in memory linear in S.

    Documents of equal length are one call. A window cuts long documents into pieces, each with the keys in its reach,
    and pieces of equal shape are again one call.
    """
    if q_SHC.numel() == 0:
        return nothing_seen(q_SHC, k_SJC, v_SJU, sinks_H)
    v_SJU = compact(v_SJU)
    plan = _within_documents(lengths, window)
    seen = [_one_call(q_SHC, k_SJC, v_SJU, stack, scale, window, sinks_H) for stack in plan]
    return _in_order(seen, plan)


def attend_reference(
    q_SHC: Tensor,
    k_SJC: Tensor,
    v_SJU: Tensor,
    lengths: Lengths,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Document by document: scores, mask, softmax, average. What ``attend`` must equal."""
    shared_by = q_SHC.shape[1] // k_SJC.shape[1]
    seen = []
    for q, k, v in zip(*(x.split(lengths) for x in (q_SHC, k_SJC, v_SJU)), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = k.repeat_interleave(shared_by, dim=0), v.repeat_interleave(shared_by, dim=0)
        length = q.shape[1]
        scores = upcast(q @ k.transpose(-1, -2)) * scale
        scores = scores.masked_fill(~band(length, length, 0, window, q.device), -torch.inf)
        if sinks_H is not None:
            sink = sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        share = scores.softmax(dim=-1)[..., :length]
        seen.append((share.to(v.dtype) @ v).transpose(0, 1))
    return torch.cat(seen) if seen else nothing_seen(q_SHC, k_SJC, v_SJU, sinks_H)


def nothing_seen(q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, sinks_H: Tensor | None) -> Tensor:
    """[S, H, U] of no entries, on which all inputs hang: their gradients are zeros, and none is missing."""
    inputs = [x for x in (q_SHC, k_SJC, v_SJU, sinks_H) if x is not None]
    zero = torch.stack([x.sum().to(q_SHC.dtype) for x in inputs]).sum()
    return zero.expand(*q_SHC.shape[:2], v_SJU.shape[-1])


@lru_cache(maxsize=256)
def _within_documents(lengths: Lengths, window: int | None) -> tuple[Stack, ...]:
    runs = document_runs(lengths)
    return stacks(blocks(runs, runs, window))


def _one_call(
    q_SHC: Tensor,
    k_SJC: Tensor,
    v_SJU: Tensor,
    stack: Stack,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """[B, n, H, U]: what the queries of equal blocks see. Here a query's keys are all in one block."""
    q, k, v = (rows.take(x).transpose(1, 2) for rows, x in ((stack.q, q_SHC), (stack.k, k_SJC), (stack.k, v_SJU)))
    mask = None
    if stack.sight is Sight.BAND or sinks_H is not None:
        mask = band(stack.q.num, stack.k.num, stack.offset, window, q.device)
    if sinks_H is not None and mask is not None:
        q, k, v, mask = _with_sink_key(q, k, v, mask, sinks_H / scale)
    causal = mask is None and stack.sight is Sight.CAUSAL
    if causal and suits(q, k):
        return attend_short(q, k, v, scale).transpose(1, 2)
    narrow, gqa = v.shape[-1] < q.shape[-1], q.shape[1] != k.shape[1]
    if narrow and sinks_H is None and q.device.type == "cpu":
        return _NarrowValues.apply(q, k, v, mask, causal, scale).transpose(1, 2)
    if not narrow or not (sinks_H is not None or gqa):
        # On GPUs torch's cuDNN and memory-efficient kernels take values of another head dim, without GQA.
        return _fused(q, k, v, mask, causal, scale).transpose(1, 2)
    # The others need one head dim for keys and values; zeros in the value change nothing.
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    return _fused(q, k, padded, mask, causal, scale)[..., : v.shape[-1]].transpose(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)


class _NarrowValuesContext(Protocol):
    causal: bool
    scale: float
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _NarrowValues(torch.autograd.Function):
    """On a CPU, where the kernel needs one head dim: values are padded inside, and saved as they were given."""

    @staticmethod
    def forward(
        ctx: _NarrowValuesContext,
        q_BHnC: Tensor,
        k_BJmC: Tensor,
        v_BJmU: Tensor,
        mask_nm: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        out, lse_BHn = FUSED.attend(q_BHnC, k_BJmC, v_BJmU, scale=scale, causal=causal, mask_nm=mask_nm)
        out_BHnU = narrowed(out)
        ctx.save_for_backward(q_BHnC, k_BJmC, v_BJmU, mask_nm, out_BHnU, lse_BHn)
        ctx.causal, ctx.scale = causal, scale
        return out_BHnU

    @staticmethod
    def backward(ctx: _NarrowValuesContext, grad_BHnU: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask_nm, out, lse = ctx.saved_tensors
        grads = FUSED.gradients(grad_BHnU, q, k, v, out, lse, scale=ctx.scale, causal=ctx.causal, mask_nm=mask_nm)
        return *grads, None, None, None


def _in_order(seen: list[Tensor], plan: tuple[Stack, ...]) -> Tensor:
    if len(plan) == 1:
        return seen[0].flatten(0, 1)
    pieces = [(start, piece) for stack, out in zip(plan, seen) for start, piece in zip(stack.q.starts, out.unbind(0))]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda placed: placed[0])])


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink_logit_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sink as one more key with no value: queries get an entry that is nonzero in this key only.

    Its logit is then an ordinary query-key product, so the fused kernel needs no support for sinks, and their
    gradient comes through the queries.
    """
    q_sink = sink_logit_H.to(q.dtype)[None, :, None, None].expand(*q.shape[:-1], 1)
    sink_key = F.pad(k.new_zeros(*k.shape[:2], 1, k.shape[-1]), (0, 1), value=1.0)
    q = torch.cat((q, q_sink), dim=-1)
    k = torch.cat((F.pad(k, (0, 1)), sink_key), dim=-2)
    return q, k, F.pad(v, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)
