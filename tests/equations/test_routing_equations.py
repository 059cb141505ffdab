"""Routing as the papers write it: each equation by loops over tokens and experts, in float64, values and gradients.

Nothing here calls the code it judges except through the router, the step and the evaluation themselves. Scores,
rankings, counts and losses are written out from the published text: the DeepSeek-V3 report (arXiv 2412.19437, section
2.1.2), DeepSeek-V2 (arXiv 2405.04434, section 2.2), Megatron Core's MoE report (section 4.3.4) and its router.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from tests.staged_runs import microbatches, share_on, staged_run
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.moe.dispatch.base import Routing
from moefold.moe.router import Router
from moefold.nn.batch import Batch, whole_batch
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.pipeline.step import evaluate, make_optimizer, run_step

WIDTH = 6


def router_of(config: MoEConfig, seed: int = 0) -> Router:
    torch.manual_seed(seed)
    router = Router(config, WIDTH, LocalTokens())
    torch.nn.init.normal_(router.weight)
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.5)
    return router.double()


def inputs_of(num_tokens: int, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)


def batch_of(lengths: tuple[int, ...], step_tokens: int, **others: Any) -> Batch:
    token = torch.arange(sum(lengths))
    return whole_batch(token, token, lengths, step_labels=step_tokens, step_tokens=step_tokens, **others)


# ---- the papers' words, by loops ----


def affinities(x: Tensor, router: Router, kind: str) -> list[list[Tensor]]:
    """s_{i,t} of token t to expert i: eq. 15 of DeepSeek-V3 (sigmoid), eq. 22 of DeepSeek-V2 (softmax)."""
    rows = []
    for u_t in x:
        logits = [sum((u * e for u, e in zip(u_t, e_i, strict=True)), u_t.new_zeros(())) for e_i in router.weight]
        if kind == "sigmoid":
            rows.append([1 / (1 + (-logit).exp()) for logit in logits])
        else:
            total = sum((logit.exp() for logit in logits), u_t.new_zeros(()))
            rows.append([logit.exp() / total for logit in logits])
    return rows


def best(values: list[float], count: int, among: list[int] | None = None) -> list[int]:
    """Topk: the experts with the ``count`` highest values, best first."""
    experts = range(len(values)) if among is None else among
    return sorted(experts, key=lambda expert: (-values[expert], expert))[:count]


def chosen(s_t: list[Tensor], bias: list[float], config: MoEConfig) -> list[int]:
    """Eq. 16 with node-limited routing: at most M groups, by the sum of the highest K/M scores in each of them."""
    values = [score.item() + b for score, b in zip(s_t, bias, strict=True)]
    rule, size = config.router, config.num_experts // config.router.num_groups
    groups = [list(range(first, first + size)) for first in range(0, config.num_experts, size)]
    terms = 1 if rule.group_score == "max" else config.top_k // rule.top_groups
    ranked = sorted(groups, key=lambda group: -sum(sorted((values[e] for e in group), reverse=True)[:terms]))
    return best(values, config.top_k, sorted(expert for group in ranked[: rule.top_groups] for expert in group))


def balance_of(sequence: list[list[Tensor]], config: MoEConfig) -> Tensor:
    """Eq. 17 to 20: sum_i f_i P_i of one sequence, f_i counted over the Topk of the scores alone."""
    num_experts, top_k, length = config.num_experts, config.top_k, len(sequence)
    total = sequence[0][0].new_zeros(())
    for i in range(num_experts):
        hits = sum(i in best([score.item() for score in s_t], top_k) for s_t in sequence)
        f_i = num_experts / (top_k * length) * hits
        p_i = sum((s_t[i] / sum(s_t[1:], s_t[0]) for s_t in sequence), total * 0) / length
        total = total + f_i * p_i
    return total


def assert_same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    """Values, and gradients with respect to every input."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    for got, want in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs, retain_graph=True), strict=True
    ):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


# ---- (a) what the balance losses count ----

