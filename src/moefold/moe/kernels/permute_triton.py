"""Permute rows by expert and back to tokens, each in one pass over memory.

Both directions have one program per token. Permuting reads a token once and writes its K rows; unpermuting reads K
rows, sums them in float32 in registers and writes the token once. Nothing is sorted here, and no program adds to memory
that another one writes, so results do not depend on the order in which programs run. The gradient of one direction is
the other: the same two kernels, plus one that also computes the dot product of each row with its token's gradient.

The same launch zeroes padding rows: after the programs of the t tokens come E more, one per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.moe.kernels.moe_references import RowMap
from moefold.ops.kernels.aot_specs import MODELS, Build, Traffic, moe_of, refuse_wide

# Entries of a row that one program of 4 warps moves: 8 per thread, 16 bytes in bfloat16.
BLOCK_L = 1024
# Fewer where K rows are held at a time.
BLOCK_L_ROWS = 512


@triton.jit
def padding_of(expert, start_E, count_E, num_experts, num_rows):
    """An expert's padding rows, as (first, end); the last expert also has the rows that belong to no expert."""
    first = tl.load(start_E + expert) + tl.load(count_E + expert)
    end = tl.where(expert == num_experts - 1, num_rows, tl.load(start_E + expert + 1))
    return first.to(tl.int64), end.to(tl.int64)


@triton.jit
def _scatter(
    x_tL, prob_tK, row_tK, start_E, count_E, rows_PL, prob_P, num_tokens, num_experts, num_rows, L,
    K: tl.constexpr, WEIGH: tl.constexpr, PROBS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a token to its K rows, times the assignment's prob with WEIGH; or zero one expert's padding rows."""
    program, column_m = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_m = column_m < L
    if program < num_tokens:
        x_m = tl.load(x_tL + program.to(tl.int64) * L + column_m, mask=inside_m)
        for k in tl.static_range(K):
            row = tl.load(row_tK + program * K + k).to(tl.int64)
            out_m = x_m
            if WEIGH:
                out_m = (x_m.to(tl.float32) * tl.load(prob_tK + program * K + k)).to(x_m.dtype)
            tl.store(rows_PL + row * L + column_m, out_m, mask=inside_m & (row >= 0))
            if PROBS_OUT:
                prob = tl.load(prob_tK + program * K + k)
                tl.store(prob_P + row, prob, mask=(row >= 0) & (tl.program_id(1) == 0))
    else:
        first, end = padding_of(program - num_tokens, start_E, count_E, num_experts, num_rows)
        zero_m = tl.zeros([BLOCK], rows_PL.dtype.element_ty)
        for row in range(first, end):
            tl.store(rows_PL + row * L + column_m, zero_m, mask=inside_m)
            if PROBS_OUT:
                tl.store(prob_P + row, 0.0, mask=tl.program_id(1) == 0)


@triton.jit
def _reduce(
    rows_PL, prob_tK, row_tK, prob_P, out_tL, out_prob_tK, L,
    K: tl.constexpr, WEIGH: tl.constexpr, PROBS_IN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of one token's rows, times their probs with WEIGH; with PROBS_IN also gather each row's prob gradient."""
    token, column_m = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_m = column_m < L
    sum_m = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_tK + token * K + k).to(tl.int64)
        row_m = tl.load(rows_PL + row * L + column_m, mask=inside_m & (row >= 0), other=0.0).to(tl.float32)
        if WEIGH:
            row_m *= tl.load(prob_tK + token * K + k)
        sum_m += row_m
        if PROBS_IN:
            prob = tl.load(prob_P + row, mask=row >= 0, other=0.0)
            tl.store(out_prob_tK + token * K + k, prob, mask=tl.program_id(1) == 0)
    tl.store(out_tL + token.to(tl.int64) * L + column_m, sum_m.to(out_tL.dtype.element_ty), mask=inside_m)


