"""Timing on a machine that does other things too.

A computer's speed changes from minute to minute: other processes compute, clock frequencies change. So every trial
follows a reference, one small matmul, and what counts is the ratio of the two. Trials alternate, round after round, and
each is worth the mean of its rounds without the slowest fifth: a disturbance then spoils a few rounds of everything
instead of all rounds of one trial. The mean and not the median, because a step is a sum of many such trials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import mean, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Trial = Callable[[], object]
# Called with what is measured, the number of rounds done, and the number of all rounds.
Progress = Callable[[str, int, int], None]
# Rounds that do not count: they allocate memory and fill the caches of GEMM plans.
_WARM = 2
# Rows, inner and outer size of the reference, and how often it runs before each trial.
REFERENCE = 512
REPEATS = 3


def seconds(trial: Trial) -> float:
    began = time.perf_counter()
    trial()
    return time.perf_counter() - began


def repeat(trial: Trial, times: int) -> None:
    for _ in range(times):
        trial()


# ---- trials against a reference ----


class Reference:
    """One matmul of square matrices, on every rank at once."""

    def __init__(self) -> None:
        self.a, self.b = torch.randn(REFERENCE, REFERENCE), torch.randn(REFERENCE, REFERENCE)

    def __call__(self) -> None:
        self.a @ self.b

    def seconds(self) -> float:
        """Of one matmul on all ranks at once. Ends with a barrier, so that all ranks start the next trial together."""
        barrier()
        taken = seconds(lambda: repeat(self, REPEATS)) / REPEATS
        barrier()
        return taken


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def ratios(
    trials: Mapping[str, Trial], rounds: int, what: str = "", progress: Progress | None = None
) -> dict[str, float]:
    """Time of each trial in units of the reference's, on as many ranks at once."""
    reference = Reference()
    found: dict[str, list[float]] = {name: [] for name in trials}
    for number in range(_WARM + rounds):
        for name, trial in trials.items():
            unit = reference.seconds()
            found[name].append(seconds(trial) / unit)
        if progress is not None:
            progress(what, max(0, number + 1 - _WARM), rounds)
    return {name: trimmed_mean(taken[_WARM:]) for name, taken in found.items()}


def trimmed_mean(taken: Sequence[float]) -> float:
    """The mean without the slowest fifth."""
    return mean(sorted(taken)[: max(1, len(taken) - len(taken) // 5)])


# ---- trials against each other ----


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        return (self.high - self.low) / self.median if self.median else 0.0


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


@dataclass(frozen=True)
class Timing:
    """Seconds of each round: on the wall, and CPU time of the process, which other processes disturb less."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def of(self, clock: str) -> list[float]:
        return self.cpu if clock == "cpu" else self.wall


def wait_for(device: str) -> None:
    """Until a GPU has done all that was launched; a CPU has."""
    if device == "cuda":
        torch.cuda.synchronize()


class Round(NamedTuple):
    """Whether a round counts, and which one of its kind it is, of how many at most."""

    counts: bool
    number: int
    of: int

    def show(self, progress: Progress | None, what: str) -> None:
        """After the round."""
        if progress is not None:
            progress(what if self.counts else f"{what}, warm-up", self.number, self.of)


def rounds_within(budget: float, rounds: int, warm: int, now: Callable[[], float] = time.monotonic) -> Iterator[Round]:
    """``warm`` rounds that do not count, then ``rounds`` that do.

    Where ``budget`` seconds are too few for all of them, warm-up ends when it has had its share, and the rest when
    another round would exceed the budget; one round counts in any case. ``now`` must be the same on ranks that run
    rounds together.
    """
    began, warmed, counted, last = now(), 0, 0, 0.0
    while counted < rounds:
        elapsed = now() - began
        if not counted and warmed < warm and elapsed + last <= budget * warm / (warm + rounds):
            warmed += 1
            yield Round(False, warmed, warm)
        elif counted and elapsed + last > budget:
            return
        else:
            counted += 1
            yield Round(True, counted, rounds)
        last = now() - began - elapsed


def alternate(
    trials: Mapping[str, tuple[Callable[[int], Any], Callable[[Any], object]]],
    rounds: int,
    warm: int,
    what: str,
    progress: Progress | None = None,
    device: str = "cpu",
    budget: float = inf,
) -> dict[str, Timing]:
    """Each trial once per round, in as many rounds as ``budget`` seconds suffice for. A trial is (prepare, run):
    ``prepare(seed)`` is not timed and makes the input of ``run``; the seed changes every round. On a GPU, the time ends
    when the GPU is done."""
    found = {name: Timing() for name in trials}
    for number, round_ in enumerate(rounds_within(budget, rounds, warm)):
        for name, (prepare, run) in trials.items():
            if progress is not None and not number:
                progress(f"first run of {name}, rounds", 0, rounds)
            prepared = prepare(number)
            wait_for(device)
            wall, cpu = time.perf_counter(), time.process_time()
            run(prepared)
            wait_for(device)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if round_.counts:
                found[name].wall.append(wall)
                found[name].cpu.append(cpu)
        round_.show(progress, what)
    return found
