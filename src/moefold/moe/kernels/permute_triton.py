"""Rows to experts and back, each in one pass over memory.

t tokens, K choices per token, E experts, R rows sorted by expert, D width.

Both directions are walked token by token. Permuting reads a token once and writes its K rows; unpermuting reads K rows,
adds them up in float32 in registers and writes the token once. Nothing is sorted here, nothing is added to memory that
another program writes, so results do not depend on the order in which programs run. The gradient of one direction is
the other: the same two kernels, plus one that also needs the product of each row with its token's gradient.

Pads are filled by the same launch: behind the programs of the t tokens come E more, one for each expert's pads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.moe.kernels.row_map_reference import RowMap
from moefold.ops.kernels.aot_specs import Build, Traffic, refuse_wide
from moefold.ops.kernels.benchmark_shapes import MODELS, moe_of

# Entries of a row that one program of 4 warps moves: 8 per thread, 16 bytes in bfloat16.
BLOCK_D = 1024
# Fewer where K rows are held at a time.
BLOCK_D_ROWS = 512


@triton.jit
def _pads_of(expert, start_E, count_E, num_experts, num_rows):
    """Its rows without a token, as (first, end); the last expert also has what belongs to nobody."""
    first = tl.load(start_E + expert) + tl.load(count_E + expert)
    end = tl.where(expert == num_experts - 1, num_rows, tl.load(start_E + expert + 1))
    return first.to(tl.int64), end.to(tl.int64)


@triton.jit
def _spread(
    x_tD, weight_tK, row_tK, start_E, count_E, rows_RD, weight_R, num_tokens, num_experts, num_rows, D,
    K: tl.constexpr, WEIGH: tl.constexpr, WEIGHTS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's entries to its K rows, times the choice's weight with WEIGH; or zeros to one expert's pads."""
    program, column_B = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < D
    if program < num_tokens:
        x_B = tl.load(x_tD + program.to(tl.int64) * D + column_B, mask=inside_B)
        for k in tl.static_range(K):
            row = tl.load(row_tK + program * K + k).to(tl.int64)
            out_B = x_B
            if WEIGH:
                out_B = (x_B.to(tl.float32) * tl.load(weight_tK + program * K + k)).to(x_B.dtype)
            tl.store(rows_RD + row * D + column_B, out_B, mask=inside_B & (row >= 0))
            if WEIGHTS_OUT:
                weight = tl.load(weight_tK + program * K + k)
                tl.store(weight_R + row, weight, mask=(row >= 0) & (tl.program_id(1) == 0))
    else:
        first, end = _pads_of(program - num_tokens, start_E, count_E, num_experts, num_rows)
        zero_B = tl.zeros([BLOCK], rows_RD.dtype.element_ty)
        for row in range(first, end):
            tl.store(rows_RD + row * D + column_B, zero_B, mask=inside_B)
            if WEIGHTS_OUT:
                tl.store(weight_R + row, 0.0, mask=tl.program_id(1) == 0)


@triton.jit
def _collect(
    rows_RD, weight_tK, row_tK, weight_R, out_tD, out_weight_tK, D,
    K: tl.constexpr, WEIGH: tl.constexpr, WEIGHTS_IN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of one token's rows, times their weights with WEIGH; with WEIGHTS_IN also one number from each row."""
    token, column_B = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < D
    sum_B = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_tK + token * K + k).to(tl.int64)
        row_B = tl.load(rows_RD + row * D + column_B, mask=inside_B & (row >= 0), other=0.0).to(tl.float32)
        if WEIGH:
            row_B *= tl.load(weight_tK + token * K + k)
        sum_B += row_B
        if WEIGHTS_IN:
            weight = tl.load(weight_R + row, mask=row >= 0, other=0.0)
            tl.store(out_weight_tK + token * K + k, weight, mask=tl.program_id(1) == 0)
    tl.store(out_tD + token.to(tl.int64) * D + column_B, sum_B.to(out_tD.dtype.element_ty), mask=inside_B)


