"""The rules that turn scores into choices, one class each; the router is handed one of them.

t tokens of this rank, T tokens of the microbatches, E experts, K choices per token.

A rule that looks at many tokens at once looks at a whole microbatch, gathered from the ranks that share it, and keeps
its own tokens' part of the answer: every rank decides the same, and the layout changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.config.moe import CapacityConfig, MoEConfig
from moefold.model.batch import Batch
from moefold.model.seams import TokenSeam
from moefold.ops.capacity import capacity_of, keep_within_capacity
from moefold.ops.topk import choose_balanced, choose_by_experts, choose_topk, limit_groups, sinkhorn


class Choice(NamedTuple):
    """Who was chosen, before capacities. With ``kept_tK`` only the true entries were chosen at all."""

    expert_tK: Tensor
    kept_tK: Tensor | None = None


class Selector(Protocol):
    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSeam
    ) -> Choice:
        """``bias_E`` is the loss-free bias: it shifts choices and nothing else. No input carries a gradient."""
        ...


class TopK:
    """Every token takes its best experts, if asked only from its best groups of experts."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSeam
    ) -> Choice:
        router = self.config.router
        value_tE = logits_tE if router.score_when == "after_topk" else scores_tE
        if bias_E is not None:
            value_tE = value_tE + bias_E
        if router.num_groups > 1:
            value_tE = limit_groups(value_tE, router.num_groups, router.top_groups, router.group_score)
        return Choice(choose_topk(value_tE, self.config.top_k))


class SinkhornSelect:
    """Every token takes its best experts of a plan in which each expert gets its share of the microbatch."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSeam
    ) -> Choice:
        iterations = self.config.router.sinkhorn_iterations
        plan_TE = sinkhorn(tokens.whole(logits_tE), batch.num_microbatches, iterations)
        return Choice(choose_topk(tokens.mine(plan_TE), self.config.top_k))


class ExpertChoiceSelect:
    """Every expert takes its best tokens of the microbatch: as many as its capacity, or an even share without one."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSeam
    ) -> Choice:
        config = self.config
        factor = 1.0 if config.capacity is None else config.capacity.factor
        capacity = capacity_of(batch.microbatches.sizes[0], factor, config.top_k, config.num_experts)
        kept_TE = choose_by_experts(tokens.whole(scores_tE), batch.num_microbatches, capacity)
        every_expert_E = torch.arange(config.num_experts, device=scores_tE.device)
        return Choice(every_expert_E.expand_as(scores_tE), tokens.mine(kept_TE))


class BalancedSelect:
    """A round robin that no score changes, for benchmarks."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSeam
    ) -> Choice:
        token_T = torch.arange(batch.num_tokens, device=logits_tE.device) % batch.microbatches.sizes[0]
        return Choice(choose_balanced(tokens.mine(token_T), self.config.num_experts, self.config.top_k))


class ReplaySelect:
    """What another selector once chose for these tokens; capacities are applied anew."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSeam
    ) -> Choice:
        return self.choice


class Dropper(Protocol):
    def kept(self, expert_tK: Tensor, scores_tE: Tensor, batch: Batch, tokens: TokenSeam) -> Tensor:
        """True for the choices that stay."""
        ...


class CapacityDrop:
    """Drops the choices that an expert has no room for, counted over the microbatch or over each rank's shard."""

    def __init__(self, config: MoEConfig, capacity: CapacityConfig) -> None:
        self.config, self.capacity = config, capacity

    def kept(self, expert_tK: Tensor, scores_tE: Tensor, batch: Batch, tokens: TokenSeam) -> Tensor:
        score_tK = scores_tE.gather(1, expert_tK) if self.capacity.drop == "probability" else None
        if self.capacity.scope == "local":
            # Shards of other ranks are sets without a token here.
            shard_t = tokens.mine(batch.shards.set_of_token)
            return self._keep(expert_tK, score_tK, shard_t, batch.shards.sizes)
        score_TK = None if score_tK is None else tokens.whole(score_tK)
        sets = batch.microbatches
        return tokens.mine(self._keep(tokens.whole(expert_tK), score_TK, sets.set_of_token, sets.sizes))

    def _keep(self, expert: Tensor, score: Tensor | None, set_of_token: Tensor, sizes: tuple[int, ...]) -> Tensor:
        top_k, num_experts = self.config.top_k, self.config.num_experts
        capacities = tuple(capacity_of(size, self.capacity.factor, top_k, num_experts) for size in sizes)
        return keep_within_capacity(expert, score, set_of_token, capacities, num_experts)


SELECTORS: dict[str, Callable[[MoEConfig], Selector]] = {
    "topk": TopK,
    "sinkhorn": SinkhornSelect,
    "expert_choice": ExpertChoiceSelect,
    "balanced": BalancedSelect,
}


def build_selector(config: MoEConfig) -> Selector:
    return SELECTORS[config.router.kind](config)
