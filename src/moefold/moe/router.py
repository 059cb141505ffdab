"""The router: scores every token against every expert and gives it K experts with a prob for each.

Top-k is a decision and has no gradient; the router learns through the probs of the chosen experts and through the
balance losses. It is computed in float32: rounded scores flip assignments, and a flipped assignment is not a small
error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefold.config.moe import MoEConfig, RouterConfig
from moefold.moe.dispatch.base import Routing
from moefold.moe.load_balancing import (
    IN_TORCH,
    BalanceKernels,
    RoutingReport,
    balance_losses,
    count_assignments,
    counts_anything,
)
from moefold.moe.routing_policies import (
    CapacityDrop,
    DropPolicy,
    RoutingPolicy,
    TopKAssignment,
    TopKRouting,
    build_routing_policy,
)
from moefold.moe.topk import choose_topk, keep_real, normalize_probs, real_tokens, score
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.ops.fp32_linear import fp32_linear

# Logits, loss-free bias, router config and top-k to experts and probs, in one call.
Route = Callable[[Tensor, Tensor | None, RouterConfig, int], tuple[Tensor, Tensor]]


class Router(nn.Module):
    expert_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        dim: int,
        tokens: TokenSharding,
        routing_policy: RoutingPolicy | None = None,
        route: Route | None = None,
        balance: BalanceKernels = IN_TORCH,
    ) -> None:
        """``routing_policy`` overrides the one that the config names; ``route`` is a fused kernel for top-k routing,
        ``balance`` has those of balance losses.

        Evaluation may take another policy than training.
        """
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router.logit_bias else None
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if config.router.expert_bias else None)
        self.bias_update_rate = config.router.bias_update_rate
        self.tokens = tokens
        self.routing_policy = build_routing_policy(config) if routing_policy is None else routing_policy
        self.evaluation_policy = (
            build_routing_policy(config, training=False) if routing_policy is None else routing_policy
        )
        self.route = route if isinstance(self.routing_policy, TopKRouting) else None
        self.balance = balance
        self.drop: DropPolicy | None = None if config.capacity is None else CapacityDrop(config, config.capacity)

    def forward(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None) -> tuple[Routing, RoutingReport]:
        logits_tE = self._logits(x_tD)
        assignment, prob_tK, scores_tE = self._assign(logits_tE, batch)
        kept_tK = assignment.kept
        # A policy that says what is kept has applied the capacities itself.
        if self.drop is not None and kept_tK is None:
            kept_tK = self.drop.kept(assignment.experts, prob_tK.detach(), batch, self.tokens)
        real_t = real_tokens(batch, self.tokens)
        kept_tK = keep_real(assignment.experts, kept_tK, real_t)
        chosen = TopKAssignment(assignment.experts, keep_real(assignment.experts, assignment.kept, real_t))
        plain_tK = self.plain_topk(logits_tE, assignment)
        plain = TopKAssignment(plain_tK, keep_real(plain_tK, None, real_t))
        losses, plain_E = balance_losses(
            self.config, logits_tE, plain, batch, self.tokens, earlier_E, scores_tE, self.balance
        )
        # Counted once each, and only where they differ: a policy's own drops are no drops of the plain top-k.
        num_experts = self.config.num_experts
        same = plain_tK is assignment.experts and assignment.kept is None
        counts_E = plain_E if same else count_assignments(chosen, num_experts)
        kept_E = counts_E
        if self.drop is not None:
            kept_E = count_assignments(TopKAssignment(assignment.experts, kept_tK), num_experts)
        return Routing(assignment.experts, prob_tK, kept_tK, kept_E), RoutingReport(counts_E, kept_E, plain_E, losses)

    def _logits(self, x_tD: Tensor) -> Tensor:
        dtype = torch.promote_types(x_tD.dtype, torch.float32) if self.config.router.fp32 else x_tD.dtype
        return fp32_linear(x_tD, self.weight, self.bias, dtype)

    def _assign(self, logits_tE: Tensor, batch: Batch) -> tuple[TopKAssignment, Tensor, Tensor | None]:
        """Assignments, their probs, and the scores of all experts where they were computed."""
        if self.route is not None:
            expert_tK, prob_tK = self.route(logits_tE, self.expert_bias, self.config.router, self.config.top_k)
            return TopKAssignment(expert_tK), prob_tK, None
        scores_tE = score(logits_tE, self.config.router.score)
        routing_policy = self.routing_policy if self.training else self.evaluation_policy
        assignment = routing_policy.select(logits_tE.detach(), scores_tE.detach(), self.expert_bias, batch, self.tokens)
        return assignment, self._probs(logits_tE, scores_tE, assignment), scores_tE

    def plain_topk(self, logits_tE: Tensor, assignment: TopKAssignment) -> Tensor:
        """The plain top-k of the scores; the assignments themselves where they are that, or where no loss needs it."""
        if assignment.plain is not None:
            return assignment.plain
        router = self.config.router
        is_plain = isinstance(self.routing_policy, TopKRouting) and self.expert_bias is None and router.num_groups == 1
        if is_plain or not counts_anything(self.config.balance):
            return assignment.experts
        logits_tE = logits_tE.detach()
        value_tE = logits_tE if router.score_when == "after_topk" else score(logits_tE, router.score)
        return choose_topk(value_tE, self.config.top_k)

    def _probs(self, logits_tE: Tensor, scores_tE: Tensor, assignment: TopKAssignment) -> Tensor:
        """The prob of each assignment; dropping later does not change it."""
        router, kept_tK = self.config.router, assignment.kept
        is_softmax = router.score == "softmax"
        if is_softmax and (router.score_when == "after_topk" or (router.normalize and kept_tK is None)):
            # exp(l) / sum exp(l) over the chosen experts: the softmax of their logits, already normalized.
            prob_tK = logits_tE.gather(1, assignment.experts).softmax(-1)
            normalized = kept_tK is None
        else:
            values_tE = scores_tE if router.score_when == "before_topk" else logits_tE
            prob_tK = values_tE.gather(1, assignment.experts)
            prob_tK = prob_tK if router.score_when == "before_topk" else prob_tK.sigmoid()
            normalized = False
        if kept_tK is not None:
            prob_tK = prob_tK * kept_tK
        if router.normalize and not normalized:
            prob_tK = normalize_probs(prob_tK)
        return prob_tK if router.scale == 1.0 else prob_tK * router.scale
