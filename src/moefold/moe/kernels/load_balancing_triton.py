"""What balance losses need to know of a microbatch, in one read of the logits.

t tokens, E experts, K choices per token, S sets of tokens, B blocks of tokens; T tokens of one program, F its columns.

A program adds up its own tokens and writes one line per set; the lines of all programs are added up afterwards, in
their order. Nothing is added to memory that another program writes, so the same logits give the same bits. Tokens of a
set mostly stand together: a program walks only from its lowest set to its highest. Backward computes the probabilities
again instead of having kept them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe.kernels.router_reference import BalanceStats
from moefold.ops.kernels.aot_specs import Build, Traffic, refuse_wide
from moefold.ops.kernels.benchmark_shapes import MODELS, moe_of

# Columns that one program of 4 warps holds at a time, and how often it goes on to the next tokens.
BLOCK = 1024
ROUNDS = 16


@triton.jit
def _probabilities(logit_TF, SOFTMAX: tl.constexpr):
    """Each token's scores and their sum; the quotient is its probabilities. A column of -inf has none."""
    if SOFTMAX:
        score_TF = tl.exp(logit_TF - tl.max(logit_TF, 1)[:, None])
    else:
        score_TF = 1.0 / (1.0 + tl.exp(-logit_TF))
    return score_TF, tl.sum(score_TF, 1)


@triton.jit
def _log_sum_exp(logit_TF):
    most_T = tl.max(logit_TF, 1)
    return most_T + tl.log(tl.sum(tl.exp(logit_TF - most_T[:, None]), 1))


