"""The losses against their definition, written out with loops over sets, experts and tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.thread_ranks import CutTokens, on_threads
from torch import Tensor

from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.moe.kernels import moe_references as in_torch
from moefold.moe.load_balancing import IN_TORCH, BalanceKernels, BalanceLosses, balance_losses, update_expert_bias
from moefold.moe.routing_policies import TopKAssignment
from moefold.moe.topk import keep_real
from moefold.nn.batch import Batch, TokenSets, whole_batch
from moefold.nn.parallel_interfaces import LocalTokens

EXPERTS, TOP_K, STEP_TOKENS, STEP_SEQUENCES = 6, 2, 60, 13
ALL_ON = BalanceConfig(microbatch=0.5, sequence=0.25, global_batch=2.0, device=3.0, device_groups=3, z=0.125)
CONFIG = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, balance=ALL_ON)
SUMS = {"by token": IN_TORCH, "by set": BalanceKernels(stats=in_torch.balance_stats)}


def batch_of(num_tokens: int = 20, sequences: int = 4, microbatches: int = 2) -> Batch:
    token = torch.arange(num_tokens)
    return whole_batch(
        token,
        token,
        (3, 7, 6, 4) if sequences == 4 else (num_tokens // sequences,) * sequences,
        documents_per_microbatch=(sequences // microbatches,) * microbatches,
        step_labels=STEP_TOKENS,
        step_tokens=STEP_TOKENS,
        step_sequences=STEP_SEQUENCES,
    )


def draw(num_tokens: int = 20) -> tuple[Tensor, TopKAssignment]:
    torch.manual_seed(3)
    logits = torch.randn(num_tokens, EXPERTS, dtype=torch.float64, requires_grad=True)
    return logits, TopKAssignment(torch.rand(num_tokens, EXPERTS).argsort(1)[:, :TOP_K])


def by_definition(
    p: Tensor,
    choice: TopKAssignment,
    sets: TokenSets,
    groups: list[list[int]],
    earlier: list[int],
    mean: str = "tokens",
) -> Tensor:
    """sum_s w_s sum_g (mean of f over g) * (sum of P over g), f_e = E c_e / (K n_s), P_e = mean of p_e.

    The weight w_s of a set is n_s / n in a mean over tokens, and 1 / (sequences of the step) in one over sequences.
    """
    total = p.new_zeros(())
    for token_set, size in enumerate(sets.sizes):
        members = [token for token in range(p.shape[0]) if sets.set_of_token_T[token] == token_set]
        counts = [earlier[e] + sum(e in choice.experts[token] for token in members) for e in range(EXPERTS)]
        # K n_s is the number of assignments; with earlier microbatches n_s grows but only these tokens have gradients.
        f = [EXPERTS * count / sum(counts) for count in counts]
        mean_p = [sum(p[token, e] for token in members) / size for e in range(EXPERTS)]
        for group in groups:
            mean_f = sum(f[e] for e in group) / len(group)
            weight = size / STEP_TOKENS if mean == "tokens" else 1 / STEP_SEQUENCES
            total = total + weight * mean_f * sum(mean_p[e] for e in group)
    return total


def expected(
    logits: Tensor, choice: TopKAssignment, batch: Batch, kind: str, mean: str, earlier: Tensor | None
) -> BalanceLosses:
    scores = logits.exp() if kind == "softmax" else logits.sigmoid()
    p = scores / scores.sum(1, keepdim=True)
    alone, none = [[e] for e in range(EXPERTS)], [0] * EXPERTS
    devices = [[0, 1], [2, 3], [4, 5]]
    everything = TokenSets(torch.zeros(batch.num_tokens, dtype=torch.int64), (batch.num_tokens,))
    z = sum(row.exp().sum().log() ** 2 for row in logits) / STEP_TOKENS
    assert isinstance(z, Tensor)
    return BalanceLosses(
        ALL_ON.microbatch * by_definition(p, choice, batch.microbatches, alone, none),
        ALL_ON.sequence * by_definition(p, choice, batch.documents, alone, none, mean),
        ALL_ON.global_batch
        * by_definition(p, choice, everything, alone, none if earlier is None else earlier.tolist()),
        ALL_ON.device * by_definition(p, choice, batch.microbatches, devices, none),
        ALL_ON.z * z,
    )


@pytest.mark.parametrize("kernels", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize(
    ("kind", "mean", "earlier"),
    list(product(("softmax", "sigmoid"), ("sequences", "tokens"), (None, torch.tensor([7, 0, 3, 1, 0, 9])))),
)
def test_losses_and_gradients_equal_the_definition(
    kind: Any, mean: Any, earlier: Tensor | None, kernels: BalanceKernels
) -> None:
    balance = replace(ALL_ON, sequence_mean=mean)
    config, batch = replace(CONFIG, router=RouterConfig(score=kind), balance=balance), batch_of()
    logits, choice = draw()
    ours, counted_E = balance_losses(config, logits, choice, batch, LocalTokens(), earlier, kernels=kernels)
    assert counted_E.equal(choice.experts.flatten().bincount(minlength=EXPERTS))
    theirs = expected(logits, choice, batch, kind, mean, earlier)
    for name, a, b in zip(BalanceLosses._fields, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        (grad_a,), (grad_b,) = (torch.autograd.grad(loss, logits, retain_graph=True) for loss in (a, b))
        torch.testing.assert_close(grad_a, grad_b, msg=lambda text, name=name: f"{name}, gradient: {text}")


def test_padding_is_in_no_sum_of_a_set() -> None:
    """Statistics by set are those of the tokens that are not padding, with the reference's gradients."""
    logits, choice = draw()
    batch = replace(batch_of(), real_S=torch.rand(20, generator=torch.Generator().manual_seed(1)) < 0.7)
    plain = TopKAssignment(choice.experts, keep_real(choice.experts, None, batch.real_S))
    found = [balance_losses(CONFIG, logits, plain, batch, LocalTokens(), None, kernels=each) for each in SUMS.values()]
    losses = [each for each, _ in found]
    real_E = choice.experts[batch.real_S].flatten().bincount(minlength=EXPERTS)
    assert all(counted_E.equal(real_E) for _, counted_E in found)
    torch.testing.assert_close(*(torch.stack(each) for each in losses))
    weights = torch.arange(1.0, 6.0).double()
    torch.testing.assert_close(*(torch.autograd.grad(torch.stack(each) @ weights, logits)[0] for each in losses))


