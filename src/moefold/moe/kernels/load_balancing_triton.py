"""Statistics that balance losses need of a microbatch, in one read of the logits.

Every program sums its own tokens and writes a row per set of tokens, the sum of z after those of the experts; the rows
of all programs are summed afterwards, in their order. No program adds to memory that another one writes, so the same
logits give the same bits. The tokens of a set are mostly contiguous: a program visits only the sets from its lowest to
its highest, and rows of the others are zero before. Backward recomputes the probabilities.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe.kernels.moe_references import BalanceStats
from moefold.ops.kernels.aot_specs import MODELS, Build, Traffic, moe_of, refuse_wide

# Logits that one program of 4 warps holds at a time, and the number of tiles of tokens that it goes through.
BLOCK = 1024
TILES = 16


@triton.jit
def _probabilities(logit_nm, SOFTMAX: tl.constexpr):
    """Each token's scores and their sum; the probs are the quotient. A column of -inf has prob 0."""
    if SOFTMAX:
        score_nm = tl.exp(logit_nm - tl.max(logit_nm, 1)[:, None])
    else:
        score_nm = 1.0 / (1.0 + tl.exp(-logit_nm))
    return score_nm, tl.sum(score_nm, 1)


@triton.jit
def _log_sum_exp(logit_nm):
    most_n = tl.max(logit_nm, 1)
    return most_n + tl.log(tl.sum(tl.exp(logit_nm - most_n[:, None]), 1))


