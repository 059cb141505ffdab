"""The rules that turn scores into choices, one class each; the router is handed one of them.

t tokens of this rank, N tokens of the microbatches, E experts, K choices per token.

A rule that looks at many tokens at once looks at a whole microbatch, gathered from the ranks that share it, and keeps
its own tokens' part of the answer: every rank decides the same, and the layout changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.config.moe import CapacityConfig, MoEConfig
from moefold.errors import UnknownNameError
from moefold.moe.capacity import capacity_of, keep_within_capacity
from moefold.moe.padding_mask import only_real, real_tokens
from moefold.moe.topk import choose_balanced, choose_by_experts, choose_topk, limit_groups, sinkhorn
from moefold.nn.batch import Batch, TokenSets
from moefold.nn.parallel_interfaces import TokenSharding


class TopKAssignment(NamedTuple):
    """The experts of each token, before capacities. With ``kept_tK`` only its true entries are assignments at all.

    ``plain_tK`` is the plain top-k of the scores, which balance losses count, where the policy knows it already.

    >>> import torch, moefold
    >>> scores = torch.tensor([[0.1, 0.7, 0.2]])
    >>> moefold.TopKAssignment(scores.topk(2).indices).expert_tK
    tensor([[1, 2]])
    """

    expert_tK: Tensor
    kept_tK: Tensor | None = None
    plain_tK: Tensor | None = None


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
    >>> layer = moefold.MoELayer.from_config(dim=8, num_experts=4, routing_policy=FirstExperts())
    >>> layer.route(torch.randn(3, 8)).expert_tK.tolist()
    [[0, 1], [0, 1], [0, 1]]
    """

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        """``bias_E`` is the loss-free bias: it shifts choices and nothing else. No input carries a gradient."""
        ...


class TopKRouting:
    """Every token takes its best experts, if asked only from its best groups of experts."""

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
    """Every token takes its best experts of a plan in which each expert gets its share of the microbatch.

    For training: in evaluation a token's experts must not depend on the other tokens, and the router takes
    ``TopKRouting``.
    """

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        iterations = self.config.router.sinkhorn_iterations
        plan_tE = _by_microbatch(logits_tE, batch, tokens, lambda part_nE: sinkhorn(part_nE, iterations))
        return TopKAssignment(choose_topk(plan_tE, self.config.top_k))


class ExpertChoiceRouting:
    """Every expert takes its best tokens of the microbatch: as many as its capacity, or an even share without one."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        config = self.config
        factor = 1.0 if config.capacity is None else config.capacity.factor

        def choose(part_nE: Tensor) -> Tensor:
            capacity = capacity_of(part_nE.shape[0], factor, config.top_k, config.num_experts)
            return choose_by_experts(part_nE, capacity)

        kept_tE = _by_microbatch(scores_tE, batch, tokens, choose)
        every_expert_E = torch.arange(config.num_experts, device=scores_tE.device)
        return TopKAssignment(every_expert_E.expand_as(scores_tE), kept_tE)


class RoundRobinRouting:
    """A round robin that no score changes, for benchmarks."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        token_N = torch.cat([torch.arange(size, device=logits_tE.device) for size in batch.microbatches.sizes])
        return TopKAssignment(
            choose_balanced(tokens.local_shard(token_N, batch), self.config.num_experts, self.config.top_k)
        )


def _by_microbatch(x_tE: Tensor, batch: Batch, tokens: TokenSharding, decide: Callable[[Tensor], Tensor]) -> Tensor:
    """My part of what is decided over whole microbatches; pads are not looked at and get zeros."""
    x_NE, sets = tokens.all_gather(x_tE, batch), batch.microbatches
    if (real_t := real_tokens(batch, tokens)) is None:
        return tokens.local_shard(_by_set(x_NE, sets.sizes, decide), batch)
    real_N = tokens.all_gather(real_t, batch)
    *sizes, _ = only_real(sets, real_N).sizes
    decided = _by_set(x_NE[real_N], tuple(sizes), decide)
    return tokens.local_shard(decided.new_zeros(x_NE.shape).masked_scatter(real_N[:, None], decided), batch)


def _by_set(x_NE: Tensor, sizes: tuple[int, ...], decide: Callable[[Tensor], Tensor]) -> Tensor:
    """One set after the other; one without a token has nothing to decide."""
    decided = [decide(part_nE) for part_nE in x_NE.split(sizes) if part_nE.shape[0]]
    return torch.cat(decided) if decided else decide(x_NE.new_zeros(1, x_NE.shape[1]))[:0]


class ReplayRouting:
    """What another selector once chose for these tokens; capacities are applied anew."""

    def __init__(self, choice: TopKAssignment) -> None:
        self.choice = choice

    def select(
        self, logits_tE: Tensor, scores_tE: Tensor, bias_E: Tensor | None, batch: Batch, tokens: TokenSharding
    ) -> TopKAssignment:
        return self.choice


class DropPolicy(Protocol):
    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        """True for the choices that stay; ``prob_tK`` is what each one's answer counts for, without a gradient."""
        ...


class CapacityDrop:
    """Drops the choices that an expert, or the device that holds it, has no room for.

    Counted over the microbatch or over each rank's shard. A device is a run of experts that the config names and not
    the layout's expert rank, so that a layout changes nothing.
    """

    def __init__(self, config: MoEConfig, capacity: CapacityConfig) -> None:
        self.config, self.capacity = config, capacity

    def kept(self, expert_tK: Tensor, prob_tK: Tensor, batch: Batch, tokens: TokenSharding) -> Tensor:
        priority_tK = prob_tK if self.capacity.drop == "probability" else None
        real_t = real_tokens(batch, tokens)
        if self.capacity.scope == "local":
            # Shards of other ranks are sets without a token here.
            shard_t = tokens.local_shard(batch.shards.set_of_token_N, batch)
            return self._keep(expert_tK, priority_tK, TokenSets(shard_t, batch.shards.sizes), real_t)
        priority_NK = None if priority_tK is None else tokens.all_gather(priority_tK, batch)
        real_N = None if real_t is None else tokens.all_gather(real_t, batch)
        return tokens.local_shard(
            self._keep(tokens.all_gather(expert_tK, batch), priority_NK, batch.microbatches, real_N), batch
        )

    def _keep(self, expert: Tensor, priority: Tensor | None, sets: TokenSets, real: Tensor | None) -> Tensor:
        owner, owners = expert, self.config.num_experts
        if self.capacity.per == "device":
            owners = self.capacity.device_groups
            owner = expert // (self.config.num_experts // owners)
        if real is not None:
            sets = only_real(sets, real)
        capacities = tuple(capacity_of(size, self.capacity.factor, self.config.top_k, owners) for size in sets.sizes)
        return keep_within_capacity(owner, priority, sets.set_of_token_N, capacities, owners)


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
