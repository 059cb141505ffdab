"""References of the routing kernel and of the balance kernel, in plain torch; autograd differentiates them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moefold.config.moe import RouterConfig
from moefold.moe.topk import TINY, choose_topk, limit_groups, score
from moefold.ops.fp32_linear import upcast
from moefold.ops.segments import count_keys


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
