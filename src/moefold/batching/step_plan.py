"""Which documents a step's microbatches hold, and about how long they take.

All dp * cp ranks of a pipeline stage work on a **wave** of microbatches at a time: one per group of `context` ranks
over which it is sharded. A step is a sequence of waves. Ranks synchronise in every layer (dispatch and combine), so a
wave takes as long as its slowest group, and the plan balances groups.

    l length of a document, c ranks over which it is sharded

Attention grows with l * l, everything else with l; both are divided by c. Keys and values are sent to the c - 1 other
ranks, so a sharded document costs bytes in proportion to l * (c - 1) / c, and a latency per ring step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Wave:
    """Microbatches that run at the same time, as indices into the step's documents: one tuple per group of ranks."""

    context: int
    documents: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StepPlan:
    """The waves of one step, in the order in which they run; every document is in exactly one group of one wave."""

    waves: tuple[Wave, ...]

    def with_at_least(self, num_waves: int) -> StepPlan:
        """Followed by empty waves, for schedules that need more microbatches than the documents make."""
        missing = max(num_waves - len(self.waves), 0)
        idle = tuple(Wave(wave.context, ((),) * len(wave.documents)) for wave in self.waves[-1:])
        return StepPlan(self.waves + idle * missing)


@dataclass(frozen=True)
class Cost:
    """A linear model of time, in units of all the work on one token that is not attention.

    The defaults are of the size that DeepSeek-V3 has on eight H100s; only their proportions matter.
    """

    token: float = 1.0
    # Per pair of positions: at 1 / attention tokens, attention takes as long as everything else.
    attention: float = 1 / 32_768
    # Per token whose keys and values are sent, per ring step, and per wave.
    kv_transfer: float = 0.1
    ring_step: float = 8.0
    wave: float = 64.0

    def of_document(self, length: int, context: int) -> float:
        """What one document adds to the time of its ranks."""
        return (self.attention * length + self.token + self.kv_transfer * (context - 1)) * length / context

    def longest_within(self, time: float, context: int) -> float:
        """The length of a document that takes this long: the root of the quadratic that `of_document` is."""
        linear, budget = self.token + self.kv_transfer * (context - 1), time * context
        if budget <= 0:
            return 0.0
        # The form without a difference of near numbers; it holds for attention = 0 too.
        return 2 * budget / (linear + sqrt(linear * linear + 4 * self.attention * budget))

    def of_wave(self, context: int, slowest: float) -> float:
        return slowest + self.ring_step * (context - 1) + self.wave


def estimate(plan: StepPlan, lengths: Sequence[int], cost: Cost) -> float:
    """How long the step takes."""
    return sum(cost.of_wave(wave.context, max(group_times(wave, lengths, cost), default=0.0)) for wave in plan.waves)


def group_times(wave: Wave, lengths: Sequence[int], cost: Cost) -> list[float]:
    """How long each group of a wave works on its documents."""
    return [sum(cost.of_document(lengths[i], wave.context) for i in group) for group in wave.documents]


def ramped(plan: StepPlan, lengths: Sequence[int], cost: Cost) -> StepPlan:
    """The same waves in serpentine order: short ones first, the longest in the middle, short ones last.

    A pipeline fills and drains with its first and last microbatches, and its ranks idle for as long as those take.
    """
    took = [cost.of_wave(wave.context, max(group_times(wave, lengths, cost), default=0.0)) for wave in plan.waves]
    by_time = sorted(range(len(took)), key=lambda i: (took[i], i))
    return StepPlan(tuple(plan.waves[i] for i in (*by_time[::2], *by_time[1::2][::-1])))


def imbalance(plan: StepPlan, lengths: Sequence[int], cost: Cost) -> float:
    """The slowest group of every wave over the mean group: 1 where no rank waits."""
    times = [group_times(wave, lengths, cost) for wave in plan.waves]
    working, waited = sum(map(sum, times)), sum(max(wave) * len(wave) for wave in times)
    return waited / working if working else 1.0


def max_shard_length(length: int, context: int) -> int:
    """The longest context shard of a document: two of 2c nearly equal chunks."""
    whole, rest = divmod(length, 2 * context)
    return 2 * whole + (rest > 0) + (rest > context)


def max_group_tokens(group: Iterable[int], lengths: Sequence[int], context: int) -> int:
    """A bound on the tokens of any rank of the group."""
    return sum(max_shard_length(lengths[i], context) for i in group)
