"""Waves of microbatches: what a step's plan holds, how long it takes by estimate, and how waves are filled.

All dp * cp ranks of a pipeline stage work on a **wave** of microbatches at a time: one per group of `context` ranks
over which it is sharded. A step is a sequence of waves. Ranks synchronise in every layer (dispatch and combine), so a
wave takes as long as its slowest group, and the plan balances groups.

    l length of a document, c ranks over which it is sharded

Attention grows with l * l, everything else with l; both are divided by c. Keys and values are sent to the c - 1 other
ranks, so a sharded document costs bytes in proportion to l * (c - 1) / c, and a latency per ring step.

Filling is bin packing by size and by work. *First fit* puts each document into the first bin with room and so needs few
bins. *Evenly* puts each into the bin with the least work, and so balances bins, if there are enough of them. Both want
the longest first. *Serpentine* deals bins to ranks:

    work            9 8 7 6 5 4 3 2 1            over 3 ranks
    wave 0          9 8 7
    wave 1          4 5 6                        a wave's bins are alike,
    wave 2          3 2 1                        and so are the ranks' sums

`WavePacker` fills waves one by one, so that a wave's groups take equally long. A long document determines the time of
its wave: the other groups are filled up to that time with whatever fits, the longest first. Where no document is that
long, the time is an even part of the remaining work. The number of waves that this supposes is a parameter, and callers
try several.

    pool, ascending     1 1 2 2 3 9        two groups        wave 0    9 | 3 2 2 1 1
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt


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


Bin = tuple[int, ...]


def first_fit(order: Sequence[int], sizes: Sequence[int], bound: int) -> list[Bin]:
    """Each document in the first bin that has room.

    `room` is a tree over the bins, every node the most room among those below it: finding a bin takes log(bins) steps.
    """
    leaves = 1 << max(len(order) - 1, 0).bit_length()
    room = [bound] * (2 * leaves)
    bins: list[list[int]] = []
    for i in order:
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < sizes[i])
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(i)
        room[node] -= sizes[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [tuple(bin) for bin in bins]


def evenly(
    order: Sequence[int], sizes: Sequence[int], work: Sequence[float], bound: int, num_bins: int
) -> list[Bin] | None:
    """Each document in the bin with least work among those with room; None when one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [bound] * num_bins
    least = [(0.0, number) for number in range(num_bins)]
    smallest = min((sizes[i] for i in order), default=0)
    for i in order:
        passed = []
        while least and room[least[0][1]] < sizes[i]:
            candidate = heapq.heappop(least)
            # A bin without room for the smallest document is dropped from the heap.
            if room[candidate[1]] >= smallest:
                passed.append(candidate)
        if not least:
            return None
        before, number = least[0]
        heapq.heapreplace(least, (before + work[i], number))
        bins[number].append(i)
        room[number] -= sizes[i]
        for candidate in passed:
            heapq.heappush(least, candidate)
    return [tuple(bin) for bin in bins]


def serpentine(bins: Sequence[Bin], num_groups: int, work: Sequence[float]) -> list[tuple[Bin, ...]]:
    """Bins by falling work, `num_groups` to a wave, every second wave backwards; empty bins fill up the last."""
    ordered = sorted(bins, key=lambda bin: (-sum(work[i] for i in bin), bin))
    waves = [tuple(ordered[start : start + num_groups]) for start in range(0, len(ordered), num_groups)] or [()]
    waves[-1] += ((),) * (num_groups - len(waves[-1]))
    return [wave[::-1] if number % 2 else wave for number, wave in enumerate(waves)]


@dataclass(frozen=True)
class Room:
    """How many tokens fit: into a whole microbatch, or into each context-parallel rank."""

    tokens: int
    per_rank: bool = False

    def size(self, length: int, context: int) -> int:
        """How many of these tokens a document takes."""
        return max_shard_length(length, context) if self.per_rank else length

    def longest(self, left: int, context: int) -> int:
        """The longest document that fits into what is left."""
        return left * context if self.per_rank else left


