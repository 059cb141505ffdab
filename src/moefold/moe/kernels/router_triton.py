"""From logits to experts and probs in one read: score, bias, group limit, top-k, normalisation, scale.

A program holds all logits of a few tokens in registers. Columns are X groups of Y experts side by side, both rounded up
to a power of two, so that a group is a slice of the block and columns are in the order of the experts. The best expert
is found K times as the lowest column that has the maximum: equal scores go to the lower expert number, as in
``moe/topk.py``. Backward recomputes the scores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.moe import MoEConfig, RouterConfig
from moefold.ops.kernels.aot_specs import MODELS, Build, Traffic, moe_of, refuse_wide

# Logits that one program of 4 warps holds.
BLOCK = 1024


@triton.jit
def _scores(logit_nm, SOFTMAX: tl.constexpr):
    """Along the columns; a column of -inf scores 0."""
    if SOFTMAX:
        power_nm = tl.exp(logit_nm - tl.max(logit_nm, 1)[:, None])
        return power_nm / tl.sum(power_nm, 1)[:, None]
    else:
        return 1.0 / (1.0 + tl.exp(-logit_nm))


@triton.jit
def _first_best(value_nm, taken_nm, column_m, LAST: tl.constexpr):
    """The lowest column with the best value among those not taken. Never past LAST, not even if values are NaN."""
    best_n = tl.max(tl.where(taken_nm, -float("inf"), value_nm), 1)
    candidate_nm = tl.where((value_nm == best_n[:, None]) & (taken_nm == 0), column_m[None, :], LAST)
    return best_n, tl.min(candidate_nm, 1)


@triton.jit
def _best_groups(
    value_nm, X: tl.constexpr, X_POW2: tl.constexpr, Y_POW2: tl.constexpr, Y: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TERMS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """True in the columns of each token's best groups. A group's score is the sum of its TERMS best values."""
    value_NY = tl.reshape(value_nm, [BLOCK_N * X_POW2, Y_POW2])
    best_N = tl.max(value_NY, 1)
    score_N = best_N
    member_Y = tl.arange(0, Y_POW2)
    for _ in tl.static_range(TERMS - 1):
        first_N = tl.min(tl.where(value_NY == best_N[:, None], member_Y[None, :], Y_POW2), 1)
        value_NY = tl.where(member_Y[None, :] == first_N[:, None], -float("inf"), value_NY)
        best_N = tl.max(value_NY, 1)
        score_N += best_N
    score_nX = tl.reshape(score_N, [BLOCK_N, X_POW2])
    group_X = tl.arange(0, X_POW2)
    taken_nX = (group_X >= X)[None, :] & (score_nX == score_nX)
    for _ in tl.static_range(TOP_GROUPS):
        _, best_n = _first_best(score_nX, taken_nX, group_X, X - 1)
        taken_nX = taken_nX | (group_X[None, :] == best_n[:, None])
    open_nXY = (taken_nX & (group_X < X)[None, :])[:, :, None] & (tl.arange(0, Y_POW2) < Y)[None, None, :]
    return tl.reshape(open_nXY, [BLOCK_N, X_POW2 * Y_POW2])


@triton.jit
def _route(
    logits_tE, bias_E, expert_tK, prob_tK, num_tokens, scale,
    E: tl.constexpr, X: tl.constexpr, X_POW2: tl.constexpr, Y_POW2: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TERMS: tl.constexpr, SOFTMAX: tl.constexpr, AFTER: tl.constexpr, BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    Y: tl.constexpr = E // X
    token_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Tokens past the end repeat the last one; they are not stored.
    row_n = tl.minimum(token_n, num_tokens - 1).to(tl.int64)
    column_m, slot_K = tl.arange(0, X_POW2 * Y_POW2), tl.arange(0, K_POW2)
    expert_m = column_m // Y_POW2 * Y + column_m % Y_POW2
    valid_m = (column_m // Y_POW2 < X) & (column_m % Y_POW2 < Y)
    logit_nm = tl.load(logits_tE + row_n[:, None] * E + expert_m[None, :], mask=valid_m[None, :], other=-float("inf"))
    logit_nm = logit_nm.to(tl.float32)
    source_nm = logit_nm if AFTER else _scores(logit_nm, SOFTMAX)
    value_nm = source_nm
    if BIAS:
        value_nm += tl.load(bias_E + expert_m, mask=valid_m, other=0.0)[None, :]
    value_nm = tl.where(valid_m[None, :], value_nm, -float("inf"))
    if X > 1:
        open_nm = _best_groups(value_nm, X, X_POW2, Y_POW2, Y, TOP_GROUPS, TERMS, BLOCK_N)
        value_nm = tl.where(open_nm, value_nm, -float("inf"))

    taken_nm = (valid_m == 0)[None, :] & (row_n >= 0)[:, None]
    found_nK = tl.zeros([BLOCK_N, K_POW2], tl.int32)
    prob_nK = tl.full([BLOCK_N, K_POW2], -float("inf") if AFTER else 0.0, tl.float32)
    for k in tl.static_range(K):
        _, first_n = _first_best(value_nm, taken_nm, column_m, (X - 1) * Y_POW2 + Y - 1)
        hit_nm = column_m[None, :] == first_n[:, None]
        taken_nm = taken_nm | hit_nm
        picked_n = tl.sum(tl.where(hit_nm, source_nm, 0.0), 1)
        found_nK = tl.where((slot_K == k)[None, :], (first_n // Y_POW2 * Y + first_n % Y_POW2)[:, None], found_nK)
        prob_nK = tl.where((slot_K == k)[None, :], picked_n[:, None], prob_nK)
    if AFTER:
        prob_nK = _scores(prob_nK, SOFTMAX)
    if NORMALIZE:
        prob_nK = prob_nK / (tl.sum(prob_nK, 1)[:, None] + 1e-20)
    place_nK = row_n[:, None] * K + slot_K[None, :]
    inside_nK = (token_n < num_tokens)[:, None] & (slot_K < K)[None, :]
    tl.store(expert_tK + place_nK, found_nK.to(tl.int64), mask=inside_nK)
    tl.store(prob_tK + place_nK, (prob_nK * scale).to(prob_tK.dtype.element_ty), mask=inside_nK)


@triton.jit
def _route_backward(
    logits_tE, expert_tK, grad_prob_tK, grad_logits_tE, num_tokens, scale,
    E: tl.constexpr, E_POW2: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr, SOFTMAX: tl.constexpr,
    AFTER: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Probs depend on the chosen logits, and on all others only through a softmax over all experts."""
    token_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(token_n, num_tokens - 1).to(tl.int64)
    expert_m, slot_K = tl.arange(0, E_POW2), tl.arange(0, K_POW2)
    inside_K = (slot_K < K)[None, :]
    found_nK = tl.load(expert_tK + row_n[:, None] * K + slot_K[None, :], mask=inside_K, other=E).to(tl.int32)
    grad_nK = tl.load(grad_prob_tK + row_n[:, None] * K + slot_K[None, :], mask=inside_K, other=0.0)
    grad_nK = grad_nK.to(tl.float32) * scale
    chosen_nK = tl.load(logits_tE + row_n[:, None] * E + found_nK, mask=inside_K, other=-float("inf")).to(tl.float32)
    grad_nm = tl.zeros([BLOCK_N, E_POW2], tl.float32)
    if SOFTMAX and not AFTER:
        place_nm = row_n[:, None] * E + expert_m[None, :]
        logit_nm = tl.load(logits_tE + place_nm, mask=(expert_m < E)[None, :], other=-float("inf")).to(tl.float32)
        most_n = tl.max(logit_nm, 1)
        power_nm = tl.exp(logit_nm - most_n[:, None])
        sum_n = tl.sum(power_nm, 1)
        score_nK = tl.exp(chosen_nK - most_n[:, None]) / sum_n[:, None]
    else:
        score_nK = _scores(chosen_nK, SOFTMAX)
    if NORMALIZE:
        total_n = tl.sum(score_nK, 1) + 1e-20
        grad_nK = (grad_nK - (tl.sum(grad_nK * score_nK, 1) / total_n)[:, None]) / total_n[:, None]
    if SOFTMAX:
        mean_n = tl.sum(grad_nK * score_nK, 1)
        if AFTER:
            grad_nK = score_nK * (grad_nK - mean_n[:, None])
        else:
            grad_nK = score_nK * grad_nK
            grad_nm = -power_nm / sum_n[:, None] * mean_n[:, None]
    else:
        grad_nK = grad_nK * score_nK * (1.0 - score_nK)
    for k in tl.static_range(K):
        column_n = tl.sum(tl.where((slot_K == k)[None, :], found_nK, 0), 1)
        part_n = tl.sum(tl.where((slot_K == k)[None, :], grad_nK, 0.0), 1)
        grad_nm += tl.where(expert_m[None, :] == column_n[:, None], part_n[:, None], 0.0)
    tl.store(
        grad_logits_tE + row_n[:, None] * E + expert_m[None, :], grad_nm.to(grad_logits_tE.dtype.element_ty),
        mask=(token_n < num_tokens)[:, None] & (expert_m < E)[None, :],
    )  # fmt: skip


