"""Losses of reinforcement learning on log-probs of sampled tokens, as rows of a table.

With log-prob l of a token under the current weights, l_old under those that sampled it, l_ref under a reference model,
advantage A and ratio r = exp(l - l_old), the loss of a token is

    policy_gradient   -A l                                             (REINFORCE; Williams 1992)
    ppo_clip          max(-A r, -A clip(r, 1 - low, 1 + high))         (Schulman et al. 2017, eq. 7)
    grpo              ppo_clip + beta (exp(l_ref - l) - (l_ref - l) - 1)   (Shao et al. 2024, eq. 3 and 4)

A row of ``LOSSES`` names the terms and the inputs that they read; its numbers (low, high, beta) can be given anew.
How tokens are weighted is a choice of its own, ``NORMALIZATIONS``: the sum over all tokens of the step, on all ranks,
is divided once. `group_advantages` makes GRPO's advantages of the rewards of a group of answers to one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.errors import UnknownNameError

Inputs = Mapping[str, Tensor]
# Per token, all [S]: its loss.
Term = Callable[[Tensor, Inputs, "PolicyLoss"], Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """One loss: the sum of its terms, and the inputs per token that they read."""

    terms: tuple[Term, ...]
    reads: tuple[str, ...]
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.04

    def __call__(self, logprob_S: Tensor, inputs: Inputs) -> Tensor:
        """The sum over tokens, each times its weight; tokens of weight 0 get no gradient, whatever their values."""
        counts_S = inputs["weights"] != 0
        safe = {name: torch.where(counts_S, values, 0.0) for name, values in inputs.items()}
        logprob_S = torch.where(counts_S, logprob_S, 0.0)
        loss_S = sum((term(logprob_S, safe, self) for term in self.terms), torch.zeros_like(logprob_S))
        return (loss_S * safe["weights"]).sum()


def negative_return(logprob_S: Tensor, inputs: Inputs, loss: PolicyLoss) -> Tensor:
    return -inputs["advantages"] * logprob_S


def clipped_ratio(logprob_S: Tensor, inputs: Inputs, loss: PolicyLoss) -> Tensor:
    """The larger of both losses: clipping takes away what would be gained by moving further, and no more."""
    ratio_S = (logprob_S - inputs["old_logprobs"]).exp()
    clipped_S = ratio_S.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return torch.maximum(-inputs["advantages"] * ratio_S, -inputs["advantages"] * clipped_S)


def kl_to_reference(logprob_S: Tensor, inputs: Inputs, loss: PolicyLoss) -> Tensor:
    """An estimate of KL(policy || reference) that is unbiased and never negative (Schulman's k3)."""
    less_S = inputs["ref_logprobs"] - logprob_S
    return loss.kl_weight * (less_S.exp() - less_S - 1)


_NUMBERS = ("clip_low", "clip_high", "kl_weight")
LOSSES: dict[str, PolicyLoss] = {
    "policy_gradient": PolicyLoss((negative_return,), ("advantages",)),
    "ppo_clip": PolicyLoss((clipped_ratio,), ("advantages", "old_logprobs")),
    "grpo": PolicyLoss((clipped_ratio, kl_to_reference), ("advantages", "old_logprobs", "ref_logprobs")),
}


def loss_named(name: str | PolicyLoss, numbers: Mapping[str, float]) -> PolicyLoss:
    """A row of the table, or another loss, with some of its numbers changed."""
    if isinstance(name, str) and name not in LOSSES:
        raise UnknownNameError("loss", name, LOSSES)
    row = LOSSES[name] if isinstance(name, str) else name
    changed = {number: getattr(row, number) for number in _NUMBERS} | dict(numbers)
    if strange := sorted(changed.keys() - set(_NUMBERS)):
        raise UnknownNameError(f"number of the loss {name}", strange[0], _NUMBERS)
    return PolicyLoss(row.terms, row.reads, **changed)


class Normalization(NamedTuple):
    """The weight of each of a sequence's n counted tokens, and what one such sequence adds to the divisor."""

    weight: Callable[[int], float]
    divisor: Callable[[int], int]


# Both are given the number of counted tokens of a sequence, which is not 0.
NORMALIZATIONS: dict[str, Normalization] = {
    # All counted tokens of the step count alike (DAPO's).
    "tokens": Normalization(lambda tokens: 1.0, lambda tokens: tokens),
    # The mean over sequences of the mean over their tokens (GRPO's own).
    "sequences": Normalization(lambda tokens: 1.0 / tokens, lambda tokens: 1),
    # The mean over sequences of the sum over their tokens.
    "sequence_sums": Normalization(lambda tokens: 1.0, lambda tokens: 1),
}


def normalization_named(name: str) -> Normalization:
    if name not in NORMALIZATIONS:
        raise UnknownNameError("normalization", name, NORMALIZATIONS)
    return NORMALIZATIONS[name]


def group_advantages(
    rewards: Sequence[float], group_size: int, *, scale: bool = True, eps: float = 1e-6
) -> list[float]:
    """GRPO's: each reward minus the mean of its group, divided by the group's standard deviation (unbiased).

    Groups are consecutive. ``scale`` False leaves the division out (Dr. GRPO).

    >>> from moefold.rl import group_advantages
    >>> [round(advantage, 3) for advantage in group_advantages([1.0, 0.0, 0.5, 0.5], 2)]
    [0.707, -0.707, 0.0, 0.0]
    """
    grouped = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    centred = grouped - grouped.mean(1, keepdim=True)
    if scale:
        centred = centred / (grouped.std(1, keepdim=True) + eps)
    found: list[float] = centred.flatten().tolist()
    return found


def ratio_metrics(logprob_S: Tensor, inputs: Inputs, loss: PolicyLoss) -> dict[str, Tensor]:
    """Sums over counted tokens: how many, how many are clipped, and two estimates of KL(old || now)."""
    counts_S = inputs["weights"] != 0
    found = {"tokens": counts_S.sum().double()}
    if "old_logprobs" in inputs:
        less_S = torch.where(counts_S, logprob_S - inputs["old_logprobs"], 0.0).double()
        ratio_S, up_S = less_S.exp(), inputs["advantages"] > 0
        outside_S = torch.where(up_S, ratio_S > 1 + loss.clip_high, ratio_S < 1 - loss.clip_low)
        found["clipped"] = (outside_S & counts_S & (inputs["advantages"] != 0)).sum().double()
        found["kl"] = (ratio_S - 1 - less_S).sum()
        found["ratio"] = torch.where(counts_S, ratio_S, 0.0).sum()
    return found
