"""From logits to scores, and from scores to choices.

t tokens of this rank, T tokens of whole sets, E experts, K choices per token, G groups of experts.

Choices are whole numbers without a gradient. Equal scores go to the lower expert number or the earlier token, so the
same scores give the same choices on every machine. A *set* is a group of tokens that is decided together, a
microbatch; sets have equal sizes and follow one another, so a reshape takes them apart.
"""

from __future__ import annotations

from math import log
from typing import Literal

import torch
from torch import Tensor


def score(logits_tE: Tensor, kind: Literal["softmax", "sigmoid"]) -> Tensor:
    """softmax: experts compete for a token. sigmoid: each expert judges a token by itself."""
    return logits_tE.softmax(-1) if kind == "softmax" else logits_tE.sigmoid()


def choose_topk(scores_tE: Tensor, k: int) -> Tensor:
    """Each token's k best experts, best first. A stable sort, because ``topk`` does not say how it breaks ties."""
    return scores_tE.argsort(dim=-1, descending=True, stable=True)[:, :k]


def limit_groups(scores_tE: Tensor, num_groups: int, top_groups: int, how: Literal["max", "top2_sum"]) -> Tensor:
    """Rule out experts outside a token's best groups, so that its rows travel to few places."""
    grouped_tGe = scores_tE.unflatten(-1, (num_groups, -1))
    best = 1 if how == "max" else min(2, grouped_tGe.shape[-1])
    group_score_tG = grouped_tGe.topk(best, dim=-1).values.sum(-1)
    open_tG = torch.zeros_like(group_score_tG, dtype=torch.bool).scatter(
        1, choose_topk(group_score_tG, top_groups), True
    )
    return grouped_tGe.masked_fill(~open_tG[:, :, None], -torch.inf).flatten(-2)


def sinkhorn(logits_TE: Tensor, num_sets: int, iterations: int) -> Tensor:
    """Log of a transport plan: exp(logits), rescaled in turn so that each token gives 1 and each expert gets its share.

    A fixed number of rounds, so that no rank has to ask whether another has converged. In logs, because exp(logits)
    overflows, and in float32 at least, because the plan is a product of many factors.
    """
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    plan_snE = logits_TE.to(dtype).unflatten(0, (num_sets, -1))
    log_share = log(plan_snE.shape[1] / plan_snE.shape[2])
    for _ in range(iterations):
        plan_snE = plan_snE - plan_snE.logsumexp(2, keepdim=True)
        plan_snE = plan_snE - plan_snE.logsumexp(1, keepdim=True) + log_share
    return plan_snE.flatten(0, 1)


def choose_by_experts(scores_TE: Tensor, num_sets: int, capacity: int) -> Tensor:
    """Expert choice: in every set, each expert takes its ``capacity`` best tokens. True where it did, [T, E]."""
    scores_snE = scores_TE.unflatten(0, (num_sets, -1))
    best_scE = scores_snE.argsort(dim=1, descending=True, stable=True)[:, :capacity]
    return torch.zeros_like(scores_snE, dtype=torch.bool).scatter(1, best_scE, True).flatten(0, 1)


def choose_balanced(token_t: Tensor, num_experts: int, k: int) -> Tensor:
    """Round robin by the token's number in its microbatch, not in its shard: no layout may change who goes where."""
    return (token_t[:, None] * k + torch.arange(k, device=token_t.device)) % num_experts


def sinkhorn_by_definition(logits_TE: Tensor, num_sets: int, iterations: int) -> Tensor:
    """The twin of ``sinkhorn``: the plan itself, one set after the other."""
    plans = []
    for plan_nE in logits_TE.double().exp().chunk(num_sets):
        for _ in range(iterations):
            plan_nE = plan_nE / plan_nE.sum(1, keepdim=True)
            plan_nE = plan_nE / plan_nE.sum(0, keepdim=True) * (plan_nE.shape[0] / plan_nE.shape[1])
        plans.append(plan_nE)
    return torch.cat(plans)


def choose_by_experts_by_loop(scores_TE: Tensor, num_sets: int, capacity: int) -> Tensor:
    """The twin of ``choose_by_experts``: every expert reads through every set."""
    kept_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
    size = scores_TE.shape[0] // num_sets
    for start in range(0, scores_TE.shape[0], size):
        for expert in range(scores_TE.shape[1]):
            tokens = sorted(range(start, start + size), key=lambda token: (-scores_TE[token, expert].item(), token))
            kept_TE[tokens[:capacity], expert] = True
    return kept_TE
