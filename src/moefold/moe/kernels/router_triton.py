"""From logits to choices and weights in one read: score, bias, group limit, top-k, normalisation, scale.

t tokens, E experts in G groups of S, K choices per token; T tokens of one program, F its columns.

A program holds all logits of a few tokens in registers. Columns are groups side by side, each filled up to a power of
two, so that a group is a slice of the block and a column's order is still the experts' order. The best expert is found
K times by a maximum and by the lowest column that has it: equal scores go to the lower expert number, as in
``moe/topk.py``. Backward computes the scores again instead of having kept them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.moe import MoEConfig, RouterConfig
from moefold.ops.kernels.aot_specs import Build, Traffic, refuse_wide
from moefold.ops.kernels.benchmark_shapes import MODELS, moe_of

# Columns that one program of 4 warps holds.
BLOCK = 1024


@triton.jit
def _scores(logit_TF, SOFTMAX: tl.constexpr):
    """Along the columns; a column of -inf scores 0."""
    if SOFTMAX:
        power_TF = tl.exp(logit_TF - tl.max(logit_TF, 1)[:, None])
        return power_TF / tl.sum(power_TF, 1)[:, None]
    else:
        return 1.0 / (1.0 + tl.exp(-logit_TF))


@triton.jit
def _first_best(value_TF, taken_TF, column_F, LAST: tl.constexpr):
    """The lowest column with the best value among those not taken. Never past LAST, not even if values are NaN."""
    best_T = tl.max(tl.where(taken_TF, -float("inf"), value_TF), 1)
    candidate_TF = tl.where((value_TF == best_T[:, None]) & (taken_TF == 0), column_F[None, :], LAST)
    return best_T, tl.min(candidate_TF, 1)


@triton.jit
def _open_groups(
    value_TF, G: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr,
    TERMS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """True in the columns of each token's best groups. A group's score is the sum of its TERMS best values."""
    value_RS = tl.reshape(value_TF, [T * GP, SP])
    best_R = tl.max(value_RS, 1)
    score_R = best_R
    member_S = tl.arange(0, SP)
    for _ in tl.static_range(TERMS - 1):
        first_R = tl.min(tl.where(value_RS == best_R[:, None], member_S[None, :], SP), 1)
        value_RS = tl.where(member_S[None, :] == first_R[:, None], -float("inf"), value_RS)
        best_R = tl.max(value_RS, 1)
        score_R += best_R
    score_TG = tl.reshape(score_R, [T, GP])
    group_G = tl.arange(0, GP)
    taken_TG = (group_G >= G)[None, :] & (score_TG == score_TG)
    for _ in tl.static_range(TOP):
        _, best_T = _first_best(score_TG, taken_TG, group_G, G - 1)
        taken_TG = taken_TG | (group_G[None, :] == best_T[:, None])
    open_TGS = (taken_TG & (group_G < G)[None, :])[:, :, None] & (tl.arange(0, SP) < S)[None, None, :]
    return tl.reshape(open_TGS, [T, GP * SP])


@triton.jit
def _choose(
    logits_tE, bias_E, expert_tK, weight_tK, num_tokens, scale,
    E: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TERMS: tl.constexpr, SOFTMAX: tl.constexpr, AFTER: tl.constexpr, BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = E // G
    token_T = tl.program_id(0) * T + tl.arange(0, T)
    # Tokens past the end repeat the last one; they are not stored.
    row_T = tl.minimum(token_T, num_tokens - 1).to(tl.int64)
    column_F, choice_K = tl.arange(0, GP * SP), tl.arange(0, KP)
    expert_F = column_F // SP * S + column_F % SP
    valid_F = (column_F // SP < G) & (column_F % SP < S)
    logit_TF = tl.load(logits_tE + row_T[:, None] * E + expert_F[None, :], mask=valid_F[None, :], other=-float("inf"))
    logit_TF = logit_TF.to(tl.float32)
    source_TF = logit_TF if AFTER else _scores(logit_TF, SOFTMAX)
    value_TF = source_TF
    if BIAS:
        value_TF += tl.load(bias_E + expert_F, mask=valid_F, other=0.0)[None, :]
    value_TF = tl.where(valid_F[None, :], value_TF, -float("inf"))
    if G > 1:
        open_TF = _open_groups(value_TF, G, GP, SP, S, TOP_GROUPS, TERMS, T)
        value_TF = tl.where(open_TF, value_TF, -float("inf"))

    taken_TF = (valid_F == 0)[None, :] & (row_T >= 0)[:, None]
    found_TK = tl.zeros([T, KP], tl.int32)
    weight_TK = tl.full([T, KP], -float("inf") if AFTER else 0.0, tl.float32)
    for k in tl.static_range(K):
        _, first_T = _first_best(value_TF, taken_TF, column_F, (G - 1) * SP + S - 1)
        hit_TF = column_F[None, :] == first_T[:, None]
        taken_TF = taken_TF | hit_TF
        picked_T = tl.sum(tl.where(hit_TF, source_TF, 0.0), 1)
        found_TK = tl.where((choice_K == k)[None, :], (first_T // SP * S + first_T % SP)[:, None], found_TK)
        weight_TK = tl.where((choice_K == k)[None, :], picked_T[:, None], weight_TK)
    if AFTER:
        weight_TK = _scores(weight_TK, SOFTMAX)
    if NORMALIZE:
        weight_TK = weight_TK / (tl.sum(weight_TK, 1)[:, None] + 1e-20)
    place_TK = row_T[:, None] * K + choice_K[None, :]
    inside_TK = (token_T < num_tokens)[:, None] & (choice_K < K)[None, :]
    tl.store(expert_tK + place_TK, found_TK.to(tl.int64), mask=inside_TK)
    tl.store(weight_tK + place_TK, (weight_TK * scale).to(weight_tK.dtype.element_ty), mask=inside_TK)


@triton.jit
def _choose_backward(
    logits_tE, expert_tK, grad_weight_tK, grad_logits_tE, num_tokens, scale,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SOFTMAX: tl.constexpr, AFTER: tl.constexpr,
    NORMALIZE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Weights depend on the chosen logits, and on all others only through a softmax over all experts."""
    token_T = tl.program_id(0) * T + tl.arange(0, T)
    row_T = tl.minimum(token_T, num_tokens - 1).to(tl.int64)
    expert_F, choice_K = tl.arange(0, EP), tl.arange(0, KP)
    inside_K = (choice_K < K)[None, :]
    found_TK = tl.load(expert_tK + row_T[:, None] * K + choice_K[None, :], mask=inside_K, other=E).to(tl.int32)
    grad_TK = tl.load(grad_weight_tK + row_T[:, None] * K + choice_K[None, :], mask=inside_K, other=0.0)
    grad_TK = grad_TK.to(tl.float32) * scale
    chosen_TK = tl.load(logits_tE + row_T[:, None] * E + found_TK, mask=inside_K, other=-float("inf")).to(tl.float32)
    grad_TF = tl.zeros([T, EP], tl.float32)
    if SOFTMAX and not AFTER:
        place_TF = row_T[:, None] * E + expert_F[None, :]
        logit_TF = tl.load(logits_tE + place_TF, mask=(expert_F < E)[None, :], other=-float("inf")).to(tl.float32)
        most_T = tl.max(logit_TF, 1)
        power_TF = tl.exp(logit_TF - most_T[:, None])
        sum_T = tl.sum(power_TF, 1)
        score_TK = tl.exp(chosen_TK - most_T[:, None]) / sum_T[:, None]
    else:
        score_TK = _scores(chosen_TK, SOFTMAX)
    if NORMALIZE:
        total_T = tl.sum(score_TK, 1) + 1e-20
        grad_TK = (grad_TK - (tl.sum(grad_TK * score_TK, 1) / total_T)[:, None]) / total_T[:, None]
    if SOFTMAX:
        mean_T = tl.sum(grad_TK * score_TK, 1)
        if AFTER:
            grad_TK = score_TK * (grad_TK - mean_T[:, None])
        else:
            grad_TK = score_TK * grad_TK
            grad_TF = -power_TF / sum_T[:, None] * mean_T[:, None]
    else:
        grad_TK = grad_TK * score_TK * (1.0 - score_TK)
    for k in tl.static_range(K):
        column_T = tl.sum(tl.where((choice_K == k)[None, :], found_TK, 0), 1)
        part_T = tl.sum(tl.where((choice_K == k)[None, :], grad_TK, 0.0), 1)
        grad_TF += tl.where(expert_F[None, :] == column_T[:, None], part_T[:, None], 0.0)
    tl.store(
        grad_logits_tE + row_T[:, None] * E + expert_F[None, :], grad_TF.to(grad_logits_tE.dtype.element_ty),
        mask=(token_T < num_tokens)[:, None] & (expert_F < E)[None, :],
    )  # fmt: skip


