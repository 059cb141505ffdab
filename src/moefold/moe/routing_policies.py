"""Routing policies: the rules that turn scores into assignments, one class each; the router is given one of them.

A rule that compares tokens decides over a whole microbatch, gathered from the ranks that share it, and keeps the part
of its own tokens: every rank decides the same, and the layout changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.config.moe import CapacityConfig, MoEConfig
from moefold.errors import UnknownNameError
from moefold.moe.topk import (
    capacity_of,
    choose_balanced,
    choose_by_experts,
    choose_topk,
    keep_within_capacity,
    limit_groups,
    only_real,
    real_tokens,
    sinkhorn,
)
from moefold.nn.batch import Batch, TokenSets
from moefold.nn.parallel_interfaces import TokenSharding


class TopKAssignment(NamedTuple):
    """Each token's experts, [t, K], before capacities. With ``kept`` only its true entries are assignments.

    ``plain`` is the plain top-k of the scores, which balance losses count, where the policy knows it already.

    >>> import torch, moefold
    >>> scores = torch.tensor([[0.1, 0.7, 0.2]])
    >>> moefold.TopKAssignment(scores.topk(2).indices).experts
    tensor([[1, 2]])
    """

    experts: Tensor
    kept: Tensor | None = None
    plain: Tensor | None = None


class RoutingPolicy(Protocol):
    """Turns scores into assignments; an object with this method can be given to `MoELayer`, `build_model`, `prove` and
    `Trainer`.

    A policy that looks at one token at a time is right under any layout. One that looks at several must look at the
    whole microbatch: ``tokens.all_gather(x_tE, batch)`` brings it together and ``tokens.local_shard`` takes this rank's
    part of the result. Probs follow from the scores of the assigned experts, as the config says.

    >>> import torch, moefold
    >>> class FirstExperts:
    ...     def select(self, logits_tE, scores_tE, bias_E, batch, tokens):
    ...         return moefold.TopKAssignment(torch.arange(2).expand(len(scores_tE), 2))
    >>> policy: moefold.RoutingPolicy = FirstExperts()
    >>> layer = moefold.MoELayer.from_config(dim=8, num_experts=4, routing_policy=policy)
    >>> layer.route(torch.randn(3, 8)).experts.tolist()
    [[0, 1], [0, 1], [0, 1]]
    """

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        """``bias_E`` is the loss-free bias: it shifts the top-k and not the probs. No input carries a gradient."""
        ...


class TopKRouting:
    """Every token takes its best experts, if configured only from its best groups of experts."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        router = self.config.router
        value_tE = logits_tE if router.score_when == "after_topk" else scores_tE
        if bias_E is not None:
            value_tE = value_tE + bias_E
        if router.num_groups > 1:
            terms = router.group_terms(self.config.top_k)
            value_tE = limit_groups(value_tE, router.num_groups, router.top_groups, terms)
        return TopKAssignment(choose_topk(value_tE, self.config.top_k))


class SinkhornRouting:
    """Every token takes its best experts of a transport plan in which each expert gets an even part of the microbatch.

    For training: in evaluation a token's experts must not depend on the other tokens, and the router takes
    ``TopKRouting``.
    """

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        iterations = self.config.router.sinkhorn_iterations
        plan_tE = _by_microbatch(logits_tE, batch, tokens, lambda part_TE: sinkhorn(part_TE, iterations))
        return TopKAssignment(choose_topk(plan_tE, self.config.top_k))


class ExpertChoiceRouting:
    """Every expert takes its best tokens of the microbatch: as many as its capacity, or an even number without one."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        config = self.config
        factor = 1.0 if config.capacity is None else config.capacity.factor

        def choose(part_TE: Tensor) -> Tensor:
            capacity = capacity_of(part_TE.shape[0], factor, config.top_k, config.num_experts)
            return choose_by_experts(part_TE, capacity)

        kept_tE = _by_microbatch(scores_tE, batch, tokens, choose)
        every_expert_E = torch.arange(config.num_experts, device=scores_tE.device)
        return TopKAssignment(every_expert_E.expand_as(scores_tE), kept_tE)


class RoundRobinRouting:
    """Round robin, whatever the scores, for benchmarks."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        token_T = torch.cat([torch.arange(size, device=logits_tE.device) for size in batch.microbatches.sizes])
        return TopKAssignment(
            choose_balanced(tokens.local_shard(token_T, batch), self.config.num_experts, self.config.top_k)
        )