@triton.jit
def _add_up(
    logits_tE, expert_tK, set_t, count_BQE, probability_BQE, z_BQ, num_tokens, num_sets,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, SETS: tl.constexpr, SOFTMAX: tl.constexpr, T: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    expert_F = tl.arange(0, EP)
    inside_F = expert_F < E
    first = tl.program_id(0) * T * ROUNDS
    lowest, highest = 0, 0
    if SETS:
        mine = first + tl.arange(0, T * ROUNDS)
        set_N = tl.load(set_t + mine, mask=mine < num_tokens, other=-1).to(tl.int32)
        lowest = tl.min(tl.where(set_N < 0, num_sets, set_N), 0)
        highest = tl.max(set_N, 0)
    for which in range(lowest, highest + 1):
        count_F = tl.zeros([EP], tl.int32)
        sum_F = tl.zeros([EP], tl.float32)
        z_T = tl.zeros([T], tl.float32)
        for turn in range(ROUNDS):
            token_T = first + turn * T + tl.arange(0, T)
            row_T = tl.minimum(token_T, num_tokens - 1).to(tl.int64)
            real_T = token_T < num_tokens
            if SETS:
                real_T = real_T & (tl.load(set_t + row_T) == which)
            place_TF = row_T[:, None] * E + expert_F[None, :]
            logit_TF = tl.load(logits_tE + place_TF, mask=inside_F[None, :], other=-float("inf")).to(tl.float32)
            score_TF, total_T = _probabilities(logit_TF, SOFTMAX)
            sum_F += tl.sum(tl.where(real_T[:, None], score_TF / total_T[:, None], 0.0), 0)
            lse_T = _log_sum_exp(logit_TF)
            z_T += tl.where(real_T, lse_T * lse_T, 0.0)
            for k in tl.static_range(K):
                found_T = tl.load(expert_tK + row_T * K + k).to(tl.int32)
                hit_TF = (found_T[:, None] == expert_F[None, :]) & real_T[:, None]
                count_F += tl.sum(hit_TF.to(tl.int32), 0)
        line = tl.program_id(0).to(tl.int64) * num_sets + which
        tl.store(count_BQE + line * E + expert_F, count_F, mask=inside_F)
        tl.store(probability_BQE + line * E + expert_F, sum_F, mask=inside_F)
        tl.store(z_BQ + line, tl.sum(z_T, 0))


@triton.jit
def _add_up_backward(
    logits_tE, set_t, grad_probability_QE, grad_z_Q, grad_logits_tE, num_tokens,
    E: tl.constexpr, EP: tl.constexpr, SETS: tl.constexpr, SOFTMAX: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """With p = s / sum(s): ds = (g - sum(g p)) / sum(s); and d lse = softmax."""
    expert_F = tl.arange(0, EP)
    inside_F = expert_F < E
    token_T = tl.program_id(0) * T + tl.arange(0, T)
    row_T = tl.minimum(token_T, num_tokens - 1).to(tl.int64)
    which_T = tl.load(set_t + row_T) if SETS else tl.zeros([T], tl.int64)
    real_T = which_T >= 0
    place_TF = row_T[:, None] * E + expert_F[None, :]
    logit_TF = tl.load(logits_tE + place_TF, mask=inside_F[None, :], other=-float("inf")).to(tl.float32)
    grad_place_TF = which_T[:, None] * E + expert_F[None, :]
    grad_TF = tl.load(grad_probability_QE + grad_place_TF, mask=real_T[:, None] & inside_F[None, :], other=0.0)
    grad_z_T = tl.load(grad_z_Q + which_T, mask=real_T, other=0.0)
    score_TF, total_T = _probabilities(logit_TF, SOFTMAX)
    p_TF = score_TF / total_T[:, None]
    out_TF = p_TF * (grad_TF - tl.sum(grad_TF * p_TF, 1)[:, None])
    if not SOFTMAX:
        out_TF = out_TF * (1.0 - score_TF)
    lse_T = _log_sum_exp(logit_TF)
    out_TF += (2.0 * grad_z_T * lse_T)[:, None] * tl.exp(logit_TF - lse_T[:, None])
    inside_TF = (token_T < num_tokens)[:, None] & inside_F[None, :]
    tl.store(grad_logits_tE + place_TF, out_TF.to(grad_logits_tE.dtype.element_ty), mask=inside_TF)


def balance_stats(
    logits_tE: Tensor, expert_tK: Tensor, set_t: Tensor | None, num_sets: int, kind: Literal["softmax", "sigmoid"]
) -> BalanceStats:
    """``set_t`` is each token's set, -1 for a token that must not be noticed; None puts all into set 0."""
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
        blocks = triton.cdiv(num_tokens, constants["T"] * ROUNDS)
        probability_BQE = logits_tE.new_zeros(blocks, num_sets, num_experts, dtype=torch.float32)
        count_BQE = torch.zeros_like(probability_BQE, dtype=torch.int32)
        z_BQ = torch.zeros_like(probability_BQE[:, :, 0], memory_format=torch.contiguous_format)
        _add_up[blocks,](
            logits_tE, expert_tK, expert_tK if set_t is None else set_t, count_BQE, probability_BQE, z_BQ,
            num_tokens, num_sets, K=expert_tK.shape[1], ROUNDS=ROUNDS, **constants,
        )  # fmt: skip
        count_QE = count_BQE.sum(0)
        ctx.mark_non_differentiable(count_QE)
        ctx.save_for_backward(logits_tE, set_t)
        ctx.constants = constants
        return count_QE, probability_BQE.sum(0), z_BQ.sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_tE, set_t = ctx.saved_tensors
        grad_logits_tE = torch.empty_like(logits_tE)
        _add_up_backward[triton.cdiv(logits_tE.shape[0], ctx.constants["T"]),](
            logits_tE, grad_logits_tE if set_t is None else set_t, grads[1].contiguous(), grads[2].contiguous(),
            grad_logits_tE, logits_tE.shape[0], **ctx.constants,
        )  # fmt: skip
        return grad_logits_tE, None, None, None, None


def _constants(num_experts: int, softmax: bool, sets: bool) -> dict[str, Any]:
    EP = triton.next_power_of_2(num_experts)
    return {"E": num_experts, "EP": EP, "SETS": sets, "SOFTMAX": softmax, "T": max(1, BLOCK // EP)}


def forward_traffic(num_experts: int, top_k: int) -> Traffic:
    """Logits in float32, expert numbers and sets in int64. Lines of 8E + 4 bytes are cleared, written, and read."""
    tokens = _constants(num_experts, True, True)["T"] * ROUNDS
    lines = 3 * (8 * num_experts + 4) / tokens
    least = 4 * num_experts + 4 * top_k + 4
    return Traffic(f"4E + 8K + 8 + (24E + 12)/{tokens}", 4 * num_experts + 8 * top_k + 8 + lines, least)


def backward_traffic(num_experts: int) -> Traffic:
    return Traffic("8E + 8", 8 * num_experts + 8, 8 * num_experts + 4)


def _builds(model: str, moe: MoEConfig) -> tuple[Build, ...]:
    E, K = moe.num_experts, moe.top_k
    constants = _constants(E, moe.router.score == "softmax", sets=True)
    return (
        Build(
            f"balance statistics, {model}", _add_up,
            {"logits_tE": "*fp32", "expert_tK": "*i64", "set_t": "*i64", "count_BQE": "*i32",
             "probability_BQE": "*fp32", "z_BQ": "*fp32", "num_tokens": "i32", "num_sets": "i32"},
            {**constants, "K": K, "ROUNDS": ROUNDS}, forward_traffic(E, K), registers=64,
        ),
        Build(
            f"balance statistics backward, {model}", _add_up_backward,
            {"logits_tE": "*fp32", "set_t": "*i64", "grad_probability_QE": "*fp32", "grad_z_Q": "*fp32",
             "grad_logits_tE": "*fp32", "num_tokens": "i32"},
            constants, backward_traffic(E), registers=64,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, moe_of(model)))
