"""Load balancing: losses on the router's probabilities p, and the loss-free bias.

A balance loss is a sum over sets s of tokens: microbatches, sequences, or all tokens of the step so far. With
n_s tokens, c_e of which have expert e in the plain top-k of their scores, and n tokens in the step,

    loss = coefficient * sum_s (n_s / n) * E * sum_e (c_e / (K n_s)) * (sum_{t in s} p_te / n_s)
         = coefficient * E / n * sum_t sum_e share_{s(t), e} * p_te,        share_se = c_e / (K n_s).

The second line is how it is computed. Given the shares it is a plain sum over tokens: every rank adds its own tokens'
part and the parts add up to the whole, whatever the layout. Only the counts, which have no gradient, are summed
first. Padding is in no set and not in n. DeepSeek-V3's loss per sequence weighs the sets alike, 1 / (sequences
of the step) in place of n_s / n.

The counts are those of the scores, not of where tokens went: no loss-free bias, no group limit, no capacity
(DeepSeek-V3, eq. 18; Megatron's "naive top-k"). A bias that has evened the load would otherwise hide from the loss that
the scores are uneven. For the same reason it holds for every kind of routing: Sinkhorn, whose real load is even by
construction, is trained towards scores whose plain top-k, which evaluation takes, is even too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moefold.config.moe import BalanceConfig, MoEConfig
from moefold.moe.kernels.moe_references import BalanceStats
from moefold.moe.permute import Assignments, count_assignments
from moefold.moe.topk import real_tokens, score
from moefold.nn.batch import Batch, TokenSets
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.ops.segments import count_keys


class BalanceLosses(NamedTuple):
    """This rank's part of each loss, its coefficient included."""

    microbatch: Tensor
    sequence: Tensor
    global_batch: Tensor
    device: Tensor
    z: Tensor


class RoutingReport(NamedTuple):
    """What a router did with this rank's tokens, in assignments per expert.

    ``counts_E`` before dropping, for whoever watches the load; ``kept_E`` after it, for the loss-free bias;
    ``plain_E`` of the plain top-k, for the global balance loss of the microbatches to come.
    """

    counts_E: Tensor
    kept_E: Tensor
    plain_E: Tensor
    losses: BalanceLosses
    # Rows that did not fit into the dispatcher's buffers, where these have a fixed size.
    overflow: Tensor | None = None

    @property
    def dropped(self) -> Tensor:
        return self.counts_E.sum() - self.kept_E.sum()


ScoreKind = Literal["softmax", "sigmoid"]
# Logits, shares, the kind of score, False for padding tokens or None; to the sum.
BalanceTerm = Callable[[Tensor, Tensor, ScoreKind, Tensor | None], Tensor]


# Logits, the plain top-k, each token's set (-1 for padding) or None, the number of sets, the kind of score.
StatsKernel = Callable[[Tensor, Tensor, Tensor | None, int, ScoreKind], BalanceStats]


class BalanceKernels(NamedTuple):
    """Other implementations of what the losses sum: ``term`` of one loss, as `balance_term`, such as a compiled one;
    ``stats`` of all losses, in one read of the logits. None is torch's own operations."""

    term: BalanceTerm | None = None
    stats: StatsKernel | None = None


IN_TORCH = BalanceKernels()


class _Shares(NamedTuple):
    """The shares of each set, [Q, E] or the same [E] for all, are ``value_QE`` times ``factor``.

    Whole counts are divided by a number that the host knows when the loss is multiplied by its coefficient, and not
    before.
    """

    sets: TokenSets
    value_QE: Tensor
    factor: float = 1.0