def route(logits_tE: Tensor, bias_E: Tensor | None, router: RouterConfig, top_k: int) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and their probs, in the logits' dtype."""
    refuse_wide("router", logits_tE, bias_E)
    expert_tK, prob_tK = _Route.apply(logits_tE, bias_E, router, top_k)
    return expert_tK, prob_tK


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_tE: Tensor, bias_E: Tensor | None, router: RouterConfig, top_k: int
    ) -> tuple[Tensor, Tensor]:
        logits_tE = logits_tE.contiguous()
        num_tokens, num_experts = logits_tE.shape
        expert_tK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_tE.device)
        prob_tK = logits_tE.new_empty(num_tokens, top_k)
        constants = _constants(num_experts, top_k, router, bias_E is not None)
        _route[triton.cdiv(num_tokens, constants["BLOCK_N"]),](
            logits_tE, logits_tE if bias_E is None else bias_E, expert_tK, prob_tK, num_tokens, router.scale,
            **constants,
        )  # fmt: skip
        ctx.mark_non_differentiable(expert_tK)
        ctx.save_for_backward(logits_tE, expert_tK)
        ctx.router = router
        return expert_tK, prob_tK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_tE, expert_tK = ctx.saved_tensors
        grad_logits_tE = torch.empty_like(logits_tE)
        constants = _backward_constants(logits_tE.shape[1], expert_tK.shape[1], ctx.router)
        _route_backward[triton.cdiv(logits_tE.shape[0], constants["BLOCK_N"]),](
            logits_tE, expert_tK, grads[1].contiguous(), grad_logits_tE, logits_tE.shape[0], ctx.router.scale,
            **constants,
        )  # fmt: skip
        return grad_logits_tE, None, None, None