@triton.jit
def _sum_stats(
    logits_tE, expert_tK, set_t, count_BQE, sum_BQE1, num_tokens, num_sets,
    E: tl.constexpr, E_POW2: tl.constexpr, K: tl.constexpr, SETS: tl.constexpr, SOFTMAX: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    expert_m = tl.arange(0, E_POW2)
    inside_m = expert_m < E
    first = tl.program_id(0) * BLOCK_N * TILES
    lowest, highest = 0, 0
    if SETS:
        own = first + tl.arange(0, BLOCK_N * TILES)
        set_N = tl.load(set_t + own, mask=own < num_tokens, other=-1).to(tl.int32)
        lowest = tl.min(tl.where(set_N < 0, num_sets, set_N), 0)
        highest = tl.max(set_N, 0)
    for which in range(lowest, highest + 1):
        count_m = tl.zeros([E_POW2], tl.int32)
        sum_m = tl.zeros([E_POW2], tl.float32)
        z_n = tl.zeros([BLOCK_N], tl.float32)
        for tile in range(TILES):
            token_n = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
            row_n = tl.minimum(token_n, num_tokens - 1).to(tl.int64)
            real_n = token_n < num_tokens
            if SETS:
                real_n = real_n & (tl.load(set_t + row_n) == which)
            place_nm = row_n[:, None] * E + expert_m[None, :]
            logit_nm = tl.load(logits_tE + place_nm, mask=inside_m[None, :], other=-float("inf")).to(tl.float32)
            score_nm, total_n = _probabilities(logit_nm, SOFTMAX)
            sum_m += tl.sum(tl.where(real_n[:, None], score_nm / total_n[:, None], 0.0), 0)
            lse_n = _log_sum_exp(logit_nm)
            z_n += tl.where(real_n, lse_n * lse_n, 0.0)
            for k in tl.static_range(K):
                found_n = tl.load(expert_tK + row_n * K + k).to(tl.int32)
                hit_nm = (found_n[:, None] == expert_m[None, :]) & real_n[:, None]
                count_m += tl.sum(hit_nm.to(tl.int32), 0)
        row = tl.program_id(0).to(tl.int64) * num_sets + which
        tl.store(count_BQE + row * E + expert_m, count_m, mask=inside_m)
        tl.store(sum_BQE1 + row * (E + 1) + expert_m, sum_m, mask=inside_m)
        tl.store(sum_BQE1 + row * (E + 1) + E, tl.sum(z_n, 0))


@triton.jit
def _sum_stats_backward(
    logits_tE, set_t, grad_prob_QE, grad_z_Q, grad_logits_tE, num_tokens,
    E: tl.constexpr, E_POW2: tl.constexpr, SETS: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK_N: tl.constexpr,
    PROB: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """With p = s / sum(s): ds = (g - sum(g p)) / sum(s); and d lse = softmax.

    A loss asked for the first with PROB, for the second with Z.
    """
    expert_m = tl.arange(0, E_POW2)
    inside_m = expert_m < E
    token_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(token_n, num_tokens - 1).to(tl.int64)
    which_n = tl.load(set_t + row_n) if SETS else tl.zeros([BLOCK_N], tl.int64)
    real_n = which_n >= 0
    place_nm = row_n[:, None] * E + expert_m[None, :]
    logit_nm = tl.load(logits_tE + place_nm, mask=inside_m[None, :], other=-float("inf")).to(tl.float32)
    out_nm = tl.zeros_like(logit_nm)
    if PROB:
        grad_place_nm = which_n[:, None] * E + expert_m[None, :]
        grad_nm = tl.load(grad_prob_QE + grad_place_nm, mask=real_n[:, None] & inside_m[None, :], other=0.0)
        score_nm, total_n = _probabilities(logit_nm, SOFTMAX)
        p_nm = score_nm / total_n[:, None]
        out_nm = p_nm * (grad_nm - tl.sum(grad_nm * p_nm, 1)[:, None])
        if not SOFTMAX:
            out_nm = out_nm * (1.0 - score_nm)
    if Z:
        grad_z_n = tl.load(grad_z_Q + which_n, mask=real_n, other=0.0)
        lse_n = _log_sum_exp(logit_nm)
        out_nm += (2.0 * grad_z_n * lse_n)[:, None] * tl.exp(logit_nm - lse_n[:, None])
    inside_nm = (token_n < num_tokens)[:, None] & inside_m[None, :]
    tl.store(grad_logits_tE + place_nm, out_nm.to(grad_logits_tE.dtype.element_ty), mask=inside_nm)


def balance_stats(
    logits_tE: Tensor, expert_tK: Tensor, set_t: Tensor | None, num_sets: int, kind: Literal["softmax", "sigmoid"]
) -> BalanceStats:
    """``set_t`` is each token's set, -1 for padding; None puts all into set 0."""
    refuse_wide("balance", logits_tE)
    return BalanceStats(*_BalanceStats.apply(logits_tE, expert_tK, set_t, num_sets, kind == "softmax"))


class _BalanceStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_tE: Tensor, expert_tK: Tensor, set_t: Tensor | None, num_sets: int, softmax: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_tE, expert_tK = logits_tE.contiguous(), expert_tK.contiguous()
        num_tokens, num_experts = logits_tE.shape
        constants = _constants(num_experts, softmax, set_t is not None)
        blocks = triton.cdiv(num_tokens, constants["BLOCK_N"] * TILES)
        # Every program writes the row of an only set.
        rows = logits_tE.new_empty if set_t is None else logits_tE.new_zeros
        sum_BQE1 = rows(blocks, num_sets, num_experts + 1, dtype=torch.float32)
        count_BQE = rows(blocks, num_sets, num_experts, dtype=torch.int32)
        _sum_stats[blocks,](
            logits_tE, expert_tK, expert_tK if set_t is None else set_t, count_BQE, sum_BQE1,
            num_tokens, num_sets, K=expert_tK.shape[1], TILES=TILES, **constants,
        )  # fmt: skip
        count_QE, sum_QE1 = count_BQE.sum(0), sum_BQE1.sum(0)
        ctx.mark_non_differentiable(count_QE)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_tE, set_t)
        ctx.constants = constants
        return count_QE, sum_QE1[:, :-1], sum_QE1[:, -1]

    @staticmethod
    def backward(
        ctx: Any, _: None, grad_prob_QE: Tensor | None, grad_z_Q: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        logits_tE, set_t = ctx.saved_tensors
        grad_logits_tE = torch.empty_like(logits_tE)
        # What is absent is not read.
        none, has_prob, has_z = grad_logits_tE, grad_prob_QE is not None, grad_z_Q is not None
        _sum_stats_backward[triton.cdiv(logits_tE.shape[0], ctx.constants["BLOCK_N"]),](
            logits_tE, none if set_t is None else set_t, none if grad_prob_QE is None else grad_prob_QE.contiguous(),
            none if grad_z_Q is None else grad_z_Q.contiguous(), grad_logits_tE, logits_tE.shape[0],
            PROB=has_prob, Z=has_z, **ctx.constants,
        )  # fmt: skip
        return grad_logits_tE, None, None, None, None


def _constants(num_experts: int, softmax: bool, sets: bool) -> dict[str, int]:
    E_POW2 = triton.next_power_of_2(num_experts)
    return {"E": num_experts, "E_POW2": E_POW2, "SETS": sets, "SOFTMAX": softmax, "BLOCK_N": max(1, BLOCK // E_POW2)}


def forward_traffic(num_experts: int, top_k: int) -> Traffic:
    """Logits in float32, expert numbers and sets in int64. Rows of 8E + 4 bytes are zeroed, written, and read."""
    tokens = _constants(num_experts, True, True)["BLOCK_N"] * TILES
    rows = 3 * (8 * num_experts + 4) / tokens
    least = 4 * num_experts + 4 * top_k + 4
    return Traffic(f"4E + 8K + 8 + (24E + 12)/{tokens}", 4 * num_experts + 8 * top_k + 8 + rows, least)


def backward_traffic(num_experts: int) -> Traffic:
    return Traffic("8E + 8", 8 * num_experts + 8, 8 * num_experts + 4)


def _builds(model: str, moe: MoEConfig) -> tuple[Build, ...]:
    E, K = moe.num_experts, moe.top_k
    constants = _constants(E, moe.router.score == "softmax", sets=True)
    return (
        Build(
            f"balance statistics, {model}", _sum_stats,
            {"logits_tE": "*fp32", "expert_tK": "*i64", "set_t": "*i64", "count_BQE": "*i32",
             "sum_BQE1": "*fp32", "num_tokens": "i32", "num_sets": "i32"},
            {**constants, "K": K, "TILES": TILES}, forward_traffic(E, K), registers=64,
        ),
        Build(
            f"balance statistics backward, {model}", _sum_stats_backward,
            {"logits_tE": "*fp32", "set_t": "*i64", "grad_prob_QE": "*fp32", "grad_z_Q": "*fp32",
             "grad_logits_tE": "*fp32", "num_tokens": "i32"},
            {**constants, "PROB": True, "Z": True}, backward_traffic(E), registers=64,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, moe_of(model)))
