"""Varlen attention by the flash-attn packages: FlashAttention 2, 3 and 4, each under its own name.

The packages have no sinks in the versions that return a log-sum-exp for training, and need none: a sink multiplies the
output by exp(lse - lse') and lse' is the log-sum-exp with it. Their backward takes output and log-sum-exp, and with
those of output and sink together its gradients are right as they are.

The calls are to the functions below the packages' own autograd, because ring attention needs forward and backward
apart. ``tests/engines/signatures`` has their recorded signatures; a test binds every call to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.attention.flash_sequences import Sequences, sequences
from moefold.attention.packed_mask import PackedMask
from moefold.attention.partial_attention import merge_sinks_, sink_gradients
from moefold.attention.varlen import VarlenAttention, VarlenGradients
from moefold.errors import BackendError
from moefold.ops.engines import load_engine

# A row of a head is loaded in pieces of so many bytes.
ROW_BYTES = 16


class FlashForward(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, found: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """Output [S, H, U] and log-sum-exp [H, S]."""
        ...


class FlashBackward(Protocol):
    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, found: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv; the log-sum-exp is [H, S]."""
        ...


class FlashCalls(NamedTuple):
    """How one version of the package is called."""

    name: str
    forward: FlashForward
    backward: FlashBackward
    # Whether values may have another head dim than keys.
    own_value_dim: bool


class FlashAttention(VarlenAttention):
    name = "flash_attn"
    one_call = True

    def __init__(self, calls: FlashCalls) -> None:
        self.calls = calls

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
        self._check(q_SHC, v_XJU)
        found = sequences(mask)
        if q_SHC.numel() == 0 or k_XJC.shape[0] == 0:
            out_SHU = q_SHC.new_zeros(*q_SHC.shape[:2], v_XJU.shape[-1])
            lse_SH = q_SHC.new_full(q_SHC.shape[:2], -torch.inf, dtype=torch.float32)
        else:
            out_SHU, lse_HS = self.calls.forward(q_SHC, k_XJC, v_XJU, found, scale)
            lse_SH = lse_HS.t().contiguous()
            if found.has_blind_rows:
                # The packages differ in what they call the log-sum-exp of no keys.
                spans = mask.spans(q_SHC.device)
                blind_S = spans.begin_S == spans.end_S
                lse_SH.masked_fill_(blind_S[:, None], -torch.inf)
                out_SHU.masked_fill_(blind_S[:, None, None], 0.0)
        if sinks_H is not None:
            merge_sinks_(out_SHU, lse_SH, sinks_H)
        return out_SHU, lse_SH

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
        # Rows without keys anywhere: their shares are exp(-inf) = 0 with an infinite log-sum-exp.
        lse_HS = lse_SH.masked_fill(lse_SH == -torch.inf, torch.inf).t().contiguous()
        dq, dk, dv = self.calls.backward(
            dout_SHU.contiguous(), q_SHC, k_XJC, v_XJU, out_SHU.contiguous(), lse_HS, sequences(mask), scale
        )
        return VarlenGradients(dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks_H)

    def _check(self, q_SHC: Tensor, v_XJU: Tensor) -> None:
        dim, value_dim, name = q_SHC.shape[-1], v_XJU.shape[-1], self.calls.name
        if q_SHC.dtype not in (torch.bfloat16, torch.float16):
            raise BackendError(f"kernels.attention: {name} takes bfloat16 and float16, not {q_SHC.dtype}; use triton")
        if dim != value_dim and not self.calls.own_value_dim:
            raise BackendError(
                f"kernels.attention: {name} needs one head dim, but keys have {dim} and values {value_dim}; "
                "use triton, flash_attn_3 or flash_attn_4"
            )
        multiple = ROW_BYTES // q_SHC.element_size()
        if dim % multiple or value_dim % multiple:
            raise BackendError(
                f"kernels.attention: {name} needs head dims that are multiples of {multiple}, not {dim} and "
                f"{value_dim}; use triton"
            )


# ---- the versions ----


def flash_calls(version: int) -> FlashCalls:
    """Import that version; an error says how to install it."""
    return _VERSIONS[version](load_engine(f"flash_attn_{version}"))


