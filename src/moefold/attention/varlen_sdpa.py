"""Varlen attention by torch's fused kernels, one call per shape of block.

Whole documents go through ``scaled_dot_product_attention`` (``sdpa.py``). Where keys come in parts, as in ring
attention, ``partial_attention.py`` computes one block after the other and merges it into the sums.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moefold.attention import sdpa
from moefold.attention.mask_blocks import Sight, Stack, band
from moefold.attention.packed_mask import PackedMask
from moefold.attention.partial_attention import Parts, merge_, merge_sinks_, parts_for, sink_gradients
from moefold.attention.varlen import VarlenAttention, VarlenGradients
from moefold.ops.fp32_linear import upcast


class SdpaAttention(VarlenAttention):
    """``parts`` is the way to compute blocks; None is the device's own."""

    name = "sdpa"

    def __init__(self, parts: Parts | None = None) -> None:
        self.parts = parts

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
        return sdpa.attend(q_SHC, k_SJC, v_SJU, lengths, scale, window, sinks_H)

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
        out_SHU = upcast(q_SHC.new_zeros(*q_SHC.shape[:2], v_XJU.shape[-1]))
        lse_SH = out_SHU.new_full(q_SHC.shape[:2], -torch.inf)
        self.add_forward(out_SHU, lse_SH, q_SHC, k_XJC, v_XJU, mask, scale)
        if sinks_H is not None:
            merge_sinks_(out_SHU, lse_SH, sinks_H)
        return out_SHU.to(q_SHC.dtype), lse_SH

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
        dq, dk, dv = (upcast(torch.zeros_like(x)) for x in (q_SHC, k_XJC, v_XJU))
        self.add_gradients((dq, dk, dv), dout_SHU, q_SHC, k_XJC, v_XJU, out_SHU, lse_SH, mask, scale)
        dsinks_H = None if sinks_H is None else sink_gradients(dout_SHU, out_SHU, lse_SH, sinks_H)
        dtype = grad_dtype or q_SHC.dtype
        return VarlenGradients(dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks_H)

    def add_forward(
        self,
        sum_out_SHU: Tensor,
        sum_lse_SH: Tensor,
        q_SHC: Tensor,
        k_XJC: Tensor,
        v_XJU: Tensor,
        mask: PackedMask,
        scale: float,
    ) -> None:
        parts = self.parts or parts_for(q_SHC.device)
        for stack in mask.stacks:
            q_BHnC, k_BJmC, v_BJmU = _gather_blocks(stack, (q_SHC,), (k_XJC, v_XJU))
            causal, mask_nm = _sight(stack, mask.window, q_SHC.device)
            part = parts.attend(q_BHnC, k_BJmC, v_BJmU, scale=scale, causal=causal, mask_nm=mask_nm)
            out_BnHU, lse_BnH = stack.q.take(sum_out_SHU), stack.q.take(sum_lse_SH)
            merge_(out_BnHU, lse_BnH, *(x.transpose(1, 2) for x in part))
            stack.q.put(sum_out_SHU, out_BnHU)
            stack.q.put(sum_lse_SH, lse_BnH)
            del part, out_BnHU, lse_BnH

    def add_gradients(
        self,
        sums: tuple[Tensor, Tensor, Tensor],
        dout_SHU: Tensor,
        q_SHC: Tensor,
        k_XJC: Tensor,
        v_XJU: Tensor,
        out_SHU: Tensor,
        lse_SH: Tensor,
        mask: PackedMask,
        scale: float,
    ) -> None:
        parts = self.parts or parts_for(q_SHC.device)
        for stack in mask.stacks:
            mine = (dout_SHU, q_SHC, out_SHU, lse_SH)
            dout_BHnU, q_BHnC, out_BHnU, lse_BHn, k_BJmC, v_BJmU = _gather_blocks(stack, mine, (k_XJC, v_XJU))
            causal, mask_nm = _sight(stack, mask.window, q_SHC.device)
            dq_BHnC, dk_BJmC, dv_BJmU = parts.gradients(
                dout_BHnU, q_BHnC, k_BJmC, v_BJmU, out_BHnU, lse_BHn, scale=scale, causal=causal, mask_nm=mask_nm
            )
            stack.q.add(sums[0], dq_BHnC.transpose(1, 2))
            stack.k.add(sums[1], dk_BJmC.transpose(1, 2))
            stack.k.add(sums[2], dv_BJmU.transpose(1, 2))
            del dq_BHnC, dk_BJmC, dv_BJmU


def _gather_blocks(stack: Stack, of_queries: Iterable[Tensor], of_keys: Iterable[Tensor]) -> list[Tensor]:
    """[B, heads, rows, ...] of each."""
    taken = [stack.q.take(x) for x in of_queries] + [stack.k.take(x) for x in of_keys]
    return [x.transpose(1, 2) for x in taken]


def _sight(stack: Stack, window: int | None, device: torch.device) -> tuple[bool, Tensor | None]:
    """Whether the block is causal, and its mask where it is a band."""
    mask_nm = None
    if stack.sight is Sight.BAND:
        mask_nm = band(stack.q.num, stack.k.num, stack.offset, window, device)
    return stack.sight is Sight.CAUSAL, mask_nm