def _by_microbatch(x_tE: Tensor, batch: Batch, tokens: TokenSharding, decide: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part of a decision over whole microbatches; padding is left out and gets zeros."""
    x_TE, sets = tokens.all_gather(x_tE, batch), batch.microbatches
    if (real_t := real_tokens(batch, tokens)) is None:
        return tokens.local_shard(_by_set(x_TE, sets.sizes, decide), batch)
    real_T = tokens.all_gather(real_t, batch)
    *sizes, _ = only_real(sets, real_T).sizes
    decided = _by_set(x_TE[real_T], tuple(sizes), decide)
    return tokens.local_shard(decided.new_zeros(x_TE.shape).masked_scatter(real_T[:, None], decided), batch)


def _by_set(x_TE: Tensor, sizes: tuple[int, ...], decide: Callable[[Tensor], Tensor]) -> Tensor:
    """One set after the other; sets without a token are skipped."""
    decided = [decide(part_TE) for part_TE in x_TE.split(sizes) if part_TE.shape[0]]
    return torch.cat(decided) if decided else decide(x_TE.new_zeros(1, x_TE.shape[1]))[:0]


class ReplayRouting:
    """The recorded assignments of another policy for these tokens; capacities are applied again."""

    def __init__(self, assignment: TopKAssignment) -> None:
        self.assignment = assignment

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        return self.assignment


class DropPolicy(Protocol):
    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        """True for the assignments that are kept; ``prob_tK`` without a gradient."""
        ...


class CapacityDrop:
    """Drops the assignments beyond the capacity of an expert, or of the device that holds it.

    Counted over the microbatch or over each rank's shard. A device is a run of experts that the config names, not an ep
    rank of the layout, so that a layout changes nothing.
    """

    def __init__(self, config: MoEConfig, capacity: CapacityConfig) -> None:
        self.config, self.capacity = config, capacity

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        priority_tK = prob_tK if self.capacity.drop == "probability" else None
        real_t = real_tokens(batch, tokens)
        if self.capacity.scope == "local":
            # Other ranks' shards are sets without a token here.
            shard_t = tokens.local_shard(batch.shards.set_of_token_T, batch)
            return self._keep(expert_tK, priority_tK, TokenSets(shard_t, batch.shards.sizes), real_t)
        priority_TK = None if priority_tK is None else tokens.all_gather(priority_tK, batch)
        real_T = None if real_t is None else tokens.all_gather(real_t, batch)
        return tokens.local_shard(
            self._keep(tokens.all_gather(expert_tK, batch), priority_TK, batch.microbatches, real_T), batch
        )

    def _keep(self, expert: Tensor, priority: Tensor | None, sets: TokenSets, real: Tensor | None) -> Tensor:
        owner, owners = expert, self.config.num_experts
        if self.capacity.per == "device":
            owners = self.capacity.device_groups
            owner = expert // (self.config.num_experts // owners)
        if real is not None:
            sets = only_real(sets, real)
        capacities = tuple(capacity_of(size, self.capacity.factor, self.config.top_k, owners) for size in sets.sizes)
        return keep_within_capacity(owner, priority, sets.set_of_token_T, capacities, owners)


PolicyMaker = Callable[[MoEConfig], RoutingPolicy]
# A policy of moefold's own by its name, an object for all layers, or a class or function that makes one for each layer.
PolicyOrName = str | RoutingPolicy | PolicyMaker

ROUTING_POLICIES: dict[str, PolicyMaker] = {
    "topk": TopKRouting,
    "sinkhorn": SinkhornRouting,
    "expert_choice": ExpertChoiceRouting,
    "balanced": RoundRobinRouting,
}


def build_routing_policy(config: MoEConfig, training: bool = True) -> RoutingPolicy:
    kind = "topk" if config.router.kind == "sinkhorn" and not training else config.router.kind
    return ROUTING_POLICIES[kind](config)


def policy_maker(policy: PolicyOrName | None) -> PolicyMaker | None:
    """What a model asks for each of its MoE layers; None where the config's own policy is to be used."""
    if policy is None:
        return None
    if isinstance(policy, str):
        if policy not in ROUTING_POLICIES:
            raise UnknownNameError("routing policy", policy, ROUTING_POLICIES)
        return ROUTING_POLICIES[policy]
    if not isinstance(policy, type) and hasattr(policy, "select"):
        return lambda config: policy
    if callable(policy):
        return policy
    raise TypeError(f"a routing policy has a method `select`, and {type(policy).__name__} has none")
