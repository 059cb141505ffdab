"""Filling waves one by one, the longest documents first, so that a wave's groups take equally long.

A long document sets the pace of its wave: the other groups may work as long as it does, so they are filled up to that
time with whatever fits, the longest first. Where no document is that long, the pace is an even share of the work that
is left. The number of waves that this share supposes is the one free choice, and whoever calls tries several.

    pool, ascending     1 1 2 2 3 9        two groups        wave 0    9 | 3 2 2 1 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from moefold.batching.bin_packing import Bin, evenly
from moefold.batching.step_plan import Cost, StepPlan, Wave, most_held


@dataclass(frozen=True)
class Room:
    """How many tokens fit: into a whole microbatch, or into each of the ranks that share it."""

    tokens: int
    per_rank: bool = False

    def size(self, length: int, context: int) -> int:
        """What a document takes of it."""
        return most_held(length, context) if self.per_rank else length

    def longest(self, left: int, context: int) -> int:
        """The longest document that fits into what is left."""
        return left * context if self.per_rank else left


@dataclass(frozen=True)
class Filler:
    """The documents of one step, the ranks that work on them, and by how many ranks a document may be shared."""

    lengths: Sequence[int]
    ranks: int
    contexts: Sequence[int]
    room: Room
    cost: Cost

    def plan(self, num_waves: int, hurry: bool) -> StepPlan:
        """About so many waves: fewer when one holds all that is left, more when the room demands it.

        ``hurry``: share a document by more ranks than it needs where it would otherwise outlast the even share.
        """
        pool = self._ascending
        left = sum(self._tables[self.contexts[0]][1])
        waves: list[Wave] = []
        while pool or not waves:
            longest = pool[-1][0] if pool else 0
            share = left * self.contexts[0] / self.ranks / max(num_waves - len(waves), 1)
            context = self._context_for(longest, share if hurry else inf)
            groups = self._all_at_once(pool, context) if len(waves) + 1 >= num_waves else None
            if groups is None:
                groups, pool = self._fill(pool, context, max(share, self.cost.of_document(longest, context)))
            else:
                pool = []
            left -= sum(self._time(group, self.contexts[0]) for group in groups)
            # Serpentine: who works longest in one wave does so least in the next.
            groups.sort(key=lambda group: (-self._time(group, context), group), reverse=bool(len(waves) % 2))
            waves.append(Wave(context, tuple(groups)))
        return StepPlan(tuple(waves))

    @cached_property
    def _ascending(self) -> list[tuple[int, int]]:
        return sorted((length, i) for i, length in enumerate(self.lengths))

    @cached_property
    def _tables(self) -> dict[int, tuple[list[int], list[float]]]:
        """By context: what every document takes of the room, and of the time."""
        return {
            context: (
                [self.room.size(length, context) for length in self.lengths],
                [self.cost.of_document(length, context) for length in self.lengths],
            )
            for context in self.contexts
        }

    def _context_for(self, longest: int, share: float) -> int:
        """The fewest ranks that hold the longest document and finish it within the share; if none do, all ranks."""
        able = [context for context in self.contexts if self.room.size(longest, context) <= self.room.tokens]
        return next((c for c in able if self.cost.of_document(longest, c) <= share), able[-1])

    def _fill(
        self, pool: Sequence[tuple[int, int]], context: int, time: float
    ) -> tuple[list[Bin], list[tuple[int, int]]]:
        """The groups of one wave that lasts so long, and who is left."""
        rest = list(pool)
        groups = [self._fill_group(rest, context, time) for _ in range(self.ranks // context)]
        taken = [i for group in groups for i in group]
        even = self._all_at_once(sorted((self.lengths[i], i) for i in taken), context)
        slowest = max(self._time(group, context) for group in groups)
        if even is not None and max(self._time(group, context) for group in even) < slowest:
            groups = even
        return groups, rest

    def _fill_group(self, pool: list[tuple[int, int]], context: int, time: float) -> Bin:
        """Take from the pool the longest document that fits, again and again."""
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

    def _all_at_once(self, pool: Sequence[tuple[int, int]], context: int) -> list[Bin] | None:
        sizes, work = self._tables[context]
        order = [i for _, i in reversed(pool)]
        return evenly(order, sizes, work, self.room.tokens, self.ranks // context)

    def _time(self, group: Bin, context: int) -> float:
        work = self._tables[context][1]
        return sum(work[i] for i in group)
