"""The router against a token-by-token one, written from the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.thread_ranks import CutTokens, on_threads
from torch import Tensor

from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.moe.dispatch.base import Routing
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.router import Router
from moefold.moe.routing_policies import ReplayRouting, TopKAssignment
from moefold.nn.batch import Batch, whole_batch
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.ops.fp32_linear import fp32_linear, fp32_linear_reference

WIDTH = 5
CONFIG = MoEConfig(num_experts=8, top_k=3)
KINDS: dict[str, RouterConfig] = {
    "mixtral": RouterConfig(score_when="after_topk"),
    "qwen3": RouterConfig(normalize=True),
    "olmoe": RouterConfig(),
    "deepseek_v2": RouterConfig(num_groups=4, top_groups=2, scale=16.0),
    "deepseek_v3": RouterConfig(
        score="sigmoid", normalize=True, scale=2.5, num_groups=4, top_groups=2, group_score="topk_sum", expert_bias=True
    ),
    "gpt_oss": RouterConfig(score_when="after_topk", logit_bias=True),
}


def batch_of(num_tokens: int, shards: int = 1) -> Batch:
    token = torch.arange(num_tokens)
    return whole_batch(
        token,
        token,
        (num_tokens,),
        tensor_size=shards,
        step_labels=num_tokens,
        step_tokens=num_tokens,
        step_sequences=1,
    )


def build(config: MoEConfig, dtype: torch.dtype = torch.float64) -> Router:
    torch.manual_seed(0)
    router = Router(config, WIDTH, LocalTokens())
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.2)
    return router.to(dtype)


def draw(num_tokens: int) -> Tensor:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)


def one_token(x_D: Tensor, router: Router, config: MoEConfig) -> tuple[list[int], Tensor]:
    rule = config.router
    logits = torch.stack([x_D @ w for w in router.weight])
    if router.bias is not None:
        logits = logits + router.bias
    scores = logits.exp() / logits.exp().sum() if rule.score == "softmax" else 1 / (1 + (-logits).exp())
    rank = (logits if rule.score_when == "after_topk" else scores).tolist()
    if router.expert_bias is not None:
        rank = [v + b for v, b in zip(rank, router.expert_bias.tolist(), strict=True)]
    size = len(rank) // rule.num_groups
    groups = [list(range(g * size, g * size + size)) for g in range(rule.num_groups)]
    best = 1 if rule.group_score == "max" else config.top_k // rule.top_groups
    groups.sort(key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:best]))
    allowed = [e for group in groups[: rule.top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -rank[e])[: config.top_k]
    if rule.score_when == "after_topk":
        weight = logits[chosen].exp() / logits[chosen].exp().sum()
    else:
        weight = scores[chosen]
    return chosen, (weight / weight.sum() if rule.normalize else weight) * rule.scale


@pytest.mark.parametrize("kind", KINDS)
def test_routing_equals_token_by_token(kind: str) -> None:
    config = replace(CONFIG, router=KINDS[kind])
    router, x = build(config), draw(13)
    routing, report = router(x, batch_of(13), None)
    expected = [one_token(row, router, config) for row in x]
    assert routing.experts.tolist() == [experts for experts, _ in expected]
    weight = torch.stack([w for _, w in expected])
    torch.testing.assert_close(routing.probs, weight)
    inputs, upstream = (x, *router.parameters()), torch.randn_like(weight)
    ours = torch.autograd.grad(routing.probs, inputs, upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(weight, inputs, upstream))
    assert report.counts_E.tolist() == routing.experts.flatten().bincount(minlength=8).tolist()
    assert (report.dropped.item(), routing.kept) == (0, None)


@pytest.mark.parametrize("kind", ["topk", "sinkhorn", "expert_choice", "balanced"])
@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=0.5), CapacityConfig(factor=0.5, scope="local")])
@pytest.mark.parametrize("world", [2, 8])
def test_ranks_together_route_as_one(kind: Any, capacity: CapacityConfig | None, world: int) -> None:
    balance = BalanceConfig(microbatch=1, sequence=1, global_batch=1, device=1, device_groups=2, z=1)
    config = replace(CONFIG, router=RouterConfig(kind=kind, normalize=True), capacity=capacity, balance=balance)
    x, batch, router = draw(7), batch_of(7, shards=world), build(config)
    whole, report = router(x, batch, None)

    def part(tokens: CutTokens) -> tuple[Routing, RoutingReport]:
        copy = Router(config, WIDTH, tokens).double()
        copy.load_state_dict(router.state_dict())
        return copy(tokens.local_shard(x), batch, None)

    parts = on_threads(7, world, part)
    assert torch.equal(torch.cat([r.experts for r, _ in parts]), whole.experts)
    torch.testing.assert_close(torch.cat([r.probs for r, _ in parts]), whole.probs)
    if whole.kept is not None:
        assert torch.equal(torch.cat([r.kept for r, _ in parts if r.kept is not None]), whole.kept)
    assert torch.equal(torch.stack([p.counts_E for _, p in parts]).sum(0), report.counts_E)
    assert sum(p.dropped.item() for _, p in parts) == report.dropped.item()
    losses = torch.stack([torch.stack(p.losses) for _, p in parts]).sum(0)
    torch.testing.assert_close(losses, torch.stack(report.losses))


def test_expert_choice_gives_weight_only_where_it_took_the_token() -> None:
    config = replace(
        CONFIG, router=RouterConfig(kind="expert_choice", normalize=True), capacity=CapacityConfig(factor=0.4)
    )
    x = draw(40)
    routing, report = build(config)(x, batch_of(40), None)
    assert routing.kept is not None
    assert torch.equal(routing.probs > 0, routing.kept)
    taken = routing.kept.any(1)
    assert not taken.all(), "the case needs a token that nobody wants"
    torch.testing.assert_close(routing.probs.sum(1), taken.double())
    assert report.counts_E.tolist() == [6] * 8
    routing.probs.masked_select(routing.kept).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_dropping_leaves_weights_counts_and_losses_alone() -> None:
    x, batch = draw(30), batch_of(30)
    config = replace(CONFIG, balance=BalanceConfig(microbatch=1, sequence=1, global_batch=1, device=1, device_groups=2))
    free, free_report = build(config)(x, batch, None)
    tight, report = build(replace(config, capacity=CapacityConfig(factor=0.5)))(x, batch, None)
    assert torch.equal(torch.stack(report.losses), torch.stack(free_report.losses))
    assert torch.equal(tight.probs, free.probs)
    assert torch.equal(report.counts_E, free_report.counts_E)
    assert tight.kept is not None
    assert report.dropped.item() == (~tight.kept).sum().item() > 0


@pytest.mark.parametrize(("fp32", "expected"), [(True, torch.float32), (False, torch.bfloat16)])
def test_number_formats(fp32: bool, expected: torch.dtype) -> None:
    router = build(replace(CONFIG, router=RouterConfig(fp32=fp32)), dtype=torch.float32)
    routing, _ = router(draw(4).bfloat16(), batch_of(4), None)
    assert routing.probs.dtype == expected


def test_recorded_choices_are_repeated_with_fresh_weights() -> None:
    x, batch = draw(9), batch_of(9)
    router = build(CONFIG)
    first, _ = router(x, batch, None)
    router.routing_policy = ReplayRouting(TopKAssignment(first.experts))
    with torch.no_grad():
        router.weight.neg_()
    again, report = router(x, batch, None)
    assert torch.equal(again.experts, first.experts)
    assert not torch.equal(again.probs, first.probs)
    assert report.counts_E.sum().item() == 27


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_tokens_takes_part_in_backward(kind: str) -> None:
    balance = BalanceConfig(microbatch=1, sequence=1, global_batch=1, device=1, device_groups=2, z=1)
    config = replace(CONFIG, router=KINDS[kind], balance=balance, capacity=CapacityConfig(scope="local"))
    router = build(config)

    class LastOfThree(LocalTokens):
        def local_shard(self, x_N: Tensor, batch: Batch) -> Tensor:
            return x_N[:0]

    router.tokens = LastOfThree()
    routing, report = router(draw(2)[:0], batch_of(2, shards=3), None)
    (routing.probs.sum() + sum(report.losses)).backward()
    assert routing.experts.shape == (0, 3)
    assert all(p.grad is not None and (p.grad == 0).all() for p in router.parameters())


@pytest.mark.parametrize("biased", [False, True])
def test_wide_products_equal_their_reference_and_keep_the_narrow_input(biased: bool) -> None:
    x, weight = torch.randn(7, 5).bfloat16().requires_grad_(), torch.randn(3, 5).requires_grad_()
    bias = torch.randn(3).requires_grad_() if biased else None
    inputs, found = [x, weight] + ([] if bias is None else [bias]), []
    for product in (fp32_linear, fp32_linear_reference):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            made = product(x, weight, bias, torch.float32)
        assert product is fp32_linear_reference or [t.dtype for t in kept if t.shape == x.shape] == [torch.bfloat16]
        found.append((made, *torch.autograd.grad(made, inputs, torch.ones_like(made))))
    assert torch.equal(found[0][0], found[1][0])
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).double().norm() <= 2**-7 * want.double().norm()
