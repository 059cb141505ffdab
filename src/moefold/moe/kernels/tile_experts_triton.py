"""Grouped GEMMs of experts in progress while rows arrive or leave, tile by tile (MegaScale-MoE, section 4.2).

    all-gather + scatter + grouped GEMM        a tile selects its rows among those of all ranks, and waits for the ranks
                                               that they come from
    grouped GEMM + gather + reduce-scatter     finished tiles are counted by the rank whose tokens they have; a second
                                               kernel, of few programs, sums a token's rows once they are there and
                                               stores the sum in the memory of the token's rank

An expert's rows are sorted by the rank that they come from, and ranks by when their rows arrive: this rank's own first,
then rank + 1. So a tile depends on one or two ranks, and tiles run in the order in which they can (``plan_tiles``, on
the device: the host knows bounds alone).

The first GEMM has the gated activation in its epilogue: a program multiplies the same rows by a tile of gates and by
its tile of ups, activates, multiplies by the rows' probs and rounds once; with ``cast`` it narrows the tile as well,
for the second GEMM. Gates and ups are written only where a backward needs them.

References are the exchange, `sequential` grouped GEMMs, and ``weighted_activation``. Interpreted on CPUs between
processes that share memory, and compiled; never run on a GPU, and no layer of a model calls them.

Shapes: S tokens of all ranks, P rows by expert, e experts of this rank, B tiles of rows, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.comm.peer_memory import PeerMemory
from moefold.config.casts import Cast
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.moe.kernels.tile_exchange_triton import multiply_rows, signal, sum_arrived, wait_for
from moefold.ops.kernels.aot_specs import MODELS, Build, moe_of, refuse_wide
from moefold.ops.kernels.attention_triton import matmul
from moefold.ops.kernels.swiglu_triton import activate, is_clamped
from moefold.precision.cast_kernels.cast_triton import CODE_TYPE, SCALE_TYPE
from moefold.precision.cast_kernels.narrow_numbers_triton import cast_tile
from moefold.precision.quantize import FLOAT8, SCALE_DTYPES, Quantized

# Rows, columns, what is multiplied at a time; for 16-bit inputs. Columns of gates, and as many of ups.
BLOCK_P, BLOCK_N, BLOCK_K, BLOCK_F = 128, 128, 64, 64
# Programs that send sums, and entries that one reads at a time.
SENDERS, BLOCK_L = 16, 512


class SortedRows(NamedTuple):
    """Rows by expert, and an expert's by when they arrive: their tokens (-1: past the last row), their places among
    the assignments [S, K], and how many ranks' rows arrive before theirs."""

    token_P: Tensor
    place_P: Tensor
    step_P: Tensor
    rows_per_expert_e: Tensor


class TilePlan(NamedTuple):
    """Of each tile its expert, its rows [first, end), none past the last tile, and steps of its first and last row."""

    expert_B: Tensor
    first_B: Tensor
    end_B: Tensor
    first_step_B: Tensor
    last_step_B: Tensor


