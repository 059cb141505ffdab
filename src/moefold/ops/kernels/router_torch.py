"""The twin of the routing kernel, in plain torch; autograd finds the gradient.

t tokens, E experts, K choices per token.
"""

from __future__ import annotations

from torch import Tensor

from moefold.config.moe import RouterConfig
from moefold.ops.cast import widened
from moefold.ops.topk import choose_topk, limit_groups, score

# For tokens whose scores are all zero.
TINY = 1e-20


def route(logits_tE: Tensor, bias_E: Tensor | None, router: RouterConfig, top_k: int) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and what each one's answer counts for, in the logits' format."""
    wide_tE = widened(logits_tE)
    scores_tE = score(wide_tE, router.score)
    after = router.score_when == "after_topk"
    value_tE = (wide_tE if after else scores_tE).detach()
    if bias_E is not None:
        value_tE = value_tE + bias_E
    if router.num_groups > 1:
        value_tE = limit_groups(value_tE, router.num_groups, router.top_groups, router.group_terms(top_k))
    expert_tK = choose_topk(value_tE, top_k)
    weight_tK = score(wide_tE.gather(1, expert_tK), router.score) if after else scores_tE.gather(1, expert_tK)
    if router.normalize:
        weight_tK = weight_tK / (weight_tK.sum(-1, keepdim=True) + TINY)
    return expert_tK, (weight_tK * router.scale).to(logits_tE.dtype)