def test_the_logits_are_read_once_for_each_partition() -> None:
    """Microbatches for four losses, documents for the loss per sequence; once where only that one is on."""
    calls: list[int] = []

    def stats(*args: Any) -> in_torch.BalanceStats:
        calls.append(args[3])
        return in_torch.balance_stats(*args)

    logits, choice = draw()
    for balance in (ALL_ON, BalanceConfig(sequence=0.25, z=0.125)):
        config = replace(CONFIG, balance=balance)
        balance_losses(config, logits, choice, batch_of(), LocalTokens(), None, kernels=BalanceKernels(stats=stats))
    assert calls == [2, 4, 4]


@pytest.mark.parametrize("kernels", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_parts_of_ranks_add_up_to_the_whole(world: int, kernels: BalanceKernels) -> None:
    """Seven tokens over eight ranks leave one with none."""
    logits, choice = draw(7)
    batch, earlier = batch_of(7, 1, 1), torch.tensor([7, 0, 3, 1, 0, 9])

    def part(tokens: CutTokens) -> BalanceLosses:
        mine = TopKAssignment(tokens.local_shard(choice.experts))
        first = tokens.rank == 0  # what came earlier happened to be all on the first rank
        before = earlier if first else earlier * 0
        return balance_losses(CONFIG, tokens.local_shard(logits), mine, batch, tokens, before, kernels=kernels)[0]

    whole = torch.stack(balance_losses(CONFIG, logits, choice, batch, LocalTokens(), earlier)[0])
    parts = torch.stack([torch.stack(losses) for losses in on_threads(7, world, part)]).sum(0)
    torch.testing.assert_close(parts, whole)
    grads = [torch.autograd.grad(losses, logits, torch.arange(5.0).double())[0] for losses in (parts, whole)]
    torch.testing.assert_close(*grads)


def test_a_loss_that_is_off_is_zero_and_asks_nobody() -> None:
    class Silent(LocalTokens):
        def sum_counts(self, counts: Tensor, reach: str, batch: Batch) -> Tensor:
            raise AssertionError("no loss, no exchange")

    logits, choice = draw()
    losses, _ = balance_losses(replace(CONFIG, balance=BalanceConfig()), logits, choice, batch_of(), Silent(), None)
    assert [loss.item() for loss in losses] == [0.0] * 5


def test_a_loss_per_sequence_needs_their_number() -> None:
    logits, choice = draw()
    with pytest.raises(ValueError, match="step_sequences"):
        balance_losses(CONFIG, logits, choice, replace(batch_of(), step_sequences=None), LocalTokens(), None)


def test_counts_meet_where_their_tokens_are() -> None:
    """Only the global batch asks everyone; other data-parallel ranks hold other microbatches."""
    asked = []

    class Listening(LocalTokens):
        def sum_counts(self, counts: Tensor, reach: str, batch: Batch) -> Tensor:
            asked.append(reach)
            return counts

    logits, choice = draw()
    for name in ("microbatch", "sequence", "global_batch", "device"):
        config = replace(CONFIG, balance=replace(BalanceConfig(device_groups=3), **{name: 1.0}))
        balance_losses(config, logits, choice, batch_of(), Listening(), None)
    assert asked == ["microbatch", "microbatch", "everyone", "microbatch"]


def test_an_even_load_costs_exactly_the_coefficient() -> None:
    logits = torch.zeros(12, EXPERTS, dtype=torch.float64)
    choice = TopKAssignment(torch.arange(24).view(12, 2) % EXPERTS)
    batch = replace(batch_of(12, 1, 1), step_tokens=12, step_sequences=1)
    losses, _ = balance_losses(CONFIG, logits, choice, batch, LocalTokens(), None)
    assert [round(loss.item(), 12) for loss in losses[:4]] == [0.5, 0.25, 2.0, 3.0]


def test_the_bias_moves_against_the_load() -> None:
    bias = torch.tensor([0.5, 0.0, -0.25, 0.0])
    moved = update_expert_bias(bias, torch.tensor([10, 2, 6, 6]), 0.125)
    assert moved.tolist() == [0.375, 0.125, -0.25, 0.0]
    assert bias.tolist() == [0.5, 0.0, -0.25, 0.0]