@triton.jit
def _scatter_and_dot(
    grad_tL, rows_PL, prob_tK, row_tK, start_E, count_E, grad_rows_PL, grad_prob_tK,
    num_tokens, num_experts, num_rows, L, K: tl.constexpr, K_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a weighted sum: drow = prob * dtoken, dprob = row . dtoken."""
    program = tl.program_id(0)
    if program < num_tokens:
        slot_K = tl.arange(0, K_POW2)
        row_K = tl.load(row_tK + program * K + slot_K, mask=slot_K < K, other=-1).to(tl.int64)
        prob_K = tl.load(prob_tK + program * K + slot_K, mask=slot_K < K, other=0.0)
        dot_Km = tl.zeros([K_POW2, BLOCK], tl.float32)
        for begin in range(0, L, BLOCK):
            column_m = begin + tl.arange(0, BLOCK)
            here_Km = (row_K >= 0)[:, None] & (column_m < L)[None, :]
            place_Km = row_K[:, None] * L + column_m[None, :]
            grad_m = tl.load(grad_tL + program.to(tl.int64) * L + column_m, mask=column_m < L, other=0.0)
            grad_m = grad_m.to(tl.float32)
            row_Km = tl.load(rows_PL + place_Km, mask=here_Km, other=0.0).to(tl.float32)
            dot_Km += row_Km * grad_m[None, :]
            out_Km = prob_K[:, None] * grad_m[None, :]
            tl.store(grad_rows_PL + place_Km, out_Km.to(grad_rows_PL.dtype.element_ty), mask=here_Km)
        tl.store(grad_prob_tK + program * K + slot_K, tl.sum(dot_Km, 1), mask=slot_K < K)
    else:
        first, end = padding_of(program - num_tokens, start_E, count_E, num_experts, num_rows)
        zero_m = tl.zeros([BLOCK], grad_rows_PL.dtype.element_ty)
        for row in range(first, end):
            for begin in range(0, L, BLOCK):
                column_m = begin + tl.arange(0, BLOCK)
                tl.store(grad_rows_PL + row * L + column_m, zero_m, mask=column_m < L)


# Tokens, their rows and the probs that go with them, to rows and their probs.
Scatter = Callable[[Tensor, RowMap, Tensor | None], tuple[Tensor, Tensor]]


def permute(
    x_tL: Tensor, rows: RowMap, prob_tK: Tensor | None = None, scatter: Scatter | None = None
) -> tuple[Tensor, Tensor | None]:
    """Every permuted row, and its prob where probs are given. Padding rows are zeros. ``scatter``: another kernel that
    moves them."""
    refuse_wide("permute", x_tL, prob_tK)
    scatter = _scatter_rows if scatter is None else scatter
    if prob_tK is None:
        return _Permute.apply(x_tL, rows, scatter), None
    rows_PL, prob_P = _PermuteWithProbs.apply(x_tL, rows, prob_tK, scatter)
    return rows_PL, prob_P


def unpermute(rows_PL: Tensor, rows: RowMap, prob_tK: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, times the probs where given, in float32."""
    refuse_wide("unpermute", rows_PL, prob_tK)
    if prob_tK is None:
        return _Unpermute.apply(rows_PL, rows)
    return _UnpermuteWeighted.apply(rows_PL, rows, prob_tK)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tL: Tensor, rows: RowMap, scatter: Scatter) -> Tensor:
        ctx.rows = rows
        return scatter(x_tL, rows, None)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _launch_reduce(grads[0], ctx.rows)[0], None, None


class _PermuteWithProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tL: Tensor, rows: RowMap, prob_tK: Tensor, scatter: Scatter) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        return scatter(x_tL, rows, prob_tK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        grad_x_tL, grad_prob_tK = _launch_reduce(grads[0], ctx.rows, probs_in=grads[1])
        return grad_x_tL, None, grad_prob_tK, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PL: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return _launch_reduce(rows_PL, rows)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _launch_scatter(grads[0], ctx.rows)[0], None


class _UnpermuteWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PL: Tensor, rows: RowMap, prob_tK: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(rows_PL, prob_tK)
        return _launch_reduce(rows_PL, rows, weigh=prob_tK)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None]:
        rows_PL, prob_tK = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return _launch_scatter(grads[0], ctx.rows, weigh=prob_tK)[0], None, None
        grad_rows_PL, grad_prob_tK = _launch_scatter_and_dot(grads[0], rows_PL, prob_tK, ctx.rows)
        return grad_rows_PL, None, grad_prob_tK


def _scatter_rows(x_tL: Tensor, rows: RowMap, prob_tK: Tensor | None) -> tuple[Tensor, Tensor]:
    return _launch_scatter(x_tL, rows, probs_out=prob_tK)


