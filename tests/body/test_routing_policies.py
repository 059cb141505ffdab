from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.thread_ranks import CutTokens, on_threads
from torch import Tensor

from moefold.config.moe import CapacityConfig, MoEConfig, RouterConfig
from moefold.moe.routing_policies import (
    ROUTING_POLICIES,
    CapacityDrop,
    ReplayRouting,
    TopKAssignment,
    TopKRouting,
    build_routing_policy,
)
from moefold.moe.topk import capacity_of
from moefold.nn.batch import Batch, whole_batch
from moefold.nn.parallel_interfaces import LocalTokens

CONFIG = MoEConfig(num_experts=8, top_k=2)


def batch_of(num_tokens: int, microbatches: int = 1, shards: int = 1) -> Batch:
    token = torch.arange(num_tokens)
    return whole_batch(
        token,
        token,
        (num_tokens // microbatches,) * microbatches,
        documents_per_microbatch=(1,) * microbatches,
        tensor_size=shards,
        step_labels=num_tokens,
        step_tokens=num_tokens,
    )


def draw(num_tokens: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, 8, dtype=torch.float64)
    return logits, logits.softmax(-1)


def choose(config: MoEConfig, num_tokens: int = 11, bias: Tensor | None = None) -> tuple[Tensor, list[list[int]]]:
    logits, scores = draw(num_tokens)
    choice = build_routing_policy(config).select(logits, scores, bias, batch_of(num_tokens), LocalTokens())
    return scores, choice.experts.tolist()


def test_the_bias_shifts_choices() -> None:
    bias = torch.tensor([0.0, 0, 0, 10, 0, 0, -10, 0])
    _, chosen = choose(CONFIG, bias=bias)
    assert all(experts[0] == 3 and 6 not in experts for experts in chosen)


def test_groups_limit_the_choice() -> None:
    router = RouterConfig(num_groups=4, top_groups=1, group_score="topk_sum")
    scores, chosen = choose(replace(CONFIG, router=router))
    for row, experts in zip(scores, chosen, strict=True):
        best = row.view(4, 2).sum(1).argmax().item()
        assert {expert // 2 for expert in experts} == {best}


def test_choosing_on_logits_or_scores() -> None:
    """The same without a bias; with one, it is added to what is compared."""
    logits, scores = draw(11)
    bias = torch.linspace(-0.3, 0.3, 8, dtype=torch.float64)
    for when, values in (("before_topk", scores), ("after_topk", logits)):
        config = replace(CONFIG, router=RouterConfig(score_when=when))  # type: ignore[arg-type]
        choice = TopKRouting(config).select(logits, scores, bias, batch_of(11), LocalTokens())
        assert torch.equal(choice.experts, (values + bias).topk(2).indices)


def test_sinkhorn_chooses_more_evenly_than_topk() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 8, dtype=torch.float64) + torch.linspace(0, 3, 8)
    spread = {}
    for kind in ("topk", "sinkhorn"):
        routing_policy = build_routing_policy(replace(CONFIG, router=RouterConfig(kind=kind)))  # type: ignore[arg-type]
        expert = routing_policy.select(logits, logits.softmax(-1), None, batch_of(64, 2), LocalTokens()).experts
        spread[kind] = expert.flatten().bincount(minlength=8).max().item()
    assert spread["sinkhorn"] < 24 < spread["topk"]


@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=0.5)])
def test_every_expert_chooses_its_capacity_in_every_microbatch(capacity: CapacityConfig | None) -> None:
    config = replace(CONFIG, router=RouterConfig(kind="expert_choice"), capacity=capacity)
    logits, scores = draw(22)
    choice = build_routing_policy(config).select(logits, scores, None, batch_of(22, 2), LocalTokens())
    assert choice.kept is not None
    taken = capacity_of(11, 0.5 if capacity else 1.0, 2, 8)
    assert (choice.kept.view(2, 11, 8).sum(1) == taken).all()


def test_replay_repeats() -> None:
    choice = TopKAssignment(torch.zeros(3, 2, dtype=torch.int64))
    assert ReplayRouting(choice).select(*draw(3), None, batch_of(3), LocalTokens()) is choice


@pytest.mark.parametrize("kind", ROUTING_POLICIES)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_no_cut_changes_a_choice(kind: Any, world: int) -> None:
    """Seven tokens: uneven shares, and none for the last of eight."""
    routing_policy = build_routing_policy(replace(CONFIG, router=RouterConfig(kind=kind)))
    logits, scores = draw(7)
    whole = routing_policy.select(logits, scores, None, batch_of(7), LocalTokens())

    def part(tokens: CutTokens) -> TopKAssignment:
        return routing_policy.select(tokens.local_shard(logits), tokens.local_shard(scores), None, batch_of(7), tokens)

    parts = on_threads(7, world, part)
    assert torch.equal(torch.cat([choice.experts for choice in parts]), whole.experts)
    if whole.kept is not None:
        assert torch.equal(torch.cat([c.kept for c in parts if c.kept is not None]), whole.kept)


@pytest.mark.parametrize("kind", ROUTING_POLICIES)
def test_microbatches_side_by_side_choose_as_they_would_alone(kind: Any) -> None:
    routing_policy, (logits, scores) = build_routing_policy(replace(CONFIG, router=RouterConfig(kind=kind))), draw(26)
    together = routing_policy.select(logits, scores, None, batch_of(26, 2), LocalTokens())
    halves = zip(logits.split(13), scores.split(13), strict=True)
    alone = [routing_policy.select(half, score, None, batch_of(13), LocalTokens()) for half, score in halves]
    assert torch.equal(together.experts, torch.cat([choice.experts for choice in alone]))
    if together.kept is not None:
        assert torch.equal(together.kept, torch.cat([c.kept for c in alone if c.kept is not None]))


@pytest.mark.parametrize("scope", ["full", "local"])
@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("per", ["expert", "device"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_no_cut_changes_who_is_dropped(scope: Any, drop: Any, per: Any, world: int) -> None:
    """A shard's own capacity depends on the shards; the one-process reference is told them and drops alike."""
    capacity = CapacityConfig(0.5, per, 4 if per == "device" else 1, scope=scope, drop=drop)
    dropper, (_, scores) = CapacityDrop(CONFIG, capacity), draw(27)
    prob, expert = scores.topk(2)
    batch = batch_of(27, shards=world)
    whole = dropper.kept(expert, prob, batch, LocalTokens())
    parts = on_threads(27, world, lambda t: dropper.kept(t.local_shard(expert), t.local_shard(prob), batch, t))
    assert torch.equal(torch.cat(list(parts)), whole)
    assert not whole.all()


def test_microbatches_side_by_side_drop_as_they_would_alone() -> None:
    dropper, (_, scores) = CapacityDrop(CONFIG, CapacityConfig(factor=0.75)), draw(26)
    prob, expert = scores.topk(2)
    together = dropper.kept(expert, prob, batch_of(26, 2), LocalTokens())
    alone = [
        dropper.kept(e, p, batch_of(13), LocalTokens()) for e, p in zip(expert.split(13), prob.split(13), strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))
