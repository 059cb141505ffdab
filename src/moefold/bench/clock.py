"""Timing on a machine that does other things too.

A computer's speed changes from minute to minute: neighbours compute, clocks go up and down. So every trial follows a
reference, one small product, and what counts is the ratio of the two. All trials take turns, round after round, and
each is worth the mean of its rounds without the slowest: whoever computes next door for a while then disturbs a few
rounds of everything instead of all rounds of one thing. The mean, for a step is a sum of many such things.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

import torch
import torch.distributed as dist

Trial = Callable[[], object]
# Told what is being measured, and how many of how many rounds are done.
Say = Callable[[str, int, int], None]
# Rounds before the first that counts: memory is fetched, plans are made.
_WARM = 2
# Rows, inner and outer size of the reference, and how often it runs before each trial.
REFERENCE = 512
REPEATS = 3


def silent(what: str, done: int, total: int) -> None:
    """Does not want to know."""


def seconds(trial: Trial) -> float:
    began = time.perf_counter()
    trial()
    return time.perf_counter() - began


def repeat(trial: Trial, times: int) -> None:
    for _ in range(times):
        trial()


class Reference:
    """One product of square matrices, on every rank at once."""

    def __init__(self) -> None:
        self.a, self.b = torch.randn(REFERENCE, REFERENCE), torch.randn(REFERENCE, REFERENCE)

    def __call__(self) -> None:
        self.a @ self.b

    def seconds(self) -> float:
        """Of one product, while all ranks compute it. Ranks leave together: what follows begins on all of them."""
        meet()
        taken = seconds(lambda: repeat(self, REPEATS)) / REPEATS
        meet()
        return taken


def meet() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def ratios(trials: Mapping[str, Trial], rounds: int, what: str = "", say: Say = silent) -> dict[str, float]:
    """How many times longer than the reference, on as many ranks at once, each trial takes."""
    reference = Reference()
    found: dict[str, list[float]] = {name: [] for name in trials}
    for number in range(_WARM + rounds):
        for name, trial in trials.items():
            measure = reference.seconds()
            found[name].append(seconds(trial) / measure)
        say(what, max(0, number + 1 - _WARM), rounds)
    return {name: undisturbed(taken[_WARM:]) for name, taken in found.items()}


def undisturbed(taken: Sequence[float]) -> float:
    """The mean without the slowest fifth."""
    return mean(sorted(taken)[: max(1, len(taken) - len(taken) // 5)])
