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
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moefold.config.moe import BalanceConfig, MoEConfig
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

    @property
    def dropped(self) -> Tensor:
        return self.counts_E.sum() - self.kept_E.sum()


# Logits, shares, the kind of score, False for padding tokens or None; to the sum.
BalanceTerm = Callable[[Tensor, Tensor, Literal["softmax", "sigmoid"], Tensor | None], Tensor]


class _Shares(NamedTuple):
    """The share of each token's set, [t, E] or the same [E] for all, is ``value_tE`` times ``factor``.

    Whole counts are divided by a number that the host knows when the loss is multiplied by its coefficient, and not
    before.
    """

    value_tE: Tensor
    factor: float = 1.0


class CountedScores(NamedTuple):
    """What the router has computed already: assignments per expert of the plain top-k, and all experts' scores."""

    plain_E: Tensor | None = None
    scores_tE: Tensor | None = None


NOTHING_COUNTED = CountedScores()


def balance_losses(
    config: MoEConfig,
    logits_tE: Tensor,
    plain: Assignments,
    batch: Batch,
    tokens: TokenSharding,
    earlier_E: Tensor | None,
    known: CountedScores = NOTHING_COUNTED,
    term: BalanceTerm | None = None,
) -> BalanceLosses:
    """``plain`` is each token's plain top-k; ``earlier_E`` counts it over this rank's earlier microbatches of the step.

    A loss that is off costs nothing. ``term`` is another implementation of ``balance_term``, such as a compiled one.
    """
    coefficients, num_experts, off = config.balance, config.num_experts, logits_tE.new_zeros(())
    if not counts_anything(coefficients) and not coefficients.z:
        return BalanceLosses(off, off, off, off, off)
    real_t = real_tokens(batch, tokens)
    kind = config.router.score
    # Computed once for all losses; a term that is given computes its own.
    p_tE = None if term else _without_padding(probabilities(logits_tE, kind, known.scores_tE), real_t)
    # Every real token counts K times.
    sums_known = real_t is None and plain.kept is None

    def counts(sets: TokenSets) -> tuple[Tensor, Tensor | None]:
        """Assignments per expert of each set, and each token's set, or None where all tokens are in one."""
        if len(sets.sizes) == 1:
            count_E = count_assignments(plain, num_experts) if known.plain_E is None else known.plain_E
            return tokens.sum_counts(count_E[None], "microbatch", batch), None
        set_t = tokens.local_shard(sets.set_of_token_T, batch)
        count_QE = count_by_set(plain, set_t, len(sets.sizes), num_experts)
        return tokens.sum_counts(count_QE, "microbatch", batch), set_t

    def shares(sets: TokenSets) -> _Shares:
        count_QE, set_t = counts(sets)
        if set_t is None:
            divisor = sets.sizes[0] * config.top_k if sums_known else None
            return _Shares(count_QE, 1 / divisor) if divisor else _Shares(_shares(count_QE, logits_tE.dtype))
        return _Shares(_shares(count_QE, logits_tE.dtype)[set_t])

    def shares_of_sequences() -> _Shares:
        """Each token's share divided by its sequence's tokens, in units of the step's mean per sequence."""
        mean = batch.step_tokens / _step_sequences(batch)
        count_QE, set_t = counts(batch.documents)
        if set_t is None and sums_known and (num_tokens := batch.documents.sizes[0]):
            return _Shares(count_QE, mean / (num_tokens * config.top_k * num_tokens))
        tokens_Q = (count_QE.sum(-1) / config.top_k).clamp(min=1).to(logits_tE.dtype)
        share_QE = _shares(count_QE, logits_tE.dtype) * (mean / tokens_Q)[:, None]
        return _Shares(share_QE if set_t is None else share_QE[set_t])

    def shares_of_everyone() -> _Shares:
        count_E = count_assignments(plain, num_experts) if known.plain_E is None else known.plain_E
        count_E = tokens.sum_counts(count_E if earlier_E is None else count_E + earlier_E, "everyone", batch)
        return _Shares(_shares(count_E, logits_tE.dtype))

    def shares_of_devices() -> _Shares:
        share = shares(batch.microbatches)
        return share._replace(value_tE=even_out(share.value_tE.to(logits_tE.dtype), coefficients.device_groups))

    def loss(coefficient: float, shares: Callable[[], _Shares]) -> Tensor:
        if not coefficient:
            return off
        value_tE, factor = shares()
        if term is None:
            total = balance_term(logits_tE, value_tE, kind, real_t, p_tE)
        else:
            total = term(logits_tE, value_tE, kind, real_t)
        return total * (coefficient * num_experts / batch.step_tokens * factor)

    def z() -> Tensor:
        return _without_padding(logits_tE.logsumexp(-1, keepdim=True).square(), real_t).sum()

    by_sequence = {"sequences": shares_of_sequences, "tokens": lambda: shares(batch.documents)}
    return BalanceLosses(
        microbatch=loss(coefficients.microbatch, lambda: shares(batch.microbatches)),
        sequence=loss(coefficients.sequence, by_sequence[coefficients.sequence_mean]),
        global_batch=loss(coefficients.global_batch, shares_of_everyone),
        device=loss(coefficients.device, shares_of_devices),
        z=z() * (coefficients.z / batch.step_tokens) if coefficients.z else off,
    )


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
    kind: Literal["softmax", "sigmoid"],
    real_t: Tensor | None = None,
    p_tE: Tensor | None = None,
) -> Tensor:
    """The sum over tokens and experts of probability times share; ``p_tE`` where probabilities are known."""
    if p_tE is None:
        p_tE = _without_padding(probabilities(logits_tE, kind), real_t)
    return (p_tE * value_tE).sum()


def probabilities(logits_tE: Tensor, kind: Literal["softmax", "sigmoid"], scores_tE: Tensor | None = None) -> Tensor:
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
