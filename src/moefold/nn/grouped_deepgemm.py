"""Grouped GEMM by DeepGEMM: bfloat16, each expert's rows in blocks of a fixed number.

``m_grouped_bf16_gemm_*_contiguous`` takes one matrix of all experts' rows and the expert of every row. A block of rows
belongs to one expert, so each expert's rows are padded to a multiple of the block (128 on Hopper), with -1 as the
expert of padding; outputs of padding are garbage and are left out. Where the dispatcher has aligned the rows already
(``parallel.row_multiple``), nothing is copied.

    y[e]  = x[e] @ W[e].T        m_grouped_bf16_gemm_nt_contiguous
    dx[e] = dy[e] @ W[e]         m_grouped_bf16_gemm_nn_contiguous
    dW[e] = dy[e].T @ x[e]       k_grouped_bf16_gemm_tn_contiguous, into float32
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.errors import BackendError
from moefold.ops.engines import load_engine
from moefold.ops.padded_runs import aligned

_PADDING = -1


class _Blocks(NamedTuple):
    """Rows per expert in whole blocks, the expert of every row, and where rows go; None if they are there already."""

    sizes: list[int]
    expert_Q: Tensor
    place_P: Tensor | None


def deepgemm(rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    out: Tensor = _DeepGemm.apply(rows_PX, weight_eYX, rows_per_expert_e, host)
    return out


def deepgemm_weight_grad(grad_PY: Tensor, rows_PX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None) -> Tensor:
    """[e, Y, X], summed in float32."""
    library = load_engine("deepgemm")
    blocks = _blocks_of(rows_per_expert_e, host, library.get_mk_alignment_for_contiguous_layout())
    sizes_e = torch.tensor(blocks.sizes, dtype=torch.int32, device=rows_PX.device)
    grad_eYX = rows_PX.new_zeros(len(blocks.sizes), grad_PY.shape[1], rows_PX.shape[1], dtype=torch.float32)
    # It adds to what is there, so zeros are both what it adds to and where it writes.
    library.k_grouped_bf16_gemm_tn_contiguous(
        _in_blocks(grad_PY, blocks), _in_blocks(rows_PX, blocks), grad_eYX, blocks.sizes, sizes_e, grad_eYX
    )
    return grad_eYX.to(grad_PY.dtype)


def _forward(library: ModuleType, rows_PX: Tensor, weight_eYX: Tensor, blocks: _Blocks) -> Tensor:
    rows_QX = _in_blocks(rows_PX, blocks)
    out_QY = rows_QX.new_empty(len(rows_QX), weight_eYX.shape[1])
    library.m_grouped_bf16_gemm_nt_contiguous(rows_QX, _packed(weight_eYX), out_QY, blocks.expert_Q)
    return _out_of_blocks(out_QY, blocks)


def _input_grad(library: ModuleType, grad_PY: Tensor, weight_eYX: Tensor, blocks: _Blocks) -> Tensor:
    grad_QY = _in_blocks(grad_PY, blocks)
    out_QX = grad_QY.new_empty(len(grad_QY), weight_eYX.shape[2])
    library.m_grouped_bf16_gemm_nn_contiguous(grad_QY, _packed(weight_eYX), out_QX, blocks.expert_Q)
    return _out_of_blocks(out_QX, blocks)


def _blocks_of(rows_per_expert_e: Tensor, host: list[int] | None, block: int) -> _Blocks:
    sizes = rows_per_expert_e.tolist() if host is None else host
    padded = aligned(sizes, block)
    device, num_rows = rows_per_expert_e.device, sum(sizes)
    experts_e = torch.arange(len(sizes), dtype=torch.int32, device=device)
    expert_P = experts_e.repeat_interleave(rows_per_expert_e, output_size=num_rows)
    if padded == sizes:
        return _Blocks(padded, expert_P, None)
    padded_e = (rows_per_expert_e + block - 1) // block * block
    starts_e = (padded_e - rows_per_expert_e).cumsum(0) - (padded_e - rows_per_expert_e)
    place_P = starts_e.repeat_interleave(rows_per_expert_e, output_size=num_rows)
    place_P = place_P + torch.arange(num_rows, device=device)
    expert_Q = torch.full((sum(padded),), _PADDING, dtype=torch.int32, device=device).index_copy_(0, place_P, expert_P)
    return _Blocks(padded, expert_Q, place_P)


def _in_blocks(rows_PX: Tensor, blocks: _Blocks) -> Tensor:
    """Padding is zero: weight gradients add it up."""
    if blocks.place_P is None:
        return rows_PX.contiguous()
    return rows_PX.new_zeros(sum(blocks.sizes), rows_PX.shape[1]).index_copy_(0, blocks.place_P, rows_PX)


def _out_of_blocks(out_QY: Tensor, blocks: _Blocks) -> Tensor:
    return out_QY if blocks.place_P is None else out_QY.index_select(0, blocks.place_P)


def _packed(weight_eYX: Tensor) -> Tensor:
    """As it is if either of its last two dims is contiguous, which the library takes; otherwise a copy."""
    dim_y, dim_x = weight_eYX.shape[1:]
    taken = ((dim_y * dim_x, dim_x, 1), (dim_y * dim_x, 1, dim_y))
    return weight_eYX if weight_eYX.stride() in taken else weight_eYX.contiguous()


class _Kept(Protocol):
    """What the backward pass needs."""

    blocks: _Blocks
    host: list[int] | None
    saved_tensors: tuple[Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _DeepGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, rows_PX: Tensor, weight_eYX: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
    ) -> Tensor:
        if not rows_PX.dtype == weight_eYX.dtype == torch.bfloat16:
            raise BackendError(
                f"kernels.experts: deepgemm computes in bfloat16, not {rows_PX.dtype}; use precision.compute bfloat16, "
                "or kernels.experts grouped"
            )
        library = load_engine("deepgemm")
        ctx.blocks = _blocks_of(rows_per_expert_e, host, library.get_mk_alignment_for_contiguous_layout())
        ctx.host = host
        ctx.save_for_backward(rows_PX, weight_eYX, rows_per_expert_e)
        return _forward(library, rows_PX, weight_eYX, ctx.blocks)

    @staticmethod
    def backward(ctx: _Kept, grad_PY: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_PX, weight_eYX, rows_per_expert_e = ctx.saved_tensors
        library = load_engine("deepgemm")
        drows = _input_grad(library, grad_PY, weight_eYX, ctx.blocks) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = deepgemm_weight_grad(grad_PY, rows_PX, rows_per_expert_e, ctx.host)
        return drows, dweight, None, None