def _launch_scatter(
    x_tL: Tensor, rows: RowMap, weigh: Tensor | None = None, probs_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows, and their probs if ``probs_out`` is given; an argument that the kernel does not read gets any tensor."""
    x_tL, num_experts = x_tL.contiguous(), rows.count_E.shape[0]
    rows_PL = x_tL.new_empty(rows.num_rows, x_tL.shape[1])
    prob_tK = weigh if weigh is not None else probs_out
    prob_P = rows_PL if probs_out is None else probs_out.new_empty(rows.num_rows)
    grid = (x_tL.shape[0] + num_experts, triton.cdiv(x_tL.shape[1], BLOCK_L))
    _scatter[grid](
        x_tL, rows.row_tK if prob_tK is None else prob_tK.contiguous(), rows.row_tK, rows.start_E, rows.count_E,
        rows_PL, prob_P, x_tL.shape[0], num_experts, rows.num_rows, x_tL.shape[1],
        K=rows.row_tK.shape[1], WEIGH=weigh is not None, PROBS_OUT=probs_out is not None, BLOCK=BLOCK_L,
    )  # fmt: skip
    return rows_PL, prob_P


def _launch_reduce(
    rows_PL: Tensor, rows: RowMap, weigh: Tensor | None = None, probs_in: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows_PL, (num_tokens, top_k) = rows_PL.contiguous(), rows.row_tK.shape
    out_tL = rows_PL.new_empty(num_tokens, rows_PL.shape[1])
    out_prob_tK = out_tL if probs_in is None else probs_in.new_empty(num_tokens, top_k)
    _reduce[num_tokens, triton.cdiv(rows_PL.shape[1], BLOCK_L)](
        rows_PL, rows.row_tK if weigh is None else weigh.contiguous(), rows.row_tK,
        rows.row_tK if probs_in is None else probs_in.contiguous(), out_tL, out_prob_tK, rows_PL.shape[1],
        K=top_k, WEIGH=weigh is not None, PROBS_IN=probs_in is not None, BLOCK=BLOCK_L,
    )  # fmt: skip
    return out_tL, out_prob_tK


def _launch_scatter_and_dot(grad_tL: Tensor, rows_PL: Tensor, prob_tK: Tensor, rows: RowMap) -> tuple[Tensor, Tensor]:
    (num_tokens, top_k), num_experts = rows.row_tK.shape, rows.count_E.shape[0]
    grad_rows_PL, grad_prob_tK = torch.empty_like(rows_PL), torch.empty_like(prob_tK)
    _scatter_and_dot[num_tokens + num_experts,](
        grad_tL.contiguous(), rows_PL.contiguous(), prob_tK.contiguous(), rows.row_tK, rows.start_E, rows.count_E,
        grad_rows_PL, grad_prob_tK, num_tokens, num_experts, rows.num_rows, grad_tL.shape[1],
        K=top_k, K_POW2=triton.next_power_of_2(top_k), BLOCK=BLOCK_L_ROWS,
    )  # fmt: skip
    return grad_rows_PL, grad_prob_tK


def scatter_traffic(dim: int, top_k: int) -> Traffic:
    """In bfloat16 with float32 probs. Padding is not counted: any implementation has to write it."""
    bytes_ = 2 * dim + 2 * dim * top_k + 12 * top_k
    return Traffic("2L + 2LK + 12K", bytes_, bytes_)


def reduce_traffic(dim: int, top_k: int) -> Traffic:
    """With the probs of tokens; the backward of ``permute`` moves the gradient of each row's prob as well."""
    bytes_ = 2 * dim + 2 * dim * top_k + 8 * top_k
    return Traffic("2L + 2LK + 8K", bytes_, bytes_)


def scatter_and_dot_traffic(dim: int, top_k: int) -> Traffic:
    bytes_ = 2 * dim + 4 * dim * top_k + 12 * top_k
    return Traffic("2L + 4LK + 12K", bytes_, bytes_)


_MAP = {"row_tK": "*i32", "start_E": "*i32", "count_E": "*i32"}
_SIZES = {"num_tokens": "i32", "num_experts": "i32", "num_rows": "i32", "L": "i32:16"}
_ROWS = {"rows_PL": "*bf16", "prob_tK": "*fp32", "prob_P": "*fp32"}


def _builds(model: str, L: int, K: int) -> tuple[Build, ...]:
    reduce = {**_ROWS, "row_tK": "*i32", "out_tL": "*bf16", "out_prob_tK": "*fp32", "L": "i32:16"}
    return (
        Build(
            f"permute, {model}", _scatter, {"x_tL": "*bf16", **_ROWS, **_MAP, **_SIZES},
            {"K": K, "WEIGH": False, "PROBS_OUT": True, "BLOCK": BLOCK_L}, scatter_traffic(L, K), registers=48,
        ),
        Build(
            f"permute backward, {model}", _reduce, reduce,
            {"K": K, "WEIGH": False, "PROBS_IN": True, "BLOCK": BLOCK_L}, scatter_traffic(L, K), registers=64,
        ),
        Build(
            f"unpermute, {model}", _reduce, reduce,
            {"K": K, "WEIGH": True, "PROBS_IN": False, "BLOCK": BLOCK_L}, reduce_traffic(L, K), registers=64,
        ),
        Build(
            f"unpermute backward, {model}", _scatter_and_dot,
            {"grad_tL": "*bf16", "rows_PL": "*bf16", "grad_rows_PL": "*bf16", "prob_tK": "*fp32",
             "grad_prob_tK": "*fp32", **_MAP, **_SIZES},
            {"K": K, "K_POW2": triton.next_power_of_2(K), "BLOCK": BLOCK_L_ROWS},
            scatter_and_dot_traffic(L, K), registers=128,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, model.dim, moe_of(model).top_k))
