"""Varlen attention by torch's flex_attention, compiled on first use.

flex_attention takes a function that says whether a query sees a key, and a list of the key blocks that each block of
queries sees, in full or in part. Both follow from the spans of the mask; no dense mask is ever made.

Sinks are applied to the output through the log-sum-exp, whose gradient flex_attention computes. Where keys come in
parts, backward recomputes the part's output o and log-sum-exp l, and with the whole ones O and L uses

    O = ... + exp(l - L) o        do = exp(l - L) dO        dl = exp(l - L) dO . (o - O)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from moefold.attention.packed_mask import PackedMask, whole_documents
from moefold.attention.partial_attention import sink_gradients
from moefold.attention.sdpa import nothing_seen
from moefold.attention.varlen import VarlenAttention, VarlenGradients
from moefold.ops.compiled_cache import use_private_compiler_caches
from moefold.ops.fp32_linear import upcast

# Rows of a block; flex_attention's default.
BLOCK = 128


class FlexAttention(VarlenAttention):
    """``flex`` is flex_attention; compiled unless given."""

    name = "flex"
    one_call = True

    def __init__(self, flex: Callable[..., Any] | None = None) -> None:
        self.flex = flex or _compiled()

    def attend(
        self,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        lengths: tuple[int, ...],
        scale: float,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if q_SHC.numel() == 0:
            return nothing_seen(q_SHC, k_SJC, v_SJU, sinks_H)
        out_SHU, lse_SH = self._call(q_SHC, k_SJC, v_SJU, whole_documents(lengths, window), scale)
        return out_SHU if sinks_H is None else _with_sinks(out_SHU, lse_SH, sinks_H)[0]

    def forward(
        self,
        q_SHC: Tensor,
        k_XJC: Tensor,
        v_XJU: Tensor,
        mask: PackedMask,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if q_SHC.numel() == 0 or k_XJC.shape[0] == 0:
                out_SHU = q_SHC.new_zeros(*q_SHC.shape[:2], v_XJU.shape[-1])
                lse_SH = upcast(q_SHC.new_full(q_SHC.shape[:2], -torch.inf))
            else:
                out_SHU, lse_SH = self._call(q_SHC, k_XJC, v_XJU, mask, scale)
            return (out_SHU, lse_SH) if sinks_H is None else _with_sinks(out_SHU, lse_SH, sinks_H)

    def backward(
        self,
        dout_SHU: Tensor,
        q_SHC: Tensor,
        k_XJC: Tensor,
        v_XJU: Tensor,
        out_SHU: Tensor,
        lse_SH: Tensor,
        mask: PackedMask,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> VarlenGradients:
        dtype = grad_dtype or q_SHC.dtype
        dsinks_H = None if sinks_H is None else sink_gradients(dout_SHU, out_SHU, lse_SH, sinks_H)
        if q_SHC.numel() == 0 or k_XJC.shape[0] == 0:
            dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q_SHC, k_XJC, v_XJU))
            return VarlenGradients(dq, dk, dv, dsinks_H)
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q_SHC, k_XJC, v_XJU))
            part_SHU, part_lse_SH = self._call(q, k, v, mask, scale)
        share_SH = (part_lse_SH.detach() - lse_SH.masked_fill(lse_SH == -torch.inf, 0.0)).exp()
        dpart_SHU = upcast(dout_SHU) * share_SH.unsqueeze(-1)
        dlse_SH = (dpart_SHU * (upcast(part_SHU.detach()) - upcast(out_SHU))).sum(-1)
        dq, dk, dv = torch.autograd.grad(
            (part_SHU, part_lse_SH), (q, k, v), (dpart_SHU.to(part_SHU.dtype), dlse_SH.to(part_lse_SH.dtype))
        )
        return VarlenGradients(dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks_H)

    def _call(
        self, q_SHC: Tensor, k_XJC: Tensor, v_XJU: Tensor, mask: PackedMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_SHC, k_XJC, v_XJU))
        out, aux = self.flex(
            q,
            k,
            v,
            block_mask=_block_mask(mask, q.device, active_fake_mode()),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return out[0].transpose(0, 1), aux.lse[0].transpose(0, 1)


def _with_sinks(out_SHU: Tensor, lse_SH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    total_SH = torch.logaddexp(lse_SH, sinks_H.to(lse_SH.dtype))
    return (out_SHU * (lse_SH - total_SH).exp().unsqueeze(-1)).to(out_SHU.dtype), total_SH


@lru_cache(maxsize=32)
def _block_mask(mask: PackedMask, device: torch.device, mode: object) -> BlockMask:
    spans = mask.spans(device)
    last_row = mask.num_q - 1
    first_B = torch.arange(0, mask.num_q, BLOCK, device=device)
    last_B = (first_B + BLOCK - 1).clamp(max=last_row)
    key_start_B = torch.arange(0, mask.num_k, BLOCK, device=device)
    key_stop_B = (key_start_B + BLOCK).clamp(max=mask.num_k)
    # Some row of the block sees some of the keys; every row sees all of them.
    some = (key_stop_B > spans.begin_S[first_B][:, None]) & (key_start_B < spans.end_S[last_B][:, None])
    full = (key_start_B >= spans.begin_S[last_B][:, None]) & (key_stop_B <= spans.end_S[first_B][:, None])
    begin_S, end_S = spans.begin_S, spans.end_S

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= begin_S[query]) & (key < end_S[query])

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(mask.num_q, mask.num_k)
    )


def _listed(chosen_XY: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their numbers first, in order."""
    order = chosen_XY.int().argsort(dim=1, descending=True, stable=True)
    return chosen_XY.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    use_private_compiler_caches()
    return torch.compile(flex_attention)