def calls_2(module: Any) -> FlashCalls:
    def forward(q: Tensor, k: Tensor, v: Tensor, found: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        cu_q, cu_k = found.cu_seqlens(q.device)
        out, lse, _, _ = module._flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, found.max_q, found.max_k, 0.0, scale, found.causal,
            window_size_left=_left(found), window_size_right=_right(found),
        )  # fmt: skip
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, found: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        cu_q, cu_k = found.cu_seqlens(q.device)
        dq, dk, dv = _empty_gradients(q, k, v)
        module._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, found.max_q, found.max_k, 0.0, scale, found.causal,
            window_size_left=_left(found), window_size_right=_right(found), softcap=0.0, alibi_slopes=None,
            deterministic=False,
        )  # fmt: skip
        return dq, dk, dv

    return FlashCalls("flash_attn_2", forward, backward, own_value_dim=False)


def calls_3(module: Any) -> FlashCalls:
    """Releases differ in how a window is given: as two numbers, or as one pair."""

    def window(function: Callable[..., Any], found: Sequences) -> dict[str, Any]:
        # A torch custom op keeps the function that it was made of.
        names = inspect.signature(getattr(function, "_init_fn", function)).parameters
        if "window_size" in names:
            return {"window_size": (_left(found), _right(found))}
        return {"window_size_left": _left(found), "window_size_right": _right(found)}

    def causal(function: Callable[..., Any], found: Sequences) -> dict[str, bool]:
        names = inspect.signature(getattr(function, "_init_fn", function)).parameters
        return {"is_causal" if "is_causal" in names else "causal": found.causal}

    def forward(q: Tensor, k: Tensor, v: Tensor, found: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        cu_q, cu_k = found.cu_seqlens(q.device)
        call = module._flash_attn_forward
        names = inspect.signature(getattr(call, "_init_fn", call)).parameters
        unused = dict.fromkeys((name for name in names if name in _UNUSED_3), None)
        out, lse, *_ = call(
            q, k, v, **unused, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=found.max_q,
            max_seqlen_k=found.max_k, softmax_scale=scale, **causal(call, found), **window(call, found),
        )  # fmt: skip
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, found: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        cu_q, cu_k = found.cu_seqlens(q.device)
        dq, dk, dv = _empty_gradients(q, k, v)
        call = module._flash_attn_backward
        call(
            dout, q, k, v, out, lse, cu_q, cu_k, None, None, found.max_q, found.max_k, dq, dk, dv, scale,
            **causal(call, found), **window(call, found),
        )  # fmt: skip
        return dq, dk, dv

    return FlashCalls("flash_attn_3", forward, backward, own_value_dim=True)


def calls_4(module: Any) -> FlashCalls:
    def sight(found: Sequences) -> dict[str, Any]:
        windowed = found.window is not None
        return {
            "causal": found.causal and not windowed,
            "window_size_left": _left(found) if windowed else None,
            "window_size_right": 0 if windowed else None,
        }

    def rows(q: Tensor, found: Sequences) -> dict[str, Any]:
        cu_q, cu_k = found.cu_seqlens(q.device)
        return {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": found.max_q,
            "max_seqlen_k": found.max_k,
        }

    def forward(q: Tensor, k: Tensor, v: Tensor, found: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = module._flash_attn_fwd(
            q, k, v, **rows(q, found), softmax_scale=scale, **sight(found), return_lse=True
        )
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, found: Sequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, *_ = module._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, **sight(found), **rows(q, found)
        )
        return dq, dk, dv

    return FlashCalls("flash_attn_4", forward, backward, own_value_dim=True)


_UNUSED_3 = (
    "k_new", "v_new", "qv", "out", "out_", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx",
    "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale",
)  # fmt: skip

_VERSIONS: dict[int, Callable[[Any], FlashCalls]] = {2: calls_2, 3: calls_3, 4: calls_4}


def _left(found: Sequences) -> int:
    """How many keys before its own a query sees; -1 for all."""
    return -1 if found.window is None else found.window - 1


def _right(found: Sequences) -> int:
    return 0 if found.causal else -1


def _empty_gradients(*inputs: Tensor) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
