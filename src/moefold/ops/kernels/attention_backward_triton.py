"""Attention over packed documents, backward: three launches, whatever the number of documents.

Scores are recomputed from q and k, and a share of a key is exp(score - lse):

    delta = dout . out        dscore = share * (dout . v - delta) * scale
    dq = dscore @ k           dk = dscore.T @ q           dv = share.T @ dout

``out`` and ``lse`` may be those of more keys than are here, as in a step of ring attention; sinks are part of them.

1. delta, one number per query and head.
2. dk and dv: a program has a block of keys of one key/value head and goes through the queries that see them, of all the
   heads that share it. So it sums what those heads add, without atomics, in the same order in every run.
3. dq: a program has a block of queries of one head and goes through the keys that they see.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.ops.kernels.aot_specs import MODELS, Build, refuse_wide
from moefold.ops.kernels.attention_triton import (
    ARGUMENTS,
    LOG2_E,
    Tile,
    entries_adjacent,
    head_constants,
    load_rows,
    matmul,
    model_constants,
    store_rows,
    tile_for,
)

# Queries and keys of a block, warps, stages; for 16-bit inputs.
KEYS_TILE: Tile = (32, 128, 8, 1)
QUERIES_TILE: Tile = (128, 32, 8, 1)
# Rows (of one query and head) of a program of the first launch.
DELTA_ROWS = 32


# ---- the kernels ----


@triton.jit
def delta_kernel(dout, out, delta, num_rows, U: tl.constexpr, U_POW2: tl.constexpr, ROWS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    inside = first + row < num_rows
    a = load_rows(dout + first * U, row, U, inside, 0, U, U_POW2).to(tl.float32)
    b = load_rows(out + first * U, row, U, inside, 0, U, U_POW2).to(tl.float32)
    tl.store(delta + first + row, tl.sum(a * b, 1), mask=inside)


@triton.jit
def keys_kernel(
    q, k, v, dout, lse, delta, q_begin, q_end, dk, dv, num_q, num_k, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    C_MAIN: tl.constexpr, C_REST: tl.constexpr, U_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one key/value head."""
    kv_head = tl.program_id(1)
    first_k = tl.program_id(0) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_M)
    inside_k = first_k + row < num_k
    k_base = k + first_k.to(tl.int64) * k_row + kv_head * k_head
    k_main = load_rows(k_base, row, k_row, inside_k, 0, min(C, C_MAIN), C_MAIN)
    v_base = v + first_k.to(tl.int64) * v_row + kv_head * v_head
    v_block = load_rows(v_base, row, v_row, inside_k, 0, U, U_POW2)
    dk_main = tl.zeros((BLOCK_N, C_MAIN), tl.float32)
    dv_block = tl.zeros((BLOCK_N, U_POW2), tl.float32)
    if C_REST > 0:
        k_rest = load_rows(k_base, row, k_row, inside_k, C_MAIN, C - C_MAIN, C_REST)
        dk_rest = tl.zeros((BLOCK_N, C_REST), tl.float32)
    seen_from = tl.load(q_begin + first_k + row, mask=inside_k, other=0)
    seen_to = tl.load(q_end + first_k + row, mask=inside_k, other=0)
    first_q = tl.load(q_begin + first_k)
    stop_q = tl.load(q_end + tl.minimum(first_k + BLOCK_N, num_k) - 1)

    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        for start in range(first_q, stop_q, BLOCK_M):
            inside_q = start + column < num_q
            at = tl.cast(start, tl.int64)
            q_at = q + at * q_row + head * q_head
            q_main = load_rows(q_at, column, q_row, inside_q, 0, min(C, C_MAIN), C_MAIN)
            score = matmul(k_main, tl.trans(q_main), PRECISION, UPCAST)
            if C_REST > 0:
                q_rest = load_rows(q_at, column, q_row, inside_q, C_MAIN, C - C_MAIN, C_REST)
                score += matmul(k_rest, tl.trans(q_rest), PRECISION, UPCAST)
            number = (at + column) * H + head
            row_lse = tl.load(lse + number, mask=inside_q, other=0.0) * LOG2_E
            row_delta = tl.load(delta + number, mask=inside_q, other=0.0)
            query = (start + column)[None, :]
            seen = (query >= seen_from[:, None]) & (query < seen_to[:, None])
            share = tl.where(seen, tl.exp2(score * (scale * LOG2_E) - row_lse[None, :]), 0.0)
            dout_block = load_rows(dout + (at * H + head) * U, column, H * U, inside_q, 0, U, U_POW2)
            dv_block += matmul(share.to(dout_block.dtype), dout_block, PRECISION, UPCAST)
            dshare = matmul(v_block, tl.trans(dout_block), PRECISION, UPCAST)
            dscore = (share * (dshare - row_delta[None, :])).to(q_main.dtype)
            dk_main += matmul(dscore, q_main, PRECISION, UPCAST)
            if C_REST > 0:
                dk_rest += matmul(dscore, q_rest, PRECISION, UPCAST)

    J: tl.constexpr = H // GROUP
    dk_base = dk + (first_k.to(tl.int64) * J + kv_head) * C
    store_rows(dk_base, row, J * C, inside_k, dk_main * scale, 0, min(C, C_MAIN), C_MAIN)
    if C_REST > 0:
        store_rows(dk_base, row, J * C, inside_k, dk_rest * scale, C_MAIN, C - C_MAIN, C_REST)
    store_rows(dv + (first_k.to(tl.int64) * J + kv_head) * U, row, J * U, inside_k, dv_block, 0, U, U_POW2)