def balance_losses(
    config: MoEConfig,
    logits_tE: Tensor,
    plain: Assignments,
    batch: Batch,
    tokens: TokenSharding,
    earlier_E: Tensor | None,
    scores_tE: Tensor | None = None,
    kernels: BalanceKernels = IN_TORCH,
) -> tuple[BalanceLosses, Tensor]:
    """The losses, and this rank's assignments per expert of ``plain``, each token's plain top-k.

    ``earlier_E`` counts it over this rank's earlier microbatches of the step; ``scores_tE`` are those of all experts,
    if the router has computed them. A loss that is off costs nothing.
    """
    coefficients, num_experts, off = config.balance, config.num_experts, logits_tE.new_zeros(())
    if not counts_anything(coefficients) and not coefficients.z:
        return BalanceLosses(off, off, off, off, off), count_assignments(plain, num_experts)
    real_t = real_tokens(batch, tokens)
    sums = (_SumsByToken if kernels.stats is None else _SumsBySet)(
        config, logits_tE, plain, batch, tokens, real_t, scores_tE, kernels
    )
    # Every real token counts K times.
    sums_known = real_t is None and plain.kept is None

    def shares(sets: TokenSets) -> _Shares:
        count_QE = tokens.sum_counts(sums.count(sets), "microbatch", batch)
        divisor = sets.sizes[0] * config.top_k if sums_known and len(sets.sizes) == 1 else None
        return _Shares(sets, count_QE, 1 / divisor) if divisor else _Shares(sets, _shares(count_QE, logits_tE.dtype))

    def shares_of_sequences() -> _Shares:
        """Each token's share divided by its sequence's tokens, in units of the step's mean per sequence."""
        mean, sets = batch.step_tokens / _step_sequences(batch), batch.documents
        count_QE = tokens.sum_counts(sums.count(sets), "microbatch", batch)
        if sums_known and len(sets.sizes) == 1 and (num_tokens := sets.sizes[0]):
            return _Shares(sets, count_QE, mean / (num_tokens * config.top_k * num_tokens))
        tokens_Q = (count_QE.sum(-1) / config.top_k).clamp(min=1).to(logits_tE.dtype)
        return _Shares(sets, _shares(count_QE, logits_tE.dtype) * (mean / tokens_Q)[:, None])

    def shares_of_everyone() -> _Shares:
        count_E = sums.count_E
        count_E = tokens.sum_counts(count_E if earlier_E is None else count_E + earlier_E, "everyone", batch)
        return _Shares(batch.microbatches, _shares(count_E, logits_tE.dtype))

    def shares_of_devices() -> _Shares:
        share = shares(batch.microbatches)
        return share._replace(value_QE=even_out(share.value_QE.to(logits_tE.dtype), coefficients.device_groups))

    def loss(coefficient: float, shares: Callable[[], _Shares]) -> Tensor:
        if not coefficient:
            return off
        sets, value_QE, factor = shares()
        return sums.weigh(sets, value_QE, coefficient * num_experts / batch.step_tokens * factor)

    by_sequence = {"sequences": shares_of_sequences, "tokens": lambda: shares(batch.documents)}
    losses = BalanceLosses(
        microbatch=loss(coefficients.microbatch, lambda: shares(batch.microbatches)),
        sequence=loss(coefficients.sequence, by_sequence[coefficients.sequence_mean]),
        global_batch=loss(coefficients.global_batch, shares_of_everyone),
        device=loss(coefficients.device, shares_of_devices),
        z=sums.z() * (coefficients.z / batch.step_tokens) if coefficients.z else off,
    )
    return losses, sums.count_E


@dataclass
class _SumsByToken:
    """What the losses sum over this rank's tokens, by torch's operations on [t, E]: the reference."""

    config: MoEConfig
    logits_tE: Tensor
    plain: Assignments
    batch: Batch
    tokens: TokenSharding
    real_t: Tensor | None
    scores_tE: Tensor | None
    kernels: BalanceKernels

    @property
    def kind(self) -> ScoreKind:
        return self.config.router.score

    @cached_property
    def p_tE(self) -> Tensor:
        """Computed once for all losses; a term that is given computes its own."""
        return _without_padding(probabilities(self.logits_tE, self.kind, self.scores_tE), self.real_t)

    def count(self, sets: TokenSets) -> Tensor:
        """[Q, E]: assignments per expert of each set."""
        if len(sets.sizes) == 1:
            return self.count_E[None]
        return count_by_set(self.plain, self._set_of_token(sets), len(sets.sizes), self.config.num_experts)

    @cached_property
    def count_E(self) -> Tensor:
        """Assignments per expert of all sets."""
        return count_assignments(self.plain, self.config.num_experts)

    def weigh(self, sets: TokenSets, value_QE: Tensor, factor: float) -> Tensor:
        """``factor`` times the sum over tokens and experts of probability times the value of the token's set."""
        by_set = len(sets.sizes) > 1 and value_QE.ndim == 2
        value_tE = value_QE[self._set_of_token(sets)] if by_set else value_QE
        if self.kernels.term is not None:
            return self.kernels.term(self.logits_tE, value_tE, self.kind, self.real_t) * factor
        return balance_term(self.logits_tE, value_tE, self.kind, self.real_t, self.p_tE) * factor

    def z(self) -> Tensor:
        return _without_padding(self.logits_tE.logsumexp(-1, keepdim=True).square(), self.real_t).sum()

    def _set_of_token(self, sets: TokenSets) -> Tensor:
        return self.tokens.local_shard(sets.set_of_token_T, self.batch)