def route(logits_tE: Tensor, bias_E: Tensor | None, router: RouterConfig, top_k: int) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and what each one's answer counts for, in the logits' format."""
    refuse_wide("router", logits_tE, bias_E)
    expert_tK, weight_tK = _Route.apply(logits_tE, bias_E, router, top_k)
    return expert_tK, weight_tK


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_tE: Tensor, bias_E: Tensor | None, router: RouterConfig, top_k: int
    ) -> tuple[Tensor, Tensor]:
        logits_tE = logits_tE.contiguous()
        num_tokens, num_experts = logits_tE.shape
        expert_tK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_tE.device)
        weight_tK = logits_tE.new_empty(num_tokens, top_k)
        constants = _constants(num_experts, top_k, router, bias_E is not None)
        _choose[triton.cdiv(num_tokens, constants["T"]),](
            logits_tE, logits_tE if bias_E is None else bias_E, expert_tK, weight_tK, num_tokens, router.scale,
            **constants,
        )  # fmt: skip
        ctx.mark_non_differentiable(expert_tK)
        ctx.save_for_backward(logits_tE, expert_tK)
        ctx.router = router
        return expert_tK, weight_tK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_tE, expert_tK = ctx.saved_tensors
        grad_logits_tE = torch.empty_like(logits_tE)
        constants = _backward_constants(logits_tE.shape[1], expert_tK.shape[1], ctx.router)
        _choose_backward[triton.cdiv(logits_tE.shape[0], constants["T"]),](
            logits_tE, expert_tK, grads[1].contiguous(), grad_logits_tE, logits_tE.shape[0], ctx.router.scale,
            **constants,
        )  # fmt: skip
        return grad_logits_tE, None, None, None


def _constants(num_experts: int, top_k: int, router: RouterConfig, bias: bool) -> dict[str, Any]:
    """What the forward kernel is compiled for."""
    GP = triton.next_power_of_2(router.num_groups)
    SP = triton.next_power_of_2(num_experts // router.num_groups)
    return {
        "E": num_experts, "G": router.num_groups, "GP": GP, "SP": SP, "K": top_k, "KP": triton.next_power_of_2(top_k),
        "TOP_GROUPS": router.top_groups, "TERMS": min(router.group_terms(top_k), num_experts // router.num_groups),
        "BIAS": bias,
        "SOFTMAX": router.score == "softmax", "AFTER": router.score_when == "after_topk",
        "NORMALIZE": router.normalize, "T": max(1, BLOCK // (GP * SP)),
    }  # fmt: skip


def _backward_constants(num_experts: int, top_k: int, router: RouterConfig) -> dict[str, Any]:
    EP = triton.next_power_of_2(num_experts)
    return {
        "E": num_experts, "EP": EP, "K": top_k, "KP": triton.next_power_of_2(top_k),
        "SOFTMAX": router.score == "softmax", "AFTER": router.score_when == "after_topk",
        "NORMALIZE": router.normalize, "T": max(1, BLOCK // EP),
    }  # fmt: skip


def forward_traffic(num_experts: int, top_k: int) -> Traffic:
    """Logits in float32, expert numbers in int64, which torch indexes with; int32 would do, hence the minimum."""
    return Traffic("4E + 12K", 4 * num_experts + 12 * top_k, 4 * num_experts + 8 * top_k)


def backward_traffic(num_experts: int, top_k: int, router: RouterConfig) -> Traffic:
    """Reads all logits only where all of them share a softmax."""
    all_logits = router.score == "softmax" and router.score_when == "before_topk"
    read = 4 * (num_experts if all_logits else top_k)
    fixed = 4 * num_experts + read + 12 * top_k
    return Traffic("8E + 12K" if all_logits else "4E + 16K", fixed, fixed - 4 * top_k)


def _builds(model: str, moe: MoEConfig) -> tuple[Build, ...]:
    E, K, router = moe.num_experts, moe.top_k, moe.router
    sizes = {"num_tokens": "i32", "scale": "fp32"}
    return (
        Build(
            f"router, {model}", _choose,
            {"logits_tE": "*fp32", "bias_E": "*fp32", "expert_tK": "*i64", "weight_tK": "*fp32", **sizes},
            _constants(E, K, router, router.expert_bias), forward_traffic(E, K), registers=80,
        ),
        Build(
            f"router backward, {model}", _choose_backward,
            {"logits_tE": "*fp32", "expert_tK": "*i64", "grad_weight_tK": "*fp32", "grad_logits_tE": "*fp32", **sizes},
            _backward_constants(E, K, router), backward_traffic(E, K, router), registers=64,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, moe_of(model)))