@triton.jit
def queries_kernel(
    q, k, v, dout, lse, delta, begin, end, dq, num_q, num_k, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    C_MAIN: tl.constexpr, C_REST: tl.constexpr, U_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head."""
    head = tl.program_id(1)
    first_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    inside_q = first_q + row < num_q
    at = first_q.to(tl.int64)
    q_base = q + at * q_row + head * q_head
    k_base = k + (head // GROUP) * k_head
    v_base = v + (head // GROUP) * v_head
    q_main = load_rows(q_base, row, q_row, inside_q, 0, min(C, C_MAIN), C_MAIN)
    dq_main = tl.zeros((BLOCK_M, C_MAIN), tl.float32)
    if C_REST > 0:
        q_rest = load_rows(q_base, row, q_row, inside_q, C_MAIN, C - C_MAIN, C_REST)
        dq_rest = tl.zeros((BLOCK_M, C_REST), tl.float32)
    dout_block = load_rows(dout + (at * H + head) * U, row, H * U, inside_q, 0, U, U_POW2)
    number = (at + row) * H + head
    row_lse = tl.load(lse + number, mask=inside_q, other=0.0) * LOG2_E
    row_delta = tl.load(delta + number, mask=inside_q, other=0.0)
    sees_from = tl.load(begin + first_q + row, mask=inside_q, other=0)
    sees_to = tl.load(end + first_q + row, mask=inside_q, other=0)
    first_k = tl.load(begin + first_q)
    stop_k = tl.load(end + tl.minimum(first_q + BLOCK_M, num_q) - 1)

    for start in range(first_k, stop_k, BLOCK_N):
        inside_k = start + column < num_k
        k_at = k_base + tl.cast(start, tl.int64) * k_row
        k_main = load_rows(k_at, column, k_row, inside_k, 0, min(C, C_MAIN), C_MAIN)
        score = matmul(q_main, tl.trans(k_main), PRECISION, UPCAST)
        if C_REST > 0:
            k_rest = load_rows(k_at, column, k_row, inside_k, C_MAIN, C - C_MAIN, C_REST)
            score += matmul(q_rest, tl.trans(k_rest), PRECISION, UPCAST)
        key = (start + column)[None, :]
        seen = (key >= sees_from[:, None]) & (key < sees_to[:, None])
        share = tl.where(seen, tl.exp2(score * (scale * LOG2_E) - row_lse[:, None]), 0.0)
        v_at = v_base + tl.cast(start, tl.int64) * v_row
        v_block = load_rows(v_at, column, v_row, inside_k, 0, U, U_POW2)
        dshare = matmul(dout_block, tl.trans(v_block), PRECISION, UPCAST)
        dscore = (share * (dshare - row_delta[:, None])).to(k_main.dtype)
        dq_main += matmul(dscore, k_main, PRECISION, UPCAST)
        if C_REST > 0:
            dq_rest += matmul(dscore, k_rest, PRECISION, UPCAST)

    dq_base = dq + (at * H + head) * C
    store_rows(dq_base, row, H * C, inside_q, dq_main * scale, 0, min(C, C_MAIN), C_MAIN)
    if C_REST > 0:
        store_rows(dq_base, row, H * C, inside_q, dq_rest * scale, C_MAIN, C - C_MAIN, C_REST)


# ---- launches ----


@torch.library.custom_op("moefold::varlen_attention_backward", mutates_args=())
def varlen_backward(
    dout_SHU: Tensor,
    q_SHC: Tensor,
    k_XJC: Tensor,
    v_XJU: Tensor,
    out_SHU: Tensor,
    lse_SH: Tensor,
    begin_S: Tensor,
    end_S: Tensor,
    q_begin_X: Tensor,
    q_end_X: Tensor,
    scale: float,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in ``grad_dtype``, and delta [S, H], from which the gradient of sinks follows."""
    refuse_wide("attention", q_SHC, k_XJC, v_XJU)
    q_SHC, k_XJC, v_XJU = (entries_adjacent(x) for x in (q_SHC, k_XJC, v_XJU))
    dout_SHU, out_SHU, lse_SH = dout_SHU.contiguous(), out_SHU.contiguous(), lse_SH.contiguous()
    (num_q, heads), (num_k, kv_heads) = q_SHC.shape[:2], k_XJC.shape[:2]
    dq_SHC, dk_XJC, dv_XJU, delta_SH = _gradients(q_SHC, k_XJC, v_XJU, grad_dtype)
    if not num_q or not num_k or not heads:
        return dq_SHC.zero_(), dk_XJC.zero_(), dv_XJU.zero_(), delta_SH.zero_()
    constants = head_constants(q_SHC, k_XJC, v_XJU)
    strides = (*q_SHC.stride()[:2], *k_XJC.stride()[:2], *v_XJU.stride()[:2])
    inputs = (q_SHC, k_XJC, v_XJU, dout_SHU, lse_SH, delta_SH)
    delta_kernel[(triton.cdiv(num_q * heads, DELTA_ROWS),)](
        dout_SHU, out_SHU, delta_SH, num_q * heads, U=constants["U"], U_POW2=constants["U_POW2"], ROWS=DELTA_ROWS
    )
    block_m, block_n, warps, stages = tile_for(KEYS_TILE, q_SHC)
    keys_kernel[(triton.cdiv(num_k, block_n), kv_heads)](
        *inputs, q_begin_X, q_end_X, dk_XJC, dv_XJU, num_q, num_k, scale, *strides, **constants,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    block_m, block_n, warps, stages = tile_for(QUERIES_TILE, q_SHC)
    queries_kernel[(triton.cdiv(num_q, block_m), heads)](
        *inputs, begin_S, end_S, dq_SHC, num_q, num_k, scale, *strides, **constants,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq_SHC, dk_XJC, dv_XJU, delta_SH


@varlen_backward.register_fake
def _shapes(
    dout_SHU: Tensor,
    q_SHC: Tensor,
    k_XJC: Tensor,
    v_XJU: Tensor,
    out_SHU: Tensor,
    lse_SH: Tensor,
    begin_S: Tensor,
    end_S: Tensor,
    q_begin_X: Tensor,
    q_end_X: Tensor,
    scale: float,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(q_SHC, k_XJC, v_XJU, grad_dtype)


def _gradients(
    q_SHC: Tensor, k_XJC: Tensor, v_XJU: Tensor, grad_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape, dtype=grad_dtype) for x in (q_SHC, k_XJC, v_XJU))
    return dq, dk, dv, q_SHC.new_empty(q_SHC.shape[:2], dtype=torch.float32)


# ---- builds ----


def _builds(model: str, config: ModelConfig) -> tuple[Build, ...]:
    constants = model_constants(config)
    inputs = ARGUMENTS | {"dout": "*bf16", "lse": "*fp32", "delta": "*fp32"}
    of_keys = {"q_begin": "*i32", "q_end": "*i32", "dk": "*bf16", "dv": "*bf16"}
    of_queries = {"begin": "*i32", "end": "*i32", "dq": "*bf16"}
    found = []
    for what, kernel, more, tile, registers in (
        ("keys", keys_kernel, of_keys, KEYS_TILE, 248),
        ("queries", queries_kernel, of_queries, QUERIES_TILE, 200),
    ):
        block_m, block_n, warps, stages = tile
        found.append(
            Build(
                f"attention backward, {what}, {model}", kernel, inputs | more,
                constants | {"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages,
                registers=registers,
            )
        )  # fmt: skip
    return tuple(found)


_DELTA_BUILD = Build(
    "attention backward, delta", delta_kernel,
    {"dout": "*bf16", "out": "*bf16", "delta": "*fp32", "num_rows": "i32"},
    {"U": 128, "U_POW2": 128, "ROWS": DELTA_ROWS}, registers=48,
)  # fmt: skip

BUILDS = (_DELTA_BUILD, *(build for name, model in MODELS.items() for build in _builds(name, model)))