def _constants(num_experts: int, top_k: int, router: RouterConfig, bias: bool) -> dict[str, int]:
    """The compile-time constants of the forward kernel."""
    X_POW2 = triton.next_power_of_2(router.num_groups)
    Y_POW2 = triton.next_power_of_2(num_experts // router.num_groups)
    return {
        "E": num_experts, "X": router.num_groups, "X_POW2": X_POW2, "Y_POW2": Y_POW2,
        "K": top_k, "K_POW2": triton.next_power_of_2(top_k),
        "TOP_GROUPS": router.top_groups, "TERMS": min(router.group_terms(top_k), num_experts // router.num_groups),
        "BIAS": bias,
        "SOFTMAX": router.score == "softmax", "AFTER": router.score_when == "after_topk",
        "NORMALIZE": router.normalize, "BLOCK_N": max(1, BLOCK // (X_POW2 * Y_POW2)),
    }  # fmt: skip


def _backward_constants(num_experts: int, top_k: int, router: RouterConfig) -> dict[str, int]:
    E_POW2 = triton.next_power_of_2(num_experts)
    return {
        "E": num_experts, "E_POW2": E_POW2, "K": top_k, "K_POW2": triton.next_power_of_2(top_k),
        "SOFTMAX": router.score == "softmax", "AFTER": router.score_when == "after_topk",
        "NORMALIZE": router.normalize, "BLOCK_N": max(1, BLOCK // E_POW2),
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
            f"router, {model}", _route,
            {"logits_tE": "*fp32", "bias_E": "*fp32", "expert_tK": "*i64", "prob_tK": "*fp32", **sizes},
            _constants(E, K, router, router.expert_bias), forward_traffic(E, K), registers=80,
        ),
        Build(
            f"router backward, {model}", _route_backward,
            {"logits_tE": "*fp32", "expert_tK": "*i64", "grad_prob_tK": "*fp32", "grad_logits_tE": "*fp32", **sizes},
            _backward_constants(E, K, router), backward_traffic(E, K, router), registers=64,
        ),
    )  # fmt: skip


BUILDS = tuple(build for name, model in MODELS.items() for build in _builds(name, moe_of(model)))