@dataclass(frozen=True)
class WavePacker:
    """The documents of one step, the ranks they run on, and over how many ranks a document may be sharded."""

    lengths: Sequence[int]
    ranks: int
    contexts: Sequence[int]
    room: Room
    cost: Cost

    def plan(self, num_waves: int, use_more_ranks: bool) -> StepPlan:
        """About ``num_waves`` waves: fewer when one holds all that is left, more when the documents do not fit.

        ``use_more_ranks``: shard a document over more ranks than it needs where it would otherwise take longer than the
        even time.
        """
        pool = self._ascending
        left = sum(self._tables[self.contexts[0]][1])
        waves: list[Wave] = []
        while pool or not waves:
            longest = pool[-1][0] if pool else 0
            even_time = left * self.contexts[0] / self.ranks / max(num_waves - len(waves), 1)
            context = self._context_for(longest, even_time if use_more_ranks else inf)
            groups = self._fill_evenly(pool, context) if len(waves) + 1 >= num_waves else None
            if groups is None:
                groups, pool = self._fill(pool, context, max(even_time, self.cost.of_document(longest, context)))
            else:
                pool = []
            left -= sum(self._time(group, self.contexts[0]) for group in groups)
            # Serpentine: the group with the most work in one wave gets the least in the next.
            groups.sort(key=lambda group: (-self._time(group, context), group), reverse=bool(len(waves) % 2))
            waves.append(Wave(context, tuple(groups)))
        return StepPlan(tuple(waves))

    @cached_property
    def _ascending(self) -> list[tuple[int, int]]:
        return sorted((length, i) for i, length in enumerate(self.lengths))

    @cached_property
    def _tables(self) -> dict[int, tuple[list[int], list[float]]]:
        """By context size: the tokens and the time that every document takes."""
        return {
            context: (
                [self.room.size(length, context) for length in self.lengths],
                [self.cost.of_document(length, context) for length in self.lengths],
            )
            for context in self.contexts
        }

    def _context_for(self, longest: int, even_time: float) -> int:
        """The fewest ranks that hold the longest document and finish it within the time; if none do, all ranks."""
        able = [context for context in self.contexts if self.room.size(longest, context) <= self.room.tokens]
        return next((c for c in able if self.cost.of_document(longest, c) <= even_time), able[-1])

    def _fill(
        self, pool: Sequence[tuple[int, int]], context: int, time: float
    ) -> tuple[list[Bin], list[tuple[int, int]]]:
        """The groups of one wave of this duration, and the documents that are left."""
        rest = list(pool)
        groups = [self._fill_group(rest, context, time) for _ in range(self.ranks // context)]
        taken = [i for group in groups for i in group]
        even = self._fill_evenly(sorted((self.lengths[i], i) for i in taken), context)
        slowest = max(self._time(group, context) for group in groups)
        if even is not None and max(self._time(group, context) for group in even) < slowest:
            groups = even
        return groups, rest

    def _fill_group(self, pool: list[tuple[int, int]], context: int, time: float) -> Bin:
        """Takes the longest document that fits from the pool, until none fits."""
        group: list[int] = []
        left = self.room.tokens
        while pool:
            # A document that takes exactly the time may come out a rounding error longer.
            in_time = self.cost.longest_within(time * (1 + 1e-12), context)
            at = bisect_right(pool, (min(in_time, self.room.longest(left, context)), inf)) - 1
            if at < 0:
                break
            length, i = pool.pop(at)
            left -= self.room.size(length, context)
            time -= self.cost.of_document(length, context)
            group.append(i)
        return tuple(group)

    def _fill_evenly(self, pool: Sequence[tuple[int, int]], context: int) -> list[Bin] | None:
        sizes, work = self._tables[context]
        order = [i for _, i in reversed(pool)]
        return evenly(order, sizes, work, self.room.tokens, self.ranks // context)

    def _time(self, group: Bin, context: int) -> float:
        work = self._tables[context][1]
        return sum(work[i] for i in group)
