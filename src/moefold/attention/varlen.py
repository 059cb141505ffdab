"""Varlen attention: one interface for packed documents, windows, sinks, GQA, and values narrower than keys.

A backend has a forward that also returns the log-sum-exp of every query's scores, and a backward that takes output and
log-sum-exp back. Both may be those of *more* keys than are given: this is what ring attention needs, which sees some of
the keys at each step and merges the outputs by their log-sum-exp. ``PackedMask`` says which keys a query sees.

A sink is a logit per head that takes part in the softmax and has no value. It is part of the log-sum-exp.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from moefold.attention.packed_mask import PackedMask, whole_documents
from moefold.attention.partial_attention import compact, merge_


class VarlenGradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


class VarlenAttention(ABC):
    """S rows of queries, X rows of keys and values; H query heads, J key/value heads, H a multiple of J."""

    name: ClassVar[str]
    # Whether the number of kernel launches is the same for any number and lengths of documents.
    one_call: ClassVar[bool] = False

    @abstractmethod
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
        """Output [S, H, U] in the dtype of q, log-sum-exp [S, H] in float32 (or float64).

        A query that sees no key has output 0 and log-sum-exp -inf, or its sink.
        """

    @abstractmethod
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
        """What these keys add to the gradients; ``out`` and ``lse`` are those of all keys and of the sinks.

        ``grad_dtype`` is that of the inputs by default.
        """

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
        """[S, H, U]: causal attention within documents of these lengths, with gradients."""
        mask = whole_documents(lengths, window)
        out_SHU: Tensor = _Attend.apply(q_SHC, k_SJC, v_SJU, sinks_H, self, mask, scale)
        return out_SHU

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
        """Merge what these keys give into the output and log-sum-exp of others, in place."""
        if mask.stacks:
            merge_(sum_out_SHU, sum_lse_SH, *self.forward(q_SHC, k_XJC, v_XJU, mask, scale=scale))

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
        """Add the gradients of q, k and v to ``sums``, in place."""
        if not mask.stacks:
            return
        grads = self.backward(
            dout_SHU, q_SHC, k_XJC, v_XJU, out_SHU, lse_SH, mask, scale=scale, grad_dtype=sums[0].dtype
        )
        for total, grad in zip(sums, grads[:3], strict=True):
            total += grad


class _Attend(torch.autograd.Function):
    """Saves q, k, v, the output and one number per query and head: no padding, no mask, nothing per document."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        sinks_H: Tensor | None,
        attention: VarlenAttention,
        mask: PackedMask,
        scale: float,
    ) -> Tensor:
        q_SHC, k_SJC, v_SJU = (compact(x) for x in (q_SHC, k_SJC, v_SJU))
        out_SHU, lse_SH = attention.forward(q_SHC, k_SJC, v_SJU, mask, scale=scale, sinks_H=sinks_H)
        ctx.save_for_backward(q_SHC, k_SJC, v_SJU, sinks_H, out_SHU, lse_SH)
        ctx.attention, ctx.mask, ctx.scale = attention, mask, scale
        return out_SHU

    @staticmethod
    def backward(ctx: Any, dout_SHU: Tensor) -> tuple[Tensor | None, ...]:
        q_SHC, k_SJC, v_SJU, sinks_H, out_SHU, lse_SH = ctx.saved_tensors
        grads = ctx.attention.backward(
            dout_SHU, q_SHC, k_SJC, v_SJU, out_SHU, lse_SH, ctx.mask, scale=ctx.scale, sinks_H=sinks_H
        )
        return *grads, None, None, None
