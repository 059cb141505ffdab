"""Attention over packed documents as papers write it: document by document, all scores in memory.

The reference of every varlen backend; float64 stays float64. Backward uses the output and the log-sum-exp of *all*
keys, which may be more than the keys that are given, as in a step of ring attention:

    share = exp(score - lse)        dscore = share * (dout . v - dout . out)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.attention.mask_blocks import Run
from moefold.attention.packed_mask import PackedMask
from moefold.attention.partial_attention import sink_gradients
from moefold.attention.varlen import VarlenAttention, VarlenGradients
from moefold.ops.fp32_linear import upcast


class ReferenceAttention(VarlenAttention):
    """``VarlenAttention`` in torch operations, on any device."""

    name = "reference"

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
        heads, value_dim = q_SHC.shape[1], v_XJU.shape[-1]
        out_SHU = upcast(q_SHC.new_zeros(q_SHC.shape[0], heads, value_dim))
        lse_SH = torch.full_like(out_SHU[..., 0], -torch.inf)
        for document in _documents(mask, q_SHC.device):
            score_Hnm = _scores(q_SHC, k_XJC, document, scale)
            lse_Hn = score_Hnm.logsumexp(-1)
            share_Hnm = (score_Hnm - _finite(lse_Hn).unsqueeze(-1)).exp()
            out_SHU[document.q_rows] = (share_Hnm @ _per_head(v_XJU[document.k_rows], heads)).transpose(0, 1)
            lse_SH[document.q_rows] = lse_Hn.T
        if sinks_H is not None:
            with_sinks_SH = torch.logaddexp(lse_SH, sinks_H.to(lse_SH.dtype))
            out_SHU *= (lse_SH - with_sinks_SH).exp().unsqueeze(-1)
            lse_SH = with_sinks_SH
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
        heads, kv_heads = q_SHC.shape[1], k_XJC.shape[1]
        dq_SHC, dk_XJC, dv_XJU = (upcast(torch.zeros_like(x)) for x in (q_SHC, k_XJC, v_XJU))
        for document in _documents(mask, q_SHC.device):
            score_Hnm = _scores(q_SHC, k_XJC, document, scale)
            share_Hnm = (score_Hnm - _finite(lse_SH[document.q_rows].T).unsqueeze(-1)).exp()
            dout_HnU, out_HnU = (upcast(x[document.q_rows]).transpose(0, 1) for x in (dout_SHU, out_SHU))
            k_HmC, v_HmU = (_per_head(x[document.k_rows], heads) for x in (k_XJC, v_XJU))
            dshare_Hnm = dout_HnU @ v_HmU.mT
            dscore_Hnm = share_Hnm * (dshare_Hnm - (dout_HnU * out_HnU).sum(-1, keepdim=True)) * scale
            dq_SHC[document.q_rows] = (dscore_Hnm @ k_HmC).transpose(0, 1)
            dk_HmC = dscore_Hnm.mT @ upcast(q_SHC[document.q_rows]).transpose(0, 1)
            dk_XJC[document.k_rows] = _per_kv_head(dk_HmC, kv_heads)
            dv_XJU[document.k_rows] = _per_kv_head(share_Hnm.mT @ dout_HnU, kv_heads)
        dsinks_H = None if sinks_H is None else sink_gradients(dout_SHU, out_SHU, lse_SH, sinks_H)
        dtype = grad_dtype or q_SHC.dtype
        return VarlenGradients(dq_SHC.to(dtype), dk_XJC.to(dtype), dv_XJU.to(dtype), dsinks_H)


class _Document(NamedTuple):
    """The rows of one document's queries and keys, and which of them see each other."""

    q_rows: slice
    k_rows: slice
    seen_nm: Tensor


def _documents(mask: PackedMask, device: torch.device) -> Iterator[_Document]:
    """Those that have queries and keys here."""
    queries, keys = (_by_document(runs, device) for runs in (mask.q_runs, mask.k_runs))
    for number, (q_rows, q_place_n) in queries.items():
        if number not in keys:
            continue
        k_rows, k_place_m = keys[number]
        back_nm = q_place_n[:, None] - k_place_m
        seen_nm = back_nm >= 0 if mask.window is None else (back_nm >= 0) & (back_nm < mask.window)
        yield _Document(q_rows, k_rows, seen_nm)


def _by_document(runs: tuple[Run, ...], device: torch.device) -> dict[int, tuple[slice, Tensor]]:
    """Each document's rows, which are consecutive, and their positions."""
    found: dict[int, tuple[slice, Tensor]] = {}
    row = 0
    for run in runs:
        positions = torch.arange(run.start, run.stop, device=device)
        first = row
        row += run.stop - run.start
        if run.document in found:
            before, earlier = found[run.document]
            first, positions = before.start, torch.cat((earlier, positions))
        found[run.document] = slice(first, row), positions
    return found


def _scores(q_SHC: Tensor, k_XJC: Tensor, document: _Document, scale: float) -> Tensor:
    q_HnC = upcast(q_SHC[document.q_rows]).transpose(0, 1)
    k_HmC = _per_head(k_XJC[document.k_rows], q_SHC.shape[1])
    return (q_HnC @ k_HmC.mT * scale).masked_fill(~document.seen_nm, -torch.inf)


def _per_head(x_mJC: Tensor, heads: int) -> Tensor:
    """[H, m, C]: each key/value head once per query head that attends to it."""
    return upcast(x_mJC).transpose(0, 1).repeat_interleave(heads // x_mJC.shape[1], dim=0)


def _per_kv_head(x_HmC: Tensor, kv_heads: int) -> Tensor:
    """[m, J, C]: the sum over the query heads of each key/value head."""
    return x_HmC.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)


def _finite(lse: Tensor) -> Tensor:
    """-inf less -inf would be no number; any finite one in its place makes every share exp(-inf) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
