"""References of the MoE kernels in plain torch; autograd differentiates them: row map, permute, routing, balance.

Expert e owns the rows from start_E[e] to start_E[e + 1]. The first count_E[e] of them are tokens in their own order,
the rest is padding: a low-precision GEMM needs its rows in blocks of 16 or 32, and zeros change no sum. Where the host
does not know how many rows there are, it takes the upper bound and never waits for the device; rows past start_E[E]
belong to no expert and are zeros too.

A row map says which permuted row each assignment has; permute, unpermute and both gradients read only this. A row is a
token of this rank or a row received: the kernels do not care, and the suffix t stands for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moefold.config.casts import Cast
from moefold.config.moe import RouterConfig
from moefold.moe.permute import Assignments, flat_experts, gather_probs, gather_rows
from moefold.moe.topk import TINY, choose_topk, limit_groups, score
from moefold.ops.fp32_linear import upcast
from moefold.ops.segments import count_keys, rank_within_key
from moefold.precision.quantize import Quantized, quantize


@dataclass(frozen=True)
class RowMap:
    # int32; -1 where the assignment was dropped.
    row_tK: Tensor
    # int32, E + 1 entries.
    start_E: Tensor
    count_E: Tensor
    num_rows: int


def most_rows(num_assignments: int, num_experts: int, multiple: int) -> int:
    """The most that any routing needs: every expert that has a row may waste all but one row of its last block."""
    most = num_assignments + min(num_experts, num_assignments) * (multiple - 1)
    return most // multiple * multiple


def map_rows(assignments: Assignments, num_experts: int, multiple: int = 1, num_rows: int | None = None) -> RowMap:
    """``num_rows``: how many there are with padding, where that is known."""
    expert_tK, key_N = assignments.experts, flat_experts(assignments, num_experts)
    count_E = count_keys(key_N, num_experts + 1)[:num_experts]
    padded_E = (count_E + (multiple - 1)) // multiple * multiple
    start_E = torch.cat([count_E.new_zeros(1), padded_E.cumsum(0)])
    row_N = start_E[key_N] + rank_within_key(key_N, num_experts + 1)
    row_tK = row_N.where(key_N < num_experts, -1).view_as(expert_tK)
    num_rows = most_rows(expert_tK.numel(), num_experts, multiple) if num_rows is None else num_rows
    return RowMap(row_tK.to(torch.int32), start_E.to(torch.int32), count_E.to(torch.int32), num_rows)


def map_padded(assignments: Assignments, num_experts: int, capacity: int) -> RowMap:
    """Every expert owns ``capacity`` rows. An assignment beyond them is left out, so drop it before."""
    key_N = flat_experts(assignments, num_experts)
    rank_N = rank_within_key(key_N, num_experts + 1)
    row_N = (key_N * capacity + rank_N).where((key_N < num_experts) & (rank_N < capacity), -1)
    count_E = count_keys(key_N, num_experts + 1)[:num_experts].clamp(max=capacity)
    start_E = torch.arange(num_experts + 1, dtype=torch.int32, device=key_N.device) * capacity
    row_tK = row_N.view_as(assignments.experts).to(torch.int32)
    return RowMap(row_tK, start_E, count_E.to(torch.int32), num_experts * capacity)


def permute(x_tL: Tensor, rows: RowMap, prob_tK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Every permuted row, and its prob where probs are given. Padding rows are zeros."""
    assignment_P = _assignment_of_row(rows)
    prob_P = None if prob_tK is None else gather_probs(prob_tK, assignment_P)
    return gather_rows(x_tL, assignment_P // rows.row_tK.shape[1]), prob_P


def permute_cast(
    x_tL: Tensor, rows: RowMap, prob_tK: Tensor | None, cast: Cast
) -> tuple[Tensor, Tensor | None, Quantized]:
    """The same, and codes and scales of the permuted rows, for a cast that narrows each row by itself."""
    rows_PL, prob_P = permute(x_tL, rows, prob_tK)
    return rows_PL, prob_P, quantize(rows_PL.detach(), cast)


def unpermute(rows_PL: Tensor, rows: RowMap, prob_tK: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, times the probs where given, accumulated in float32 at least."""
    row_tK = rows.row_tK.where(rows.row_tK >= 0, rows.num_rows).long()
    picked_tKL = upcast(gather_rows(rows_PL, row_tK.flatten())).view(*row_tK.shape, -1)
    if prob_tK is not None:
        picked_tKL = picked_tKL * upcast(prob_tK)[:, :, None]
    return picked_tKL.sum(1).to(rows_PL.dtype)


def _assignment_of_row(rows: RowMap) -> Tensor:
    """The inverse map; a padding row has the number after the last assignment."""
    num_assignments, device = rows.row_tK.numel(), rows.row_tK.device
    row_N = rows.row_tK.where(rows.row_tK >= 0, rows.num_rows).long().flatten()
    assignment_P = torch.full((rows.num_rows + 1,), num_assignments, device=device)
    return assignment_P.scatter(0, row_N, torch.arange(num_assignments, device=device))[: rows.num_rows]


def route(logits_tE: Tensor, bias_E: Tensor | None, router: RouterConfig, top_k: int) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and their probs, in the logits' dtype."""
    wide_tE = upcast(logits_tE)
    scores_tE = score(wide_tE, router.score)
    after = router.score_when == "after_topk"
    value_tE = (wide_tE if after else scores_tE).detach()
    if bias_E is not None:
        value_tE = value_tE + bias_E
    if router.num_groups > 1:
        value_tE = limit_groups(value_tE, router.num_groups, router.top_groups, router.group_terms(top_k))
    expert_tK = choose_topk(value_tE, top_k)
    prob_tK = score(wide_tE.gather(1, expert_tK), router.score) if after else scores_tE.gather(1, expert_tK)
    if router.normalize:
        prob_tK = prob_tK / (prob_tK.sum(-1, keepdim=True) + TINY)
    return expert_tK, (prob_tK * router.scale).to(logits_tE.dtype)


class BalanceStats(NamedTuple):
    """Of each set of tokens: assignments per expert, the sums of its tokens' probabilities and squared log-sum-exp.

    Counts are whole numbers without a gradient. A balance loss multiplies shares made of them by the sums.
    """

    count_QE: Tensor
    probability_QE: Tensor
    z_Q: Tensor


def balance_stats(
    logits_tE: Tensor, expert_tK: Tensor, set_t: Tensor | None, num_sets: int, kind: Literal["softmax", "sigmoid"]
) -> BalanceStats:
    """``set_t`` is each token's set, -1 for padding; None puts all into set 0."""
    num_tokens, num_experts = logits_tE.shape
    set_t = expert_tK.new_zeros(num_tokens) if set_t is None else set_t
    # Tokens of no set get one of their own, which is cut off.
    set_t = set_t.where(set_t >= 0, num_sets)
    wide_tE = upcast(logits_tE)
    p_tE = score(wide_tE, kind)
    p_tE = p_tE if kind == "softmax" else p_tE / p_tE.sum(-1, keepdim=True)
    count_N = count_keys((set_t[:, None] * num_experts + expert_tK).flatten(), (num_sets + 1) * num_experts)
    zeros_QE = torch.zeros(num_sets + 1, num_experts, dtype=p_tE.dtype, device=p_tE.device)
    return BalanceStats(
        count_N.view(num_sets + 1, num_experts)[:num_sets],
        zeros_QE.index_add(0, set_t, p_tE)[:num_sets],
        zeros_QE[:, 0].index_add(0, set_t, wide_tE.logsumexp(-1).square())[:num_sets],
    )