@dataclass
class _SumsBySet(_SumsByToken):
    """The same from a kernel's sums of every set, which reads the logits once for each partition that a loss needs."""

    found: list[tuple[TokenSets, BalanceStats]] = field(default_factory=list)

    def count(self, sets: TokenSets) -> Tensor:
        return self._stats(sets).count_QE

    @cached_property
    def count_E(self) -> Tensor:
        count_QE = self._any_stats().count_QE
        return count_QE[0] if len(count_QE) == 1 else count_QE.sum(0)

    def weigh(self, sets: TokenSets, value_QE: Tensor, factor: float) -> Tensor:
        p_QE = (self._stats(sets) if value_QE.ndim == 2 else self._any_stats()).probability_QE
        # The factor goes to the side without a gradient: backward has one product less. It is a tensor because whole
        # counts times a number of Python are float32, whatever the sums are.
        weight_QE = value_QE * torch.tensor(factor, dtype=p_QE.dtype)
        return torch.dot(p_QE.flatten(), weight_QE.expand_as(p_QE).flatten())

    def z(self) -> Tensor:
        return self._any_stats().z_Q.sum()

    def _any_stats(self) -> BalanceStats:
        """Of whatever partition is there: what is asked for is the same of all."""
        return self.found[0][1] if self.found else self._stats(self.batch.microbatches)

    def _stats(self, sets: TokenSets) -> BalanceStats:
        for partition, found in self.found:
            if partition is sets:
                return found
        assert self.kernels.stats is not None
        set_t = None if len(sets.sizes) == 1 and self.real_t is None else self._set_of_token(sets)
        if set_t is not None and self.real_t is not None:
            set_t = set_t.where(self.real_t, -1)
        new = self.kernels.stats(self.logits_tE, self.plain.experts, set_t, len(sets.sizes), self.kind)
        self.found.append((sets, new))
        return new


def counts_anything(balance: BalanceConfig) -> bool:
    """Whether any loss is on that depends on the load."""
    return any((balance.microbatch, balance.sequence, balance.global_batch, balance.device))


def _step_sequences(batch: Batch) -> int:
    if batch.step_sequences is None:
        raise ValueError("the loss per sequence needs batch.step_sequences, the number of sequences of the whole step")
    return batch.step_sequences


def _without_padding(x_tE: Tensor, real_t: Tensor | None) -> Tensor:
    return x_tE if real_t is None else x_tE.where(real_t[:, None], 0.0)


def balance_term(
    logits_tE: Tensor,
    value_tE: Tensor,
    kind: ScoreKind,
    real_t: Tensor | None = None,
    p_tE: Tensor | None = None,
) -> Tensor:
    """The sum over tokens and experts of probability times share; ``p_tE`` where probabilities are known."""
    if p_tE is None:
        p_tE = _without_padding(probabilities(logits_tE, kind), real_t)
    return (p_tE * value_tE).sum()


def probabilities(logits_tE: Tensor, kind: ScoreKind, scores_tE: Tensor | None = None) -> Tensor:
    """Scores that sum to 1 for each token; ``scores_tE`` where they are known."""
    scores_tE = score(logits_tE, kind) if scores_tE is None else scores_tE
    return scores_tE if kind == "softmax" else scores_tE / scores_tE.sum(-1, keepdim=True)


def even_out(share_tE: Tensor, num_groups: int) -> Tensor:
    """Each expert's share becomes the mean of its device's: only the load between devices is left to be evened."""
    share_tXY = share_tE.unflatten(-1, (num_groups, -1))
    return share_tXY.mean(-1, keepdim=True).expand_as(share_tXY).flatten(-2)


def count_by_set(assignments: Assignments, set_t: Tensor, num_sets: int, num_experts: int) -> Tensor:
    """[Q, E]: how many tokens of each set are assigned to each expert."""
    key_tK, kept_tK = set_t[:, None] * num_experts + assignments.experts, assignments.kept
    kept_N = None if kept_tK is None else kept_tK.flatten()
    return count_keys(key_tK.flatten(), num_sets * num_experts, kept_N).view(num_sets, num_experts)


def _shares(count_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Of all assignments in a set; a set whose tokens are all padding has none."""
    return count_E.to(dtype) / count_E.sum(-1, keepdim=True).clamp(min=1)


def update_expert_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The loss-free bias: a step up for experts with less than the mean load, a step down for those with more.

    ``counts_E`` is of the whole step, over all ranks, and of what was computed: an assignment over capacity is no load
    (as in Megatron, which counts its routing map after dropping). The comparison is made in whole numbers, so it is
    exact.
    """
    return bias_E + rate * (counts_E.sum() - counts_E * counts_E.numel()).sign().to(bias_E.dtype)
