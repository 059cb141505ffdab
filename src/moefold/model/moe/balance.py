"""What keeps the load even: losses on the router's probabilities, and the bias that needs no loss.

t tokens of this rank, E experts, K choices per token, S sets of tokens, p a token's probabilities over all experts.

A balance loss looks at one set s of tokens at a time: a microbatch, a sequence, all that ran in this step so far. With
n_s tokens of which c_e chose expert e (before any was dropped), and n tokens in the step,

    loss = coefficient * sum_s (n_s / n) * E * sum_e (c_e / (K n_s)) * (sum_{t in s} p_te / n_s)
         = coefficient * E / n * sum_t sum_e share_{s(t), e} * p_te,        share_se = c_e / (all choices in s).

The second line is how it is computed. Given the shares it is a plain sum over tokens: every rank adds its own tokens'
part and the parts add up to the whole, whatever the layout. Only the counts, which have no gradient, meet first. Pads
are in no set and not in n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.model.batch import Batch, TokenSets
from moefold.model.moe.pads import real_tokens
from moefold.model.seams import TokenSeam
from moefold.ops.permute import Choices
from moefold.ops.segments import count_keys
from moefold.ops.topk import score


class BalanceLosses(NamedTuple):
    """This rank's part of each loss, its coefficient included."""

    microbatch: Tensor
    sequence: Tensor
    global_batch: Tensor
    device: Tensor
    z: Tensor


class RoutingReport(NamedTuple):
    """What a router did with this rank's tokens: choices per expert before dropping, and how many were dropped."""

    counts_E: Tensor
    dropped: Tensor
    losses: BalanceLosses


def balance_losses(
    config: MoEConfig, logits_tE: Tensor, choices: Choices, batch: Batch, tokens: TokenSeam, earlier_E: Tensor | None
) -> BalanceLosses:
    """``earlier_E`` counts this rank's choices in the step's earlier microbatches. A loss that is off costs nothing."""
    coefficients, num_experts, off = config.balance, config.num_experts, logits_tE.new_zeros(())
    real_t = real_tokens(batch, tokens)
    p_tE = _without_pads(probabilities(logits_tE, config.router.score), real_t)

    def shares(sets: TokenSets) -> Tensor:
        set_t = tokens.mine(sets.set_of_token_N, batch)
        count_SE = tokens.sum_counts(count_by_set(choices, set_t, len(sets.sizes), num_experts), "microbatch", batch)
        return _shares(count_SE, p_tE.dtype)[set_t]

    def shares_of_everyone() -> Tensor:
        count_E = count_choices(choices, num_experts)
        count_E = tokens.sum_counts(count_E if earlier_E is None else count_E + earlier_E, "everyone", batch)
        return _shares(count_E, p_tE.dtype)

    def loss(coefficient: float, share_tE: Callable[[], Tensor]) -> Tensor:
        return (share_tE() * p_tE).sum() * (coefficient * num_experts / batch.step_tokens) if coefficient else off

    def z() -> Tensor:
        return _without_pads(logits_tE.logsumexp(-1, keepdim=True).square(), real_t).sum()

    return BalanceLosses(
        microbatch=loss(coefficients.microbatch, lambda: shares(batch.microbatches)),
        sequence=loss(coefficients.sequence, lambda: shares(batch.documents)),
        global_batch=loss(coefficients.global_batch, shares_of_everyone),
        device=loss(coefficients.device, lambda: even_out(shares(batch.microbatches), coefficients.device_groups)),
        z=z() * (coefficients.z / batch.step_tokens) if coefficients.z else off,
    )


def _without_pads(x_tE: Tensor, real_t: Tensor | None) -> Tensor:
    return x_tE if real_t is None else x_tE.where(real_t[:, None], 0.0)


def probabilities(logits_tE: Tensor, kind: Literal["softmax", "sigmoid"]) -> Tensor:
    """Scores that add up to 1 for each token."""
    scores_tE = score(logits_tE, kind)
    return scores_tE if kind == "softmax" else scores_tE / scores_tE.sum(-1, keepdim=True)


def even_out(share_tE: Tensor, num_groups: int) -> Tensor:
    """Each expert's share becomes the mean of its device's: only the load between devices is left to be evened."""
    share_tGe = share_tE.unflatten(-1, (num_groups, -1))
    return share_tGe.mean(-1, keepdim=True).expand_as(share_tGe).flatten(-2)


def count_choices(choices: Choices, num_experts: int) -> Tensor:
    """How many tokens here chose each expert."""
    kept_tK = choices.kept_tK
    return count_keys(choices.expert_tK.flatten(), num_experts, None if kept_tK is None else kept_tK.flatten())


def count_by_set(choices: Choices, set_t: Tensor, num_sets: int, num_experts: int) -> Tensor:
    """The same for each set of tokens, [S, E]."""
    key_tK, kept_tK = set_t[:, None] * num_experts + choices.expert_tK, choices.kept_tK
    kept_N = None if kept_tK is None else kept_tK.flatten()
    return count_keys(key_tK.flatten(), num_sets * num_experts, kept_N).view(num_sets, num_experts)


def _shares(count_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Of all choices in a set; where tokens are chosen by experts, a set may have none."""
    return count_E.to(dtype) / count_E.sum(-1, keepdim=True).clamp(min=1)


def update_expert_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The loss-free bias: a step up for experts with less than the mean load, a step down for those with more.

    ``counts_E`` is of the whole step, over all ranks. The comparison is made in whole numbers, so it is exact.
    """
    return bias_E + rate * (counts_E.sum() - counts_E * counts_E.numel()).sign().to(bias_E.dtype)
