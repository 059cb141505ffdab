"""Scores every token against every expert and says where it goes, with what weight.

t tokens of this rank, D width, E experts, K choices per token.

The choice is a decision and has no gradient; the router learns through the weights of the chosen experts and through
the balance losses. It is computed in float32: rounded scores flip choices, and a flipped choice is not a small error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefold.config.moe import MoEConfig, RouterConfig
from moefold.moe.dispatch.base import Routing
from moefold.moe.load_balancing import RoutingReport, balance_losses, count_choices, counts_anything
from moefold.moe.padding_mask import keep_real, real_tokens
from moefold.moe.routing_policies import (
    CapacityDrop,
    DropPolicy,
    RoutingPolicy,
    TopKAssignment,
    TopKRouting,
    build_routing_policy,
)
from moefold.moe.topk import choose_topk, score
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.ops.fp32_linear import fp32_linear

# Logits, loss-free bias, rule and number of choices to experts and weights, all at once.
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
    ) -> None:
        """``routing_policy`` is the one the config names, unless another is given; ``route`` does its work for top-k.

        Evaluation may select otherwise than training does.
        """
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router.logit_bias else None
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if config.router.expert_bias else None)
        self.bias_update_rate = config.router.bias_update_rate
        self.tokens = tokens
        self.routing_policy = build_routing_policy(config) if routing_policy is None else routing_policy
        self.evaluation_selector = (
            build_routing_policy(config, training=False) if routing_policy is None else routing_policy
        )
        self.route = route if isinstance(self.routing_policy, TopKRouting) else None
        self.drop: DropPolicy | None = None if config.capacity is None else CapacityDrop(config, config.capacity)

    def forward(self, x_tD: Tensor, batch: Batch, earlier_E: Tensor | None) -> tuple[Routing, RoutingReport]:
        logits_tE = self._logits(x_tD)
        choice, weight_tK = self._choose(logits_tE, batch)
        kept_tK = choice.kept_tK
        # A selector that says who is kept has seen to the capacities itself.
        if self.drop is not None and kept_tK is None:
            kept_tK = self.drop.kept(choice.expert_tK, weight_tK.detach(), batch, self.tokens)
        real_t = real_tokens(batch, self.tokens)
        routing = Routing(choice.expert_tK, weight_tK, keep_real(choice.expert_tK, kept_tK, real_t))
        chosen = TopKAssignment(choice.expert_tK, keep_real(choice.expert_tK, choice.kept_tK, real_t))
        plain_tK = self.plain_topk(logits_tE, choice)
        plain = TopKAssignment(plain_tK, keep_real(plain_tK, None, real_t))
        return routing, self._report(logits_tE, routing, chosen, plain, batch, earlier_E)

    def _report(
        self,
        logits_tE: Tensor,
        routing: Routing,
        chosen: TopKAssignment,
        plain: TopKAssignment,
        batch: Batch,
        earlier_E: Tensor | None,
    ) -> RoutingReport:
        num_experts = self.config.num_experts
        counts_E = count_choices(chosen, num_experts)
        return RoutingReport(
            counts_E,
            counts_E if self.drop is None else count_choices(routing, num_experts),
            counts_E if plain.expert_tK is chosen.expert_tK else count_choices(plain, num_experts),
            balance_losses(self.config, logits_tE, plain, batch, self.tokens, earlier_E),
        )

    def _logits(self, x_tD: Tensor) -> Tensor:
        dtype = torch.promote_types(x_tD.dtype, torch.float32) if self.config.router.fp32 else x_tD.dtype
        return fp32_linear(x_tD, self.weight, self.bias, dtype)

    def _choose(self, logits_tE: Tensor, batch: Batch) -> tuple[TopKAssignment, Tensor]:
        if self.route is not None:
            expert_tK, weight_tK = self.route(logits_tE, self.expert_bias, self.config.router, self.config.top_k)
            return TopKAssignment(expert_tK), weight_tK
        scores_tE = score(logits_tE, self.config.router.score)
        routing_policy = self.routing_policy if self.training else self.evaluation_selector
        choice = routing_policy.select(logits_tE.detach(), scores_tE.detach(), self.expert_bias, batch, self.tokens)
        return choice, self._weights(logits_tE, scores_tE, choice)

    def plain_topk(self, logits_tE: Tensor, choice: TopKAssignment) -> Tensor:
        """The plain top-k of the scores, or the assignments themselves where they are that or where no loss asks."""
        if choice.plain_tK is not None:
            return choice.plain_tK
        router = self.config.router
        is_plain = isinstance(self.routing_policy, TopKRouting) and self.expert_bias is None and router.num_groups == 1
        if is_plain or not counts_anything(self.config.balance):
            return choice.expert_tK
        logits_tE = logits_tE.detach()
        value_tE = logits_tE if router.score_when == "after_topk" else score(logits_tE, router.score)
        return choose_topk(value_tE, self.config.top_k)

    def _weights(self, logits_tE: Tensor, scores_tE: Tensor, choice: TopKAssignment) -> Tensor:
        """What each chosen expert's answer counts for; dropping later does not change it."""
        router = self.config.router
        if router.score_when == "after_topk":
            weight_tK = score(logits_tE.gather(1, choice.expert_tK), router.score)
        else:
            weight_tK = scores_tE.gather(1, choice.expert_tK)
        if choice.kept_tK is not None:
            weight_tK = weight_tK * choice.kept_tK
        if router.normalize:
            # The tiny term is for tokens that no expert chose.
            weight_tK = weight_tK / (weight_tK.sum(-1, keepdim=True) + 1e-20)
        return weight_tK * router.scale
