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
from moefold.moe.padding_mask import real_tokens
from moefold.moe.permute import Assignments, count_assignments
from moefold.moe.topk import score
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


def balance_losses(
    config: MoEConfig,
    logits_tE: Tensor,
    plain: Assignments,
    batch: Batch,
    tokens: TokenSharding,
    earlier_E: Tensor | None,
) -> BalanceLosses:
    """``plain`` is each token's plain top-k; ``earlier_E`` counts it over this rank's earlier microbatches of the step.

    A loss that is off costs nothing.
    """
    coefficients, num_experts, off = config.balance, config.num_experts, logits_tE.new_zeros(())
    real_t = real_tokens(batch, tokens)
    p_tE = _without_padding(probabilities(logits_tE, config.router.score), real_t)

    def counts(sets: TokenSets) -> tuple[Tensor, Tensor]:
        set_t = tokens.local_shard(sets.set_of_token_T, batch)
        count_QE = count_by_set(plain, set_t, len(sets.sizes), num_experts)
        return tokens.sum_counts(count_QE, "microbatch", batch), set_t

    def shares(sets: TokenSets) -> Tensor:
        count_QE, set_t = counts(sets)
        return _shares(count_QE, p_tE.dtype)[set_t]

    def shares_of_sequences() -> Tensor:
        """Each token's share divided by its sequence's tokens, in units of the step's mean per sequence."""
        count_QE, set_t = counts(batch.documents)
        # Every real token counts K times.
        tokens_Q = (count_QE.sum(-1) / config.top_k).clamp(min=1).to(p_tE.dtype)
        mean = batch.step_tokens / _step_sequences(batch)
        return (_shares(count_QE, p_tE.dtype) * (mean / tokens_Q)[:, None])[set_t]

    def shares_of_everyone() -> Tensor:
        count_E = count_assignments(plain, num_experts)
        count_E = tokens.sum_counts(count_E if earlier_E is None else count_E + earlier_E, "everyone", batch)
        return _shares(count_E, p_tE.dtype)

    def loss(coefficient: float, share_tE: Callable[[], Tensor]) -> Tensor:
        return (share_tE() * p_tE).sum() * (coefficient * num_experts / batch.step_tokens) if coefficient else off

    def z() -> Tensor:
        return _without_padding(logits_tE.logsumexp(-1, keepdim=True).square(), real_t).sum()

    by_sequence = {"sequences": shares_of_sequences, "tokens": lambda: shares(batch.documents)}
    return BalanceLosses(
        microbatch=loss(coefficients.microbatch, lambda: shares(batch.microbatches)),
        sequence=loss(coefficients.sequence, by_sequence[coefficients.sequence_mean]),
        global_batch=loss(coefficients.global_batch, shares_of_everyone),
        device=loss(coefficients.device, lambda: even_out(shares(batch.microbatches), coefficients.device_groups)),
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


def probabilities(logits_tE: Tensor, kind: Literal["softmax", "sigmoid"]) -> Tensor:
    """Scores that sum to 1 for each token."""
    scores_tE = score(logits_tE, kind)
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