V3 = RouterConfig(
    score="sigmoid", normalize=True, scale=2.5, num_groups=4, top_groups=2, group_score="topk_sum", expert_bias=True
)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_balance_losses_count_the_plain_top_k_of_the_scores(kind: Any) -> None:
    """DeepSeek-V3, eq. 18 (1(s_{i,t} in Topk({s_{j,t}}, K_r)): no bias, no groups); Megatron report, 4.3.4.

    The load that tokens make, which eq. 16's bias and groups decide, is counted apart from it.
    """
    rule = RouterConfig(**{**vars(V3), "score": kind})
    config = MoEConfig(num_experts=16, top_k=4, router=rule, balance=BalanceConfig(microbatch=0.25))
    router, x = router_of(config), inputs_of(23)
    routing, report = router(x, batch_of((23,), 23), None)
    s = affinities(x, router, kind)
    assert router.expert_bias is not None
    real = [chosen(s_t, router.expert_bias.tolist(), config) for s_t in s]
    plain = [best([score.item() for score in s_t], 4) for s_t in s]
    assert sum(set(a) != set(b) for a, b in zip(real, plain, strict=True)) > 10, "bias and groups must matter"
    assert routing.experts.tolist() == real
    assert report.counts_E.tolist() == [sum(e in row for row in real) for e in range(16)]
    assert_same(report.losses.microbatch, 0.25 * balance_of(s, config), x, router.weight)


def test_the_global_loss_counts_it_over_the_step_so_far() -> None:
    """Megatron's global auxiliary loss: f_i over all microbatches up to this one, P_i over this one's tokens."""
    balance = BalanceConfig(global_batch=0.5)
    config = MoEConfig(num_experts=16, top_k=4, router=V3, balance=balance)
    router, first, second = router_of(config), inputs_of(9, 2), inputs_of(14, 3)
    _, before = router(first, batch_of((9,), 23), None)
    _, report = router(second, batch_of((14,), 23), before.plain_E)
    s_before, s = (affinities(x, router, "sigmoid") for x in (first, second))
    theirs = second.new_zeros(())
    for i in range(16):
        hits = sum(i in best([score.item() for score in s_t], 4) for s_t in (*s_before, *s))
        p_i = sum((s_t[i] / sum(s_t[1:], s_t[0]) for s_t in s), theirs * 0) / 23
        theirs = theirs + 0.5 * 16 * hits / (4 * 23) * p_i
    assert_same(report.losses.global_batch, theirs, second, router.weight)


# ---- (b), and a capacity per device ----

PROBABILITIES = {
    "sigmoid, normalised": RouterConfig(score="sigmoid", normalize=True),
    "softmax after top-k": RouterConfig(score="softmax", score_when="after_topk"),
    "softmax before top-k": RouterConfig(score="softmax"),
}


def probabilities(s_t: list[Tensor], experts: list[int], rule: RouterConfig) -> list[Tensor]:
    """g_{i,t}: eq. 13 of DeepSeek-V3, and softmax over the chosen logits, which is the same division."""
    divided = rule.normalize or rule.score_when == "after_topk"
    total = sum((s_t[e] for e in experts[1:]), s_t[experts[0]])
    return [s_t[e] / total if divided else s_t[e] for e in experts]


def assert_drops(config: MoEConfig, owner_of: list[int], room: int, number: int = 31) -> int:
    """Each owner keeps the ``room`` assignments with the highest probability; returns how many are dropped."""
    router, x = router_of(config), inputs_of(number)
    routing, report = router(x, batch_of((number,), number), None)
    s = affinities(x, router, config.router.score)
    rows = [best([score.item() for score in s_t], config.top_k) for s_t in s]
    g = [probabilities(s_t, experts, config.router) for s_t, experts in zip(s, rows, strict=True)]
    assert routing.experts.tolist() == rows and routing.kept is not None
    kept = [[False] * config.top_k for _ in rows]
    for owner in set(owner_of):
        asks = [(t, k) for t in range(number) for k in range(config.top_k) if owner_of[rows[t][k]] == owner]
        for t, k in sorted(asks, key=lambda ask: -g[ask[0]][ask[1]].item())[:room]:
            kept[t][k] = True
    assert routing.kept.tolist() == kept
    upstream = torch.randn(number, config.top_k, dtype=torch.float64)
    ours = (routing.probs * routing.kept * upstream).sum()
    pairs = [(t, k) for t in range(number) for k in range(config.top_k) if kept[t][k]]
    theirs = sum((g[t][k] * upstream[t, k] for t, k in pairs), upstream.new_zeros(()))
    assert_same(ours, theirs, x, router.weight)
    loads = [sum(rows[t][k] == e for t, k in pairs) for e in range(config.num_experts)]
    assert report.kept_E.tolist() == loads
    return number * config.top_k - len(pairs)


