"""Attention over packed documents, forward: one launch, whatever the number of documents.

Each query sees one span of key rows (``moefold.attention.packed_mask``). A program has a block of queries of one head
and goes through the keys from the first that its first query sees to the last that its last query sees, with an online
softmax: a running maximum, a running sum that is rescaled when the maximum grows, and the weighted values likewise.
Blocks of queries do not end with documents: short documents share a block, and a mask keeps them apart.

The head dim of queries and keys is split into a power of two and a rest, each with a matmul of its own: 192 is 128 + 64
and not 256. Values have their own dim. A sink adds exp(sink) to the sum in the end. Nothing is padded in memory.

Sums and scores are float32. Exponentials are powers of 2, the GPU's own instruction: scores are scaled by log2(e).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.attention import MLAConfig
from moefold.config.model import ModelConfig
from moefold.ops.kernels.aot_specs import MODELS, Build, refuse_wide

# The smallest dim that tl.dot takes.
MIN_DIM = 16
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Queries and keys of a block, warps, stages; for 16-bit inputs.
Tile = tuple[int, int, int, int]
FORWARD_TILE: Tile = (128, 64, 8, 2)


# ---- shared by forward and backward ----


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """float32 of a @ b. The interpreter has no 16-bit matmul."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load_rows(base, row, stride, inside, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Entries FIRST to FIRST + SIZE of some rows, and zeros up to BLOCK."""
    entry = tl.arange(0, BLOCK)
    mask = inside[:, None]
    if SIZE < BLOCK:
        mask = mask & (entry < SIZE)[None, :]
    return tl.load(base + FIRST + row[:, None] * stride + entry[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, stride, inside, x, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.arange(0, BLOCK)
    mask = inside[:, None]
    if SIZE < BLOCK:
        mask = mask & (entry < SIZE)[None, :]
    place = base + FIRST + row[:, None] * stride + entry[None, :]
    tl.store(place, x.to(base.dtype.element_ty), mask=mask)


def head_constants(q_SHC: Tensor, k_XJC: Tensor, v_XJU: Tensor) -> dict[str, int | bool | str]:
    """Sizes that are compiled into the kernels."""
    (_, heads, dim), kv_heads = q_SHC.shape, k_XJC.shape[1]
    precision = "ieee" if q_SHC.dtype == torch.float32 else "tf32"
    return dim_constants(heads, kv_heads, dim, v_XJU.shape[-1]) | {
        "PRECISION": precision,
        "UPCAST": q_SHC.device.type == "cpu",
    }


def dim_constants(heads: int, kv_heads: int, dim: int, value_dim: int) -> dict[str, int | bool | str]:
    main = max(MIN_DIM, 1 << (dim.bit_length() - 1))
    rest = max(dim - main, 0)
    return {
        "H": heads,
        "GROUP": heads // kv_heads,
        "C": dim,
        "U": value_dim,
        "C_MAIN": main,
        "C_REST": max(MIN_DIM, triton.next_power_of_2(rest)) if rest else 0,
        "U_POW2": max(MIN_DIM, triton.next_power_of_2(value_dim)),
    }


def tile_for(tile: Tile, x: Tensor) -> Tile:
    """Blocks of float32 take twice the shared memory, so they are half as long."""
    block_m, block_n, warps, stages = tile
    if x.element_size() == 2:
        return tile
    return max(MIN_DIM, block_m // 2), max(MIN_DIM, block_n // 2), warps, 1


def entries_adjacent(x: Tensor) -> Tensor:
    """Rows and heads may have any stride; the entries of a head must lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# ---- the kernel ----


@triton.jit
def forward_kernel(
    q, k, v, sinks, begin, end, out, lse, num_q, num_k, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    H: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    C_MAIN: tl.constexpr, C_REST: tl.constexpr, U_POW2: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head. The last blocks see most keys and start first."""
    head = tl.program_id(1)
    first_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    inside_q = first_q + row < num_q
    # Offsets of blocks are 64-bit numbers, those inside a block 32-bit ones.
    q_base = q + first_q.to(tl.int64) * q_row + head * q_head
    k_base = k + (head // GROUP) * k_head
    v_base = v + (head // GROUP) * v_head
    q_main = load_rows(q_base, row, q_row, inside_q, 0, min(C, C_MAIN), C_MAIN)
    if C_REST > 0:
        q_rest = load_rows(q_base, row, q_row, inside_q, C_MAIN, C - C_MAIN, C_REST)
    sees_from = tl.load(begin + first_q + row, mask=inside_q, other=0)
    sees_to = tl.load(end + first_q + row, mask=inside_q, other=0)
    first_k = tl.load(begin + first_q)
    stop_k = tl.load(end + tl.minimum(first_q + BLOCK_M, num_q) - 1)

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, U_POW2), tl.float32)
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
        score = tl.where(seen, score * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen no key yet: any finite number makes its shares exp2(-inf) = 0.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - finite[:, None])
        rescale = tl.exp2(highest - finite)
        total = total * rescale + tl.sum(share, 1)
        v_at = v_base + tl.cast(start, tl.int64) * v_row
        v_block = load_rows(v_at, column, v_row, inside_k, 0, U, U_POW2)
        acc = acc * rescale[:, None] + matmul(share.to(v_block.dtype), v_block, PRECISION, UPCAST)
        highest = higher

    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        higher = tl.maximum(highest, sink)
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.exp2(sink - higher)
        acc = acc * rescale[:, None]
        highest = higher
    # Rows that see nothing have total 0: output 0, log-sum-exp -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = acc / divisor[:, None]
    row_lse = tl.where(total == 0.0, float("-inf"), (highest + tl.log2(divisor)) * LN_2)
    out_base = out + (first_q.to(tl.int64) * H + head) * U
    store_rows(out_base, row, H * U, inside_q, acc, 0, U, U_POW2)
    tl.store(lse + (first_q + row).to(tl.int64) * H + head, row_lse, mask=inside_q)


@torch.library.custom_op("moefold::varlen_attention", mutates_args=())
def varlen_forward(
    q_SHC: Tensor,
    k_XJC: Tensor,
    v_XJU: Tensor,
    sinks_H: Tensor | None,
    begin_S: Tensor,
    end_S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [S, H, U] and log-sum-exp [S, H]. The reference is ``moefold.attention.varlen_reference``."""
    refuse_wide("attention", q_SHC, k_XJC, v_XJU)
    q_SHC, k_XJC, v_XJU = (entries_adjacent(x) for x in (q_SHC, k_XJC, v_XJU))
    out_SHU, lse_SH = _outputs(q_SHC, v_XJU)
    if not out_SHU.numel():
        return out_SHU, lse_SH
    block_m, block_n, warps, stages = tile_for(FORWARD_TILE, q_SHC)
    forward_kernel[(triton.cdiv(q_SHC.shape[0], block_m), q_SHC.shape[1])](
        q_SHC, k_XJC, v_XJU, lse_SH if sinks_H is None else sinks_H, begin_S, end_S, out_SHU, lse_SH,
        q_SHC.shape[0], k_XJC.shape[0], scale, *q_SHC.stride()[:2], *k_XJC.stride()[:2], *v_XJU.stride()[:2],
        **head_constants(q_SHC, k_XJC, v_XJU), SINKS=sinks_H is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_SHU, lse_SH


@varlen_forward.register_fake
def _shapes(
    q_SHC: Tensor,
    k_XJC: Tensor,
    v_XJU: Tensor,
    sinks_H: Tensor | None,
    begin_S: Tensor,
    end_S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _outputs(q_SHC, v_XJU)


def _outputs(q_SHC: Tensor, v_XJU: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads = q_SHC.shape[:2]
    return q_SHC.new_empty(tokens, heads, v_XJU.shape[-1]), q_SHC.new_empty(tokens, heads, dtype=torch.float32)


# ---- builds ----

ARGUMENTS = {
    **dict.fromkeys(("q", "k", "v"), "*bf16"),
    **dict.fromkeys(("num_q", "num_k"), "i32"),
    **dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "v_row", "v_head"), "i32:16"),
    "scale": "fp32",
}


def model_constants(model: ModelConfig) -> dict[str, int | bool | str]:
    """Of one rank with all heads."""
    config = model.attention
    if isinstance(config, MLAConfig):
        sizes = config.num_heads, config.num_heads, config.nope_dim + config.rope_dim, config.value_dim
    else:
        sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim
    return dim_constants(*sizes) | {"PRECISION": "tf32", "UPCAST": False}


def _build(model: str, config: ModelConfig) -> Build:
    block_m, block_n, warps, stages = FORWARD_TILE
    constants = model_constants(config) | {"SINKS": False, "BLOCK_M": block_m, "BLOCK_N": block_n}
    pointers = {"sinks": "*fp32", "begin": "*i32", "end": "*i32", "out": "*bf16", "lse": "*fp32"}
    return Build(
        f"attention, {model}",
        forward_kernel,
        ARGUMENTS | pointers,
        constants,
        num_warps=warps,
        num_stages=stages,
        registers=232,
    )


BUILDS = tuple(_build(name, model) for name, model in MODELS.items())
