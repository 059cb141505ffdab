"""Losses of reinforcement learning, by the papers' equations written out over single tokens in Python numbers.

PPO: Schulman et al. 2017, eq. 7. GRPO: Shao et al. 2024 (DeepSeekMath), eq. 3 (objective), 4 (KL estimate) and the
advantage of 4.1.2. REINFORCE: Williams 1992. Gradients by central differences of the same equations.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sqrt
from random import Random

import pytest
import torch
from torch import Tensor

from moefold.rl.policy_losses import LOSSES, group_advantages, loss_named, normalization_named
from moefold.rl.rollouts import Rollout, local_counts, loss_inputs

LOW, HIGH, BETA = 0.1, 0.3, 0.07


def reinforce(now: float, old: float, ref: float, advantage: float) -> float:
    return -advantage * now


def ppo(now: float, old: float, ref: float, advantage: float) -> float:
    """-min(r A, clip(r, 1 - e, 1 + e) A)"""
    ratio = exp(now - old)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -min(ratio * advantage, clipped * advantage)


def grpo(now: float, old: float, ref: float, advantage: float) -> float:
    """-(min(...) - beta D), D = pi_ref / pi - log(pi_ref / pi) - 1"""
    divergence = exp(ref) / exp(now) - (ref - now) - 1
    return ppo(now, old, ref, advantage) + BETA * divergence


Equation = Callable[[float, float, float, float], float]
EQUATIONS: dict[str, Equation] = {"policy_gradient": reinforce, "ppo_clip": ppo, "grpo": grpo}


def some_rollouts(seed: int) -> list[Rollout]:
    """Ratios on both sides of both bounds, advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    made = []
    for size, prompt in ((7, 2), (4, 1), (9, 5), (3, 3)):
        old = -numbers(size).abs() - 0.1
        made.append(
            Rollout(
                torch.arange(size),
                torch.arange(size) >= prompt,
                advantages=numbers(size),
                old_logprobs=old,
                ref_logprobs=old + 0.3 * numbers(size),
            )
        )
    return made


def by_the_equation(rollouts: list[Rollout], now: list[list[float]], equation: Equation, normalize: str) -> float:
    sums, counts = [], []
    for rollout, row in zip(rollouts, now, strict=True):
        terms = [
            equation(
                row[t],
                float(rollout.old_logprobs[t]),  # type: ignore[index]
                float(rollout.ref_logprobs[t]),  # type: ignore[index]
                float(rollout.advantages[t]),  # type: ignore[index]
            )
            for t in range(1, len(row))
            if rollout.counted[t]
        ]
        sums.append(sum(terms))
        counts.append(len(terms))
    if normalize == "tokens":
        return sum(sums) / sum(counts)
    used = [(total, count) for total, count in zip(sums, counts, strict=True) if count]
    if normalize == "sequences":
        return sum(total / count for total, count in used) / len(used)
    return sum(total for total, _ in used) / len(used)


@pytest.mark.parametrize("normalize", ["tokens", "sequences", "sequence_sums"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_the_papers(name: str, normalize: str) -> None:
    rollouts, equation, normalization = some_rollouts(3), EQUATIONS[name], normalization_named(normalize)
    draw = Random(5)
    now = [[float(x) + draw.gauss(0, 0.3) for x in rollout.old_logprobs] for rollout in rollouts]  # type: ignore[union-attr]
    # The batch's places: the log-prob of token t stands at t - 1.
    flat = torch.tensor([x for row in now for x in (*row[1:], 0.0)], dtype=torch.float64, requires_grad=True)
    loss = loss_named(name, {"clip_low": LOW, "clip_high": HIGH, "kl_weight": BETA})
    inputs = loss_inputs(rollouts, loss.reads, normalization, torch.float64)
    found = loss(flat, inputs) / local_counts(rollouts, normalization).divisor
    assert found.item() == pytest.approx(by_the_equation(rollouts, now, equation, normalize), rel=1e-12)

    found.backward()
    assert flat.grad is not None
    first, step = 0, 1e-6
    for row, rollout in zip(range(len(rollouts)), rollouts, strict=True):
        for t in range(1, len(now[row])):
            moved = []
            for sign in (1, -1):
                changed = [list(values) for values in now]
                changed[row][t] += sign * step
                moved.append(by_the_equation(rollouts, changed, equation, normalize))
            slope = (moved[0] - moved[1]) / (2 * step)
            assert float(flat.grad[first + t - 1]) == pytest.approx(slope, abs=1e-8), (row, t)
        assert float(flat.grad[first + len(now[row]) - 1]) == 0.0
        first += rollout.tokens.shape[0]


def test_what_is_not_counted_has_no_influence_whatever_it_is() -> None:
    """A prompt token may have any old log-prob, -inf among them: no NaN comes out."""
    rollout = some_rollouts(1)[0]
    assert rollout.old_logprobs is not None
    rollout.old_logprobs[:2] = -torch.inf
    now = torch.randn(7, dtype=torch.float64, requires_grad=True)
    loss = LOSSES["grpo"]
    loss(now, loss_inputs([rollout], loss.reads, normalization_named("tokens"), torch.float64)).backward()
    assert now.grad is not None and bool(now.grad.isfinite().all()) and float(now.grad[0]) == 0.0


def test_advantages_of_a_group() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 2.0, 0.5, 3.0, 3.0, 3.0, 3.0]
    expected = []
    for first in range(0, len(rewards), 4):
        group = rewards[first : first + 4]
        mean = sum(group) / 4
        deviation = sqrt(sum((reward - mean) ** 2 for reward in group) / 3)
        expected += [(reward - mean) / (deviation + 1e-6) for reward in group]
    assert group_advantages(rewards, 4) == pytest.approx(expected)
    assert group_advantages(rewards, 4, scale=False)[:4] == pytest.approx([0.5, -0.5, -0.5, 0.5])
