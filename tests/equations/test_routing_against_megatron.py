"""Routing against megatron-core's own functions, where it is installed; they run on a CPU.

Megatron's functions take the logits, so the router is given the identity as its weight and logits as its input.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.moe.dispatch.base import Routing
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.router import Router
from moefold.nn.batch import whole_batch
from moefold.nn.parallel_interfaces import LocalTokens

theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils", exc_type=ImportError)

TOKENS, EXPERTS = 30, 16


def logits_of(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)


def routed(config: MoEConfig, logits: Tensor, bias: Tensor | None = None) -> tuple[Routing, RoutingReport]:
    router = Router(config, EXPERTS, LocalTokens()).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
        if router.expert_bias is not None and bias is not None:
            router.expert_bias.copy_(bias)
    token = torch.arange(TOKENS)
    lengths = (TOKENS // 3,) * 3
    batch = whole_batch(token, token, lengths, step_labels=TOKENS, step_tokens=TOKENS, step_sequences=3)
    found: tuple[Routing, RoutingReport] = router(logits, batch, None)
    return found


def dense(routing: Routing) -> tuple[Tensor, Tensor]:
    """Probabilities and map as [tokens, experts]."""
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    none = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    probs = none.scatter(1, routing.experts, routing.probs * kept)
    return probs, none.bool().scatter(1, routing.experts, kept)


# Softmax is computed in float32 there, whatever the logits are; a sigmoid of float64 is rounded to float32 too.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}
RULES: dict[str, tuple[RouterConfig, int, dict[str, Any]]] = {
    "softmax before": (RouterConfig(), 3, {"use_pre_softmax": True}),
    "softmax after": (RouterConfig(score_when="after_topk"), 3, {}),
    "sigmoid": (RouterConfig(score="sigmoid", normalize=True, scale=2.5), 3, {"scaling_factor": 2.5}),
    "two per group": (
        RouterConfig("topk", "sigmoid", "before_topk", True, 2.5, 4, 2, "topk_sum", expert_bias=True),
        4,
        {"scaling_factor": 2.5, "num_groups": 4, "group_topk": 2},
    ),
    "three per group": (
        RouterConfig("topk", "sigmoid", "before_topk", True, 1.0, 4, 2, "topk_sum", expert_bias=True),
        6,
        {"num_groups": 4, "group_topk": 2},
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("factor", [None, 0.6])
def test_probabilities_choices_and_drops(name: str, factor: float | None, seed: int) -> None:
    rule, top_k, options = RULES[name]
    logits, bias = logits_of(seed), 0.3 * torch.randn(EXPERTS, dtype=torch.float64) if rule.expert_bias else None
    capacity = None if factor is None else CapacityConfig(factor=factor)
    routing, report = routed(MoEConfig(EXPERTS, top_k, router=rule, capacity=capacity), logits, bias)
    probs, chosen = theirs.topk_routing_with_score_function(
        logits, top_k, score_function=rule.score, expert_bias=bias, **options
    )
    assert report.counts_E.tolist() == chosen.sum(0).tolist()
    if factor is not None:
        probs, chosen = theirs.apply_router_token_dropping(probs, chosen, top_k, factor)
    ours, our_map = dense(routing)
    assert torch.equal(our_map, chosen.bool())
    assert report.kept_E.tolist() == chosen.sum(0).tolist()
    torch.testing.assert_close(ours, probs, **CLOSE)
    upstream = torch.randn_like(ours)
    grads = [torch.autograd.grad((found * upstream).sum(), logits)[0] for found in (ours, probs)]
    torch.testing.assert_close(*grads, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_balance_losses(kind: Any, seed: int) -> None:
    """The microbatch's, and the sequences', which Megatron folds into the experts' dimension."""
    rule = RouterConfig("topk", kind, "before_topk", True, 2.5, 4, 2, "topk_sum", expert_bias=True)
    balance, logits = BalanceConfig(microbatch=0.5, sequence=0.25), logits_of(seed)
    bias = 0.5 * torch.randn(EXPERTS, dtype=torch.float64)
    _, report = routed(MoEConfig(EXPERTS, 4, router=rule, balance=balance), logits, bias)
    chosen, scores = theirs.compute_routing_scores_for_aux_loss(logits, 4, kind)
    loss = theirs.switch_load_balancing_loss_func(scores, chosen.sum(0), TOKENS, 4, EXPERTS, 0.5)
    # [sequence length, sequences * experts]: tokens of a sequence stand below each other.
    length = TOKENS // 3
    folded, folded_map = (x.view(3, length, EXPERTS).transpose(0, 1).flatten(1) for x in (scores, chosen))
    by_sequence = theirs.switch_load_balancing_loss_func(folded, folded_map.sum(0), length, 4, EXPERTS, 0.25) / 3
    for ours, wanted in ((report.losses.microbatch, loss), (report.losses.sequence, by_sequence)):
        torch.testing.assert_close(ours, wanted.double(), **CLOSE)
        grads = [torch.autograd.grad(found, logits, retain_graph=True)[0] for found in (ours, wanted)]
        torch.testing.assert_close(*grads, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_sinkhorn_in_training(seed: int) -> None:
    """Theirs iterates to a tolerance, ours a fixed number of times: enough of them for the same choice."""
    rule = RouterConfig(kind="sinkhorn", sinkhorn_iterations=400)
    logits = logits_of(seed)
    routing, _ = routed(MoEConfig(EXPERTS, 2, router=rule), logits)
    plan = theirs.sinkhorn(logits.detach(), tol=1e-6)
    assert torch.equal(routing.experts, plan.topk(2).indices)