@triton.jit
def _spread_and_multiply(
    grad_tD, rows_RD, weight_tK, row_tK, start_E, count_E, grad_rows_RD, grad_weight_tK,
    num_tokens, num_experts, num_rows, D, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a weighted sum: to each row its weight times the token's, to each weight their product."""
    program = tl.program_id(0)
    if program < num_tokens:
        choice_K = tl.arange(0, KP)
        row_K = tl.load(row_tK + program * K + choice_K, mask=choice_K < K, other=-1).to(tl.int64)
        weight_K = tl.load(weight_tK + program * K + choice_K, mask=choice_K < K, other=0.0)
        product_KB = tl.zeros([KP, BLOCK], tl.float32)
        for begin in range(0, D, BLOCK):
            column_B = begin + tl.arange(0, BLOCK)
            here_KB = (row_K >= 0)[:, None] & (column_B < D)[None, :]
            place_KB = row_K[:, None] * D + column_B[None, :]
            grad_B = tl.load(grad_tD + program.to(tl.int64) * D + column_B, mask=column_B < D, other=0.0)
            grad_B = grad_B.to(tl.float32)
            row_KB = tl.load(rows_RD + place_KB, mask=here_KB, other=0.0).to(tl.float32)
            product_KB += row_KB * grad_B[None, :]
            out_KB = weight_K[:, None] * grad_B[None, :]
            tl.store(grad_rows_RD + place_KB, out_KB.to(grad_rows_RD.dtype.element_ty), mask=here_KB)
        tl.store(grad_weight_tK + program * K + choice_K, tl.sum(product_KB, 1), mask=choice_K < K)
    else:
        first, end = _pads_of(program - num_tokens, start_E, count_E, num_experts, num_rows)
        zero_B = tl.zeros([BLOCK], grad_rows_RD.dtype.element_ty)
        for row in range(first, end):
            for begin in range(0, D, BLOCK):
                column_B = begin + tl.arange(0, BLOCK)
                tl.store(grad_rows_RD + row * D + column_B, zero_B, mask=column_B < D)


def permute(x_tD: Tensor, rows: RowMap, weight_tK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Every row's token, and every row's routing weight where weights are given. Rows of no token are zeros."""
    refuse_wide("permute", x_tD, weight_tK)
    if weight_tK is None:
        return _Permute.apply(x_tD, rows), None
    rows_RD, weight_R = _PermuteWithWeights.apply(x_tD, rows, weight_tK)
    return rows_RD, weight_R


def unpermute(rows_RD: Tensor, rows: RowMap, weight_tK: Tensor | None = None) -> Tensor:
    """Add up each token's rows, weighted where weights are given, in float32."""
    refuse_wide("unpermute", rows_RD, weight_tK)
    if weight_tK is None:
        return _Unpermute.apply(rows_RD, rows)
    return _UnpermuteWeighted.apply(rows_RD, rows, weight_tK)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return _launch_spread(x_tD, rows)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _launch_collect(grads[0], ctx.rows)[0], None


class _PermuteWithWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, rows: RowMap, weight_tK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        return _launch_spread(x_tD, rows, weights_out=weight_tK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        grad_x_tD, grad_weight_tK = _launch_collect(grads[0], ctx.rows, weights_in=grads[1])
        return grad_x_tD, None, grad_weight_tK


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return _launch_collect(rows_RD, rows)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _launch_spread(grads[0], ctx.rows)[0], None


class _UnpermuteWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, rows: RowMap, weight_tK: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(rows_RD, weight_tK)
        return _launch_collect(rows_RD, rows, weigh=weight_tK)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None]:
        rows_RD, weight_tK = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return _launch_spread(grads[0], ctx.rows, weigh=weight_tK)[0], None, None
        grad_rows_RD, grad_weight_tK = _launch_spread_and_multiply(grads[0], rows_RD, weight_tK, ctx.rows)
        return grad_rows_RD, None, grad_weight_tK


def _launch_spread(
    x_tD: Tensor, rows: RowMap, weigh: Tensor | None = None, weights_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows, and their weights if ``weights_out`` has some; an argument that is not read gets any tensor."""
    x_tD, num_experts = x_tD.contiguous(), rows.count_E.shape[0]
    rows_RD = x_tD.new_empty(rows.num_rows, x_tD.shape[1])
    weight_tK = weigh if weigh is not None else weights_out
    weight_R = rows_RD if weights_out is None else weights_out.new_empty(rows.num_rows)
    grid = (x_tD.shape[0] + num_experts, triton.cdiv(x_tD.shape[1], BLOCK_D))
    _spread[grid](
        x_tD, rows.row_tK if weight_tK is None else weight_tK.contiguous(), rows.row_tK, rows.start_E, rows.count_E,
        rows_RD, weight_R, x_tD.shape[0], num_experts, rows.num_rows, x_tD.shape[1],
        K=rows.row_tK.shape[1], WEIGH=weigh is not None, WEIGHTS_OUT=weights_out is not None, BLOCK=BLOCK_D,
    )  # fmt: skip
    return rows_RD, weight_R


def _launch_collect(
    rows_RD: Tensor, rows: RowMap, weigh: Tensor | None = None, weights_in: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows_RD, (num_tokens, num_choices) = rows_RD.contiguous(), rows.row_tK.shape
    out_tD = rows_RD.new_empty(num_tokens, rows_RD.shape[1])
    out_weight_tK = out_tD if weights_in is None else weights_in.new_empty(num_tokens, num_choices)
    _collect[num_tokens, triton.cdiv(rows_RD.shape[1], BLOCK_D)](
        rows_RD, rows.row_tK if weigh is None else weigh.contiguous(), rows.row_tK,
        rows.row_tK if weights_in is None else weights_in.contiguous(), out_tD, out_weight_tK, rows_RD.shape[1],
        K=num_choices, WEIGH=weigh is not None, WEIGHTS_IN=weights_in is not None, BLOCK=BLOCK_D,
    )  # fmt: skip
    return out_tD, out_weight_tK


def _launch_spread_and_multiply(
    grad_tD: Tensor, rows_RD: Tensor, weight_tK: Tensor, rows: RowMap
) -> tuple[Tensor, Tensor]:
    (num_tokens, num_choices), num_experts = rows.row_tK.shape, rows.count_E.shape[0]
    grad_rows_RD, grad_weight_tK = torch.empty_like(rows_RD), torch.empty_like(weight_tK)
    _spread_and_multiply[num_tokens + num_experts,](
        grad_tD.contiguous(), rows_RD.contiguous(), weight_tK.contiguous(), rows.row_tK, rows.start_E, rows.count_E,
        grad_rows_RD, grad_weight_tK, num_tokens, num_experts, rows.num_rows, grad_tD.shape[1],
        K=num_choices, KP=triton.next_power_of_2(num_choices), BLOCK=BLOCK_D_ROWS,
    )  # fmt: skip
    return grad_rows_RD, grad_weight_tK


def spread_traffic(dim: int, top_k: int) -> Traffic:
    """In bfloat16 with float32 weights. Pads are not counted: they come on top of any way to do it."""
    bytes_ = 2 * dim + 2 * dim * top_k + 12 * top_k
    return Traffic("2D + 2DK + 12K", bytes_, bytes_)


def collect_traffic(dim: int, top_k: int) -> Traffic:
    """With weights of the tokens; backward of a permutation moves a row's number as well."""
    bytes_ = 2 * dim + 2 * dim * top_k + 8 * top_k
    return Traffic("2D + 2DK + 8K", bytes_, bytes_)


def multiply_traffic(dim: int, top_k: int) -> Traffic:
    bytes_ = 2 * dim + 4 * dim * top_k + 12 * top_k
    return Traffic("2D + 4DK + 12K", bytes_, bytes_)


_MAP = {"row_tK": "*i32", "start_E": "*i32", "count_E": "*i32"}
_SIZES = {"num_tokens": "i32", "num_experts": "i32", "num_rows": "i32", "D": "i32:16"}
_ROWS = {"rows_RD": "*bf16", "weight_tK": "*fp32", "weight_R": "*fp32"}


def _builds(model: str, D: int, K: int) -> tuple[Build, ...]:
    collect = {**_ROWS, "row_tK": "*i32", "out_tD": "*bf16", "out_weight_tK": "*fp32", "D": "i32:16"}
    return (
        Build(
            f"permute, {model}", _spread, {"x_tD": "*bf16", **_ROWS, **_MAP, **_SIZES},
            {"K": K, "WEIGH": False, "WEIGHTS_OUT": True, "BLOCK": BLOCK_D}, spread_traffic(D, K), registers=48,
        ),
        Build(
            f"permute backward, {model}", _collect, collect,
            {"K": K, "WEIGH": False, "WEIGHTS_IN": True, "BLOCK": BLOCK_D}, spread_traffic(D, K), registers=64,
        ),
        Build(
            f"unpermute, {model}", _collect, collect,
            {"K": K, "WEIGH": True, "WEIGHTS_IN": False, "BLOCK": BLOCK_D}, collect_traffic(D, K), registers=64,
        ),
        Build(
            f"unpermute backward, {model}", _spread_and_multiply,
            {"grad_tD": "*bf16", "rows_RD": "*bf16", "grad_rows_RD": "*bf16", "weight_tK": "*fp32",
             "grad_weight_tK": "*fp32", **_MAP, **_SIZES},
            {"K": K, "KP": triton.next_power_of_2(K), "BLOCK": BLOCK_D_ROWS}, multiply_traffic(D, K), registers=128,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, model.dim, moe_of(model).top_k))