@pytest.mark.parametrize("name", PROBABILITIES)
def test_an_expert_drops_the_lowest_routing_probabilities(name: str) -> None:
    """Megatron's apply_router_token_dropping (drop policy probs): each expert keeps its highest routing_probs."""
    capacity = CapacityConfig(factor=0.7)
    config = MoEConfig(num_experts=8, top_k=3, router=PROBABILITIES[name], capacity=capacity)
    assert assert_drops(config, list(range(8)), ceil(0.7 * 31 * 3 / 8)) > 10


@pytest.mark.parametrize("name", PROBABILITIES)
def test_a_device_drops_the_lowest_affinities(name: str) -> None:
    """DeepSeek-V2, 2.2.4: each device's budget is the average one; the lowest affinities on a device go first.

    Experts of a device share the budget: a full expert beside an empty one drops nothing.
    """
    capacity = CapacityConfig(factor=1.0, per="device", device_groups=4)
    config = MoEConfig(num_experts=8, top_k=3, router=PROBABILITIES[name], capacity=capacity)
    assert assert_drops(config, [0, 0, 1, 1, 2, 2, 3, 3], ceil(31 * 3 / 4)) > 3


# ---- (c) what a group's score is ----


@pytest.mark.parametrize(("top_k", "top_groups"), [(4, 2), (6, 2), (3, 3), (4, 1)], ids=["two", "three", "one", "four"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_group_is_scored_by_its_best_k_over_m(top_k: int, top_groups: int, biased: bool) -> None:
    """DeepSeek-V3, 2.1.2, node-limited routing: "the sum of the highest K_r / M affinity scores" of each node."""
    rule = {"num_groups": 4, "top_groups": top_groups, "group_score": "topk_sum", "expert_bias": biased}
    router_config = RouterConfig(score="sigmoid", normalize=True, scale=2.5, **rule)  # type: ignore[arg-type]
    config = MoEConfig(num_experts=20, top_k=top_k, router=router_config)
    router, x = router_of(config), inputs_of(40)
    routing, _ = router(x, batch_of((40,), 40), None)
    bias = [0.0] * 20 if router.expert_bias is None else router.expert_bias.tolist()
    s = affinities(x, router, "sigmoid")
    rows = [chosen(s_t, bias, config) for s_t in s]
    assert routing.experts.tolist() == rows
    g = [probabilities(s_t, experts, router_config) for s_t, experts in zip(s, rows, strict=True)]
    theirs = 2.5 * torch.stack([torch.stack(row) for row in g])
    upstream = torch.randn_like(theirs)
    assert_same((routing.probs * upstream).sum(), (theirs * upstream).sum(), x, router.weight)


# ---- (e) the loss per sequence ----


@pytest.mark.parametrize("mean", ["sequences", "tokens"])
def test_the_sequence_loss_is_the_mean_over_sequences(mean: Any) -> None:
    """DeepSeek-V3, eq. 17 to 20: one loss per sequence, every sequence weighing the same; by tokens if so named.

    Three sequences of this microbatch, the second one filled up with padding, out of five in the step.
    """
    balance = BalanceConfig(sequence=0.3, **({} if mean == "sequences" else {"sequence_mean": mean}))
    config = MoEConfig(num_experts=8, top_k=2, router=RouterConfig(score="sigmoid", normalize=True), balance=balance)
    real = torch.tensor([True] * 3 + [True] * 7 + [False] * 4 + [True] * 2)
    router, x = router_of(config), inputs_of(16)
    _, report = router(x, batch_of((3, 11, 2), 29, step_sequences=5, real_T=real), None)
    s = affinities(x, router, "sigmoid")
    theirs = x.new_zeros(())
    for sequence in (s[0:3], s[3:10], s[14:16]):
        theirs = theirs + balance_of(sequence, config) * (1 / 5 if mean == "sequences" else len(sequence) / 29)
    assert_same(report.losses.sequence, 0.3 * theirs, x, router.weight)


# ---- (e) the loss-free bias, and Sinkhorn ----


def step_model(router: RouterConfig, capacity: CapacityConfig | None) -> ModelConfig:
    moe = MoEConfig(num_experts=8, top_k=2, expert_hidden_dim=8, router=router, capacity=capacity)
    return ModelConfig(vocab_size=32, dim=16, num_layers=1, moe=moe, init_std=0.5)


def test_the_bias_follows_what_is_computed() -> None:
    """b_i + u sign(mean load - load_i) (arXiv 2408.15664, algorithm 1), the load counted after dropping (Megatron)."""
    capacity = CapacityConfig(factor=0.6)
    run = staged_run(step_model(RouterConfig(normalize=True, expert_bias=True, bias_update_rate=0.01), capacity))
    share, seen = share_on(run), []
    (router,) = share.model.routers().values()
    assert router.expert_bias is not None
    before = router.expert_bias.tolist()
    router.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    run_step(share, make_optimizer(share), microbatches(run, [(9, 12), (14,), (5, 8)]))
    assert len(seen) == 3 and all(isinstance(routing, Routing) for routing in seen)
    asked, load = [0] * 8, [0] * 8
    for routing in seen:
        for experts, kept in zip(routing.experts.tolist(), routing.kept.tolist(), strict=True):
            for expert, is_kept in zip(experts, kept, strict=True):
                asked[expert] += 1
                load[expert] += is_kept
    after = []
    for bias, own in zip(before, load, strict=True):
        error = sum(load) / 8 - own
        after.append(bias + 0.01 * ((error > 0) - (error < 0)))
    signs = [[(sum(counts) > 8 * own) - (sum(counts) < 8 * own) for own in counts] for counts in (asked, load)]
    assert signs[0] != signs[1], "the case needs an expert on whose load dropping changes the verdict"
    assert router.expert_bias.tolist() == pytest.approx(after, abs=1e-15)


def sinkhorn_by_loops(logits: list[list[float]], rounds: int) -> list[list[float]]:
    """Rows add up to 1, then columns to tokens / experts, in turn."""
    number, experts = len(logits), len(logits[0])
    plan = [[torch.tensor(value, dtype=torch.float64).exp().item() for value in row] for row in logits]
    for _ in range(rounds):
        plan = [[value / sum(row) for value in row] for row in plan]
        sums = [sum(row[e] for row in plan) for e in range(experts)]
        plan = [[row[e] / sums[e] * number / experts for e in range(experts)] for row in plan]
    return plan


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_balances_in_training_only(top_k: int) -> None:
    """Megatron's sinkhorn_load_balancing: top-k of the plan ``if self.training``, else the plain top-k."""
    config = MoEConfig(num_experts=6, top_k=top_k, router=RouterConfig(kind="sinkhorn"))
    router, x = router_of(config), inputs_of(25)
    logits = [[(u_t @ e_i).item() for e_i in router.weight] for u_t in x]
    s = affinities(x, router, "softmax")
    plan = sinkhorn_by_loops(logits, config.router.sinkhorn_iterations)
    wanted = {True: [best(row, top_k) for row in plan], False: [best(row, top_k) for row in logits]}
    assert wanted[True] != wanted[False]
    for training, rows in wanted.items():
        router.train(training)
        routing, _ = router(x, batch_of((25,), 25), None)
        assert routing.experts.tolist() == rows, f"training is {training}"
        theirs = torch.stack([torch.stack([s_t[e] for e in row]) for s_t, row in zip(s, rows, strict=True)])
        upstream = torch.randn_like(theirs)
        assert_same((routing.probs * upstream).sum(), (theirs * upstream).sum(), x, router.weight)


def test_evaluation_of_a_run_takes_the_plain_top_k() -> None:
    """The same in a run: what ``evaluate`` routes, and that training goes on balanced afterwards."""
    run = staged_run(step_model(RouterConfig(kind="sinkhorn"), None))
    share, seen = share_on(run), []
    (router,) = share.model.routers().values()
    router.register_forward_hook(lambda module, given, output: seen.append((given[0], output[0])))
    evaluate(share, microbatches(run, [(9, 12)]))
    ((x, routing),) = seen
    logits = [[(u_t @ e_i).item() for e_i in router.weight] for u_t in x]
    assert routing.experts.tolist() == [best(row, 2) for row in logits]
    assert share.model.training and router.training