def sort_rows(
    expert_SK: Tensor, sizes: Sequence[int], rank: int, experts: tuple[int, int], num_rows: int
) -> SortedRows:
    """``experts``: this rank's first, and how many it has. ``num_rows``: at least as many as there are, and not 0."""
    device, num_ranks, (first, count) = expert_SK.device, len(sizes), experts
    tokens, source = torch.arange(len(expert_SK), device=device), torch.arange(num_ranks, device=device)
    step_S = ((source - rank) % num_ranks).repeat_interleave(
        torch.tensor(sizes, device=device), output_size=len(expert_SK)
    )
    local_SK = expert_SK - first
    mine_SK = (local_SK >= 0) & (local_SK < count)
    key_SK = torch.where(mine_SK, local_SK * num_ranks + step_S[:, None], count * num_ranks).flatten()
    key_P, place_P = key_SK.sort(stable=True)
    key_P, place_P = key_P[:num_rows], place_P[:num_rows]
    token_P = tokens[place_P // expert_SK.shape[1]].where(key_P < count * num_ranks, -1)
    # Of experts, and of what is no expert's: that is cut off.
    rows_per_expert = torch.zeros(count + 1, dtype=torch.int64, device=device)
    rows_per_expert.scatter_add_(
        0, local_SK.where(mine_SK, count).flatten(), rows_per_expert.new_ones(expert_SK.numel())
    )
    return SortedRows(token_P.int(), place_P, (key_P % num_ranks).int(), rows_per_expert[:count])


def plan_tiles(rows: SortedRows, block: int) -> TilePlan:
    """As many tiles as there can be, in the order of the last rank that each waits for."""
    num_rows, num_experts = len(rows.token_P), len(rows.rows_per_expert_e)
    ends_e = rows.rows_per_expert_e.cumsum(0)
    tiles_e = (rows.rows_per_expert_e + block - 1) // block
    tile_ends_e = tiles_e.cumsum(0)
    tile_B = torch.arange(num_rows // block + num_experts, device=ends_e.device)
    expert_B = torch.searchsorted(tile_ends_e, tile_B, right=True)
    is_tile_B, expert_B = expert_B < num_experts, expert_B.clamp(max=num_experts - 1)
    before_B = tile_B - (tile_ends_e - tiles_e)[expert_B]
    first_B = ((ends_e - rows.rows_per_expert_e)[expert_B] + before_B * block).where(is_tile_B, 0)
    end_B = torch.minimum(first_B + block, ends_e[expert_B]).where(is_tile_B, 0)
    first_step_B = rows.step_P[first_B]
    last_step_B = rows.step_P[(end_B - 1).clamp(min=0)]
    order_B = last_step_B.long().where(is_tile_B, num_rows).argsort(stable=True)
    return TilePlan(*(x[order_B].int() for x in (expert_B, first_B, end_B, first_step_B, last_step_B)))


# ---- kernels ----


@triton.jit
def arriving_experts_kernel(
    x_SL, weight_eGL, gate_up_PG, hidden_PF, codes_PF, scales_Pc, token_P, prob_P, expert_B, first_B, end_B,
    first_step_B, last_step_B, arrived_W, wanted, rank, num_ranks, F, L,
    GATE_UP: tl.constexpr, WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr,
    ELEMENT: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The first GEMM and the activation. ``C``: values with one scale, 0 where nothing is narrowed."""
    tile = tl.program_id(1)
    first, end = tl.load(first_B + tile), tl.load(end_B + tile)
    if first < end:
        for step in range(tl.load(first_step_B + tile), tl.load(last_step_B + tile) + 1):
            wait_for(arrived_W + (rank + step) % num_ranks, wanted)
        row, f = first + tl.arange(0, BLOCK_P), tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
        inside, k = row < end, tl.arange(0, BLOCK_K)
        token = tl.load(token_P + row, mask=inside, other=0).to(tl.int64)
        weight = weight_eGL + tl.load(expert_B + tile).to(tl.int64) * (2 * F * L)
        x_at = x_SL + token[:, None] * L + k[None, :]
        gate_at = weight + f[None, :].to(tl.int64) * L + k[:, None]
        up_at = gate_at + F.to(tl.int64) * L
        gate, up = tl.zeros((BLOCK_P, BLOCK_F), tl.float32), tl.zeros((BLOCK_P, BLOCK_F), tl.float32)
        for start in range(0, L, BLOCK_K):
            there = start + k < L
            x = tl.load(x_at, mask=inside[:, None] & there[None, :], other=0.0)
            mask = there[:, None] & (f < F)[None, :]
            gate += matmul(x, tl.load(gate_at, mask=mask, other=0.0), PRECISION, UPCAST)
            up += matmul(x, tl.load(up_at, mask=mask, other=0.0), PRECISION, UPCAST)
            x_at += BLOCK_K
            gate_at += BLOCK_K
            up_at += BLOCK_K
        row, inside_f = row.to(tl.int64), inside[:, None] & (f < F)[None, :]
        # As when the two are written and read again.
        gate, up = gate.to(hidden_PF.dtype.element_ty), up.to(hidden_PF.dtype.element_ty)
        if GATE_UP:
            tl.store(gate_up_PG + row[:, None] * (2 * F) + f[None, :], gate, mask=inside_f)
            tl.store(gate_up_PG + row[:, None] * (2 * F) + F + f[None, :], up, mask=inside_f)
        act, _, _ = activate(gate.to(tl.float32), up.to(tl.float32), CLAMPED)
        if WEIGHTED:
            act *= tl.load(prob_P + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        hidden = act.to(hidden_PF.dtype.element_ty)
        tl.store(hidden_PF + row[:, None] * F + f[None, :], hidden, mask=inside_f)
        if C > 0:
            code, scale, _ = cast_tile(
                tl.where(inside_f, hidden.to(tl.float32), 0.0), 0.0, 0, ELEMENT, RULE, 1, C, False
            )
            c = tl.program_id(0) * (BLOCK_F // C) + tl.arange(0, BLOCK_F // C)
            num_c = tl.cdiv(F, C)
            tl.store(codes_PF + row[:, None] * F + f[None, :], code, mask=inside_f)
            place = scales_Pc + row[:, None] * num_c + c[None, :]
            tl.store(place, scale.to(scales_Pc.dtype.element_ty), mask=inside[:, None] & (c < num_c)[None, :])


@triton.jit
def counted_experts_kernel(
    hidden_PF, weight_eLF, out_PL, expert_B, first_B, end_B, first_step_B, last_step_B, finished_W, L, F,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The second GEMM; ``finished_W`` counts programs by the steps of their rows."""
    tile, column = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, end = tl.load(first_B + tile), tl.load(end_B + tile)
    if first < end:
        row = (first + tl.arange(0, BLOCK_P)).to(tl.int64)
        weight = weight_eLF + tl.load(expert_B + tile).to(tl.int64) * L * F
        acc = multiply_rows(
            tl.zeros((BLOCK_P, BLOCK_N), tl.float32), hidden_PF, row, row < end, F, weight, column, L, F, 1, F,
            BLOCK_K, PRECISION, UPCAST,
        )  # fmt: skip
        place = out_PL + row[:, None] * L + column[None, :]
        tl.store(place, acc.to(out_PL.dtype.element_ty), mask=(row < end)[:, None] & (column < L)[None, :])
        tl.debug_barrier()
        for step in range(tl.load(first_step_B + tile), tl.load(last_step_B + tile) + 1):
            tl.atomic_add(finished_W + step, 1, sem="release", scope="gpu")


@triton.jit
def sums_to_ranks_kernel(
    out_PL, row_SK, sent_type, buffers_W, counters_W, first_W, finished_W, wanted_W, rank, num_ranks, L,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's rows, in the order of its choices, summed in float32, into this rank's part at the token's rank. The
    order of destinations is that of steps: the tokens whose tiles were first."""
    for step in range(num_ranks):
        destination = (rank + step) % num_ranks
        wait_for(finished_W + step, tl.load(wanted_W + step))
        first, end = tl.load(first_W + destination), tl.load(first_W + destination + 1)
        buffer = tl.load(buffers_W + destination).to(tl.pointer_type(sent_type.dtype.element_ty))
        part = buffer + rank.to(tl.int64) * (end - first) * L
        for token in range(first + tl.program_id(0), end, tl.num_programs(0)):
            for start in range(0, L, BLOCK):
                column = start + tl.arange(0, BLOCK)
                acc = tl.zeros((BLOCK,), tl.float32)
                for k in tl.static_range(K):
                    row = tl.load(row_SK + token * K + k).to(tl.int64)
                    acc += tl.load(out_PL + row * L + column, mask=(column < L) & (row >= 0), other=0.0).to(tl.float32)
                place = part + (token - first) * L.to(tl.int64) + column
                tl.store(place, acc.to(sent_type.dtype.element_ty), mask=column < L)
        signal(counters_W, destination, rank)


# ---- launches ----


class FirstGemm(NamedTuple):
    """Gates and ups where they were asked for; codes and scales where there is a cast."""

    hidden_PF: Tensor
    gate_up_PG: Tensor | None
    narrow: Quantized | None
    gathered_SL: Tensor


def gather_experts(
    memory: PeerMemory, x_tL: Tensor, sizes: Sequence[int], rows: SortedRows, prob_P: Tensor | None,
    weight_eGL: Tensor, activation: str = "swiglu", keep_gate_up: bool = True, cast: Cast | None = None,
) -> FirstGemm:  # fmt: skip
    """Rows of all ranks, through the first GEMM of this rank's experts and the activation; weighted by probs if given.
    Rows past the last are left as they are."""
    refuse_wide("gather and experts", x_tL, weight_eGL)
    num_rows, hidden_dim = len(rows.token_P), weight_eGL.shape[-2] // 2
    x_SL = memory.gather_rows(x_tL, sizes)
    hidden_PF = x_tL.new_empty(num_rows, hidden_dim)
    gate_up_PG = x_tL.new_empty(num_rows, 2 * hidden_dim) if keep_gate_up else None
    narrow, narrow_outputs = None, (hidden_PF, hidden_PF)
    if cast is not None:
        codes_PF = hidden_PF.new_empty(hidden_PF.shape, dtype=FLOAT8[cast.element])
        scales_Pc = hidden_PF.new_empty(cast.scale_shape(hidden_PF.shape), dtype=SCALE_DTYPES[cast.scale])
        narrow, narrow_outputs = Quantized(codes_PF, scales_Pc, None, cast), (codes_PF, scales_Pc)
    plan = plan_tiles(rows, BLOCK_P)
    arriving_experts_kernel[triton.cdiv(hidden_dim, BLOCK_F), len(plan.expert_B)](
        x_SL, weight_eGL, hidden_PF if gate_up_PG is None else gate_up_PG, hidden_PF, *narrow_outputs, rows.token_P,
        hidden_PF if prob_P is None else prob_P, *plan, memory.arrived_W, memory.use, memory.rank, memory.size,
        hidden_dim, x_tL.shape[1], GATE_UP=keep_gate_up, WEIGHTED=prob_P is not None, CLAMPED=is_clamped(activation),
        **_cast_constants(cast), **_constants(x_tL, BLOCK_F=BLOCK_F),
    )  # fmt: skip
    return FirstGemm(hidden_PF, gate_up_PG, narrow, x_SL)


def experts_scatter(
    memory: PeerMemory, hidden_PF: Tensor, sizes: Sequence[int], rows: SortedRows, top_k: int, weight_eLF: Tensor,
    sent: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Through the second GEMM, and every token's rows summed at its rank: [t, L]; and rows [P, L] before the sum."""
    refuse_wide("experts and reduce-scatter", hidden_PF, weight_eLF)
    num_rows, dim, num_tokens = len(hidden_PF), weight_eLF.shape[-2], sum(sizes)
    parts = memory.next_parts((memory.size, sizes[memory.rank], dim), sent)
    plan, columns = plan_tiles(rows, BLOCK_P), triton.cdiv(dim, BLOCK_N)
    finished_W, out_PL = torch.zeros_like(memory.arrived_W), hidden_PF.new_empty(num_rows, dim)
    # Programs by step: a tile counts for every step between those of its first and its last row.
    steps_W = torch.arange(memory.size, device=hidden_PF.device)[:, None]
    holds_WB = (plan.first_step_B <= steps_W) & (steps_W <= plan.last_step_B) & (plan.first_B < plan.end_B)
    wanted_W = (columns * holds_WB.sum(1)).int()
    row_P = torch.arange(num_rows, dtype=torch.int32, device=hidden_PF.device).where(rows.token_P >= 0, -1)
    row_SK = row_P.new_full((num_tokens, top_k), -1).view(-1).scatter_(0, rows.place_P, row_P)
    multiply = partial(
        counted_experts_kernel[columns, len(plan.expert_B)],
        hidden_PF, weight_eLF, out_PL, *plan, finished_W, dim, hidden_PF.shape[1],
        **_constants(hidden_PF, BLOCK_N=BLOCK_N),
    )  # fmt: skip
    send = partial(
        sums_to_ranks_kernel[(SENDERS,)],
        out_PL, row_SK, hidden_PF.new_empty(0, dtype=sent), memory.buffers_W, memory.counters_W, memory.starts(sizes),
        finished_W, wanted_W, memory.rank, memory.size, dim, K=top_k, BLOCK=BLOCK_L,
    )  # fmt: skip
    if hidden_PF.is_cuda:
        memory.beside(send, multiply)
    else:
        # The interpreter runs one kernel at a time.
        multiply()
        send()
    return sum_arrived(memory, parts, hidden_PF.new_empty(sizes[memory.rank], dim), SENDERS), out_PL


def _cast_constants(cast: Cast | None) -> dict[str, object]:
    if cast is None:
        return {"ELEMENT": "", "RULE": "", "C": 0}
    if cast.block is None or cast.block[0] != 1 or BLOCK_F % cast.block[1]:
        raise ValueError(f"{cast}: a tile is narrowed along features, by blocks that fill {BLOCK_F} columns")
    return {"ELEMENT": cast.element, "RULE": cast.scale, "C": cast.block[1]}


def _constants(x: Tensor, **blocks: int) -> dict[str, object]:
    wide = x.dtype == torch.float32
    return blocks | {
        "BLOCK_P": BLOCK_P, "BLOCK_K": BLOCK_K // 2 if wide else BLOCK_K, "PRECISION": "ieee" if wide else "tf32",
        "UPCAST": x.device.type == "cpu", "num_warps": 8, "num_stages": 3,
    }  # fmt: skip


# ---- builds ----

_BLOCKS = {"BLOCK_P": BLOCK_P, "BLOCK_K": BLOCK_K, "PRECISION": "tf32", "UPCAST": False}
_TILES = dict.fromkeys(TilePlan._fields, "*i32")
_NUMBERS = {"rank": "i32", "num_ranks": "i32", "L": "i32:16"}


def _first_gemm(model: str, name: str, cast: Cast | None, gate_up: bool) -> Build:
    narrow = {"codes_PF": "*bf16", "scales_Pc": "*bf16"}
    if cast is not None:
        narrow = {"codes_PF": CODE_TYPE[cast.element], "scales_Pc": SCALE_TYPE.get(cast.scale, "*u8")}
    return Build(
        f"all-gather, scatter and experts' first GEMM with its activation{name}, {model}", arriving_experts_kernel,
        {"x_SL": "*bf16", "weight_eGL": "*bf16", "gate_up_PG": "*bf16", "hidden_PF": "*bf16", **narrow,
         "token_P": "*i32", "prob_P": "*fp32", **_TILES, "arrived_W": "*i32", "wanted": "i32", "F": "i32:16",
         **_NUMBERS},
        {"GATE_UP": gate_up, "WEIGHTED": True, "CLAMPED": False, **_cast_constants(cast), "BLOCK_F": BLOCK_F,
         **_BLOCKS},
        num_warps=8, page="kernels" if cast is None else "precision",
    )  # fmt: skip


def _builds(model: str) -> tuple[Build, ...]:
    return (
        _first_gemm(model, "", None, gate_up=True),
        Build(
            f"experts' second GEMM, counted, {model}", counted_experts_kernel,
            {"hidden_PF": "*bf16", "weight_eLF": "*bf16", "out_PL": "*bf16", **_TILES, "finished_W": "*i32",
             "L": "i32:16", "F": "i32:16"},
            {"BLOCK_N": BLOCK_N, **_BLOCKS}, num_warps=8,
        ),
        Build(
            f"sums of experts' rows to ranks, {model}", sums_to_ranks_kernel,
            {"out_PL": "*bf16", "row_SK": "*i32", "sent_type": "*fp32", "buffers_W": "*i64", "counters_W": "*i64",
             "first_W": "*i32", "finished_W": "*i32", "wanted_W": "*i32", **_NUMBERS},
            {"K": moe_of(MODELS[model]).top_k, "BLOCK": BLOCK_L}, num_warps=4,
        ),
    )  # fmt: skip


BUILDS = (
    *_builds("DeepSeek-V3"),
    _first_gemm("DeepSeek-V3", " and a cast to mxfp8", PRECISION_RECIPES["mxfp8"].casts.x_fprop, gate_up=True),
)
