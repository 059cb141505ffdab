"""Linear and grouped linear by Transformer Engine's GEMM functions, in bfloat16.

Its modules own their weights; moefold's are sharded tensors whose gradients a schedule may defer. So the adapter calls
the functions below the modules, ``general_gemm`` and ``general_grouped_gemm``, which own nothing. They take operands as
BLAS does, the weight first:

    y     = x @ W.T       layout TN       A = W [Y, X]    B = x  [P, X]
    dx    = dy @ W        layout NN       A = W [Y, X]    B = dy [P, Y]
    dW    = dy.T @ x      layout NT       A = x [P, X]    B = dy [P, Y]

The library reads an operand from its first element on, as if it were contiguous, and does not check it: every operand
is made contiguous here. The grouped function needs row counts on the host and writes into outputs that it is given. An
expert without rows is left out by the library, and its weight gradient is set to zero.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.ops.engines import load_engine

_NAME = "transformer_engine_gemm"


# ---- linear ----


def te_linear(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = _gemm(weight.flatten(0, -2), x.flatten(0, -2), "TN", "kernels.linear: transformer_engine")
    return out.unflatten(0, x.shape[:-1])


def te_linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = _gemm(weight.flatten(0, -2), grad.flatten(0, -2), "NN", "kernels.linear: transformer_engine")
    return out.unflatten(0, grad.shape[:-1])


def te_linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """[Y, X]"""
    return _gemm(x.flatten(0, -2), grad.flatten(0, -2), "NT", "kernels.linear: transformer_engine")


def _gemm(a: Tensor, b: Tensor, layout: str, setting: str) -> Tensor:
    _check(a, b, setting)
    library = load_engine(_NAME)
    out: Tensor
    out, _, _, _ = library.general_gemm(a.contiguous(), b.contiguous(), out_dtype=b.dtype, layout=layout)
    return out


# ---- grouped linear ----


def te_grouped(rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    out: Tensor = _Grouped.apply(rows_PX, weight_eYX, rows_per_expert_e, host)
    return out


def te_grouped_weight_grad(
    grad_PY: Tensor, rows_PX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
) -> Tensor:
    """[e, Y, X], in the dtype of the gradient."""
    sizes = rows_per_expert_e.tolist() if host is None else host
    if not len(grad_PY):
        return grad_PY.new_zeros(len(sizes), grad_PY.shape[1], rows_PX.shape[1])
    library = load_engine(_NAME)
    out_eYX = grad_PY.new_empty(len(sizes), grad_PY.shape[1], rows_PX.shape[1])
    library.general_grouped_gemm(
        list(rows_PX.contiguous().split(sizes)),
        list(grad_PY.contiguous().split(sizes)),
        list(out_eYX.unbind()),
        [None] * len(sizes),
        grad_PY.dtype,
        layout="NT",
        m_splits=sizes,
    )
    return out_eYX


def _rows_times(rows_PX: Tensor, weight_eYX: Tensor, sizes: list[int]) -> Tensor:
    """Each expert's rows @ W[e].T; a weight that is the transpose of a contiguous one is taken as that one."""
    out_PY = rows_PX.new_empty(len(rows_PX), weight_eYX.shape[1])
    if not len(rows_PX):
        return out_PY
    library = load_engine(_NAME)
    transposed = not weight_eYX.is_contiguous() and weight_eYX.mT.is_contiguous()
    library.general_grouped_gemm(
        list((weight_eYX.mT if transposed else weight_eYX.contiguous()).unbind()),
        list(rows_PX.contiguous().split(sizes)),
        [out_PY],
        [None] * len(sizes),
        rows_PX.dtype,
        layout="NN" if transposed else "TN",
        m_splits=sizes,
        single_output=True,
    )
    return out_PY


class _Kept(Protocol):
    """What the backward pass needs."""

    sizes: list[int]
    saved_tensors: tuple[Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
    ) -> Tensor:
        _check(rows_PX, weight_eYX, "kernels.experts: transformer_engine")
        ctx.sizes = rows_per_expert_e.tolist() if host is None else host
        ctx.save_for_backward(rows_PX, weight_eYX, rows_per_expert_e)
        return _rows_times(rows_PX, weight_eYX, ctx.sizes)

    @staticmethod
    def backward(ctx: _Kept, grad_PY: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_PX, weight_eYX, rows_per_expert_e = ctx.saved_tensors
        drows = _rows_times(grad_PY, weight_eYX.mT, ctx.sizes) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = te_grouped_weight_grad(grad_PY, rows_PX, rows_per_expert_e, ctx.sizes)
        return drows, dweight, None, None


def _check(a: Tensor, b: Tensor, setting: str) -> None:
    """float32 is multiplied in TF32 there, and float64 not at all."""
    if not a.dtype == b.dtype == torch.bfloat16:
        wrong = a.dtype if a.dtype != torch.bfloat16 else b.dtype
        raise BackendError(f"{setting} takes bfloat16, not {wrong}; use precision.compute bfloat16, or torch's own")
