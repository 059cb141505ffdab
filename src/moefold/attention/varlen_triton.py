"""Varlen attention by our Triton kernels: one launch forward, three backward, for any number of documents."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.attention.packed_mask import PackedMask
from moefold.attention.varlen import VarlenAttention, VarlenGradients
from moefold.ops.kernels.attention_backward_triton import varlen_backward
from moefold.ops.kernels.attention_triton import varlen_forward


class TritonAttention(VarlenAttention):
    """``VarlenAttention`` on GPUs, in float32, bfloat16 and float16."""

    name = "triton"
    one_call = True

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
        spans = mask.spans(q_SHC.device)
        return varlen_forward(q_SHC, k_XJC, v_XJU, sinks_H, spans.begin_S, spans.end_S, scale)

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
        dq, dk, dv, delta_SH = varlen_backward(
            dout_SHU, q_SHC, k_XJC, v_XJU, out_SHU, lse_SH, *mask.spans(q_SHC.device), scale, dtype
        )
        if sinks_H is None:
            return VarlenGradients(dq, dk, dv, None)
        weight_SH = (sinks_H.to(lse_SH.dtype) - lse_SH).exp()
        return VarlenGradients(dq, dk, dv, (-weight_SH * delta_SH).sum(0).to(sinks_H.dtype))
