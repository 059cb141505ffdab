"""How ECHO spreads rows over ranks, without tensors: its rules in loops, and what they do to a skewed router.

The trainer's plan is made of tensors on the device (`moe/echo_plan.py`). ``planned_clones`` has the same rules, one
clone after the other, and is what that plan is tested against.

All that is known before a run is how many rows the busiest rank has over the mean. The planner takes the router whose
n-th most popular expert has popularity 1 / n^s, experts in an order of no meaning, with the s that gives this
imbalance, and clones by the rules. So it knows how busy the busiest rank still is, and how many clones its home sends.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import NamedTuple

# Rows of a rank, on average, in which loads are counted here.
_MEAN_ROWS = 10_000
_STEEPEST = 12.0


class EchoSizes(NamedTuple):
    """Experts, ranks that share them, and spare slots of each rank."""

    num_experts: int
    num_ranks: int
    slots: int

    @property
    def experts_each(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def places_each(self) -> int:
        return self.experts_each + self.slots

    @property
    def num_places(self) -> int:
        return self.num_ranks * self.places_each


class Clone(NamedTuple):
    """``slot``: among those of all ranks."""

    slot: int
    expert: int
    rows: int


class Cloned(NamedTuple):
    """Rows of the busiest rank over the mean with clones, the most clones that one rank sends, and all of them."""

    busiest: float
    most_sent: int
    clones: int


def planned_clones(rows: list[int], sizes: EchoSizes, min_rows: int = 1) -> list[Clone]:
    """Of the fullest rank its hottest expert is cloned on the emptiest rank with a free slot, for as many rows as bring
    the first of the two to the mean; and so on while that is worth it."""
    each, slots = sizes.experts_each, sizes.slots
    rows, ranks = list(rows), range(sizes.num_ranks)
    load = [sum(rows[rank * each : (rank + 1) * each]) for rank in ranks]
    mean, used, clones = -(-sum(rows) // sizes.num_ranks), [0 for _ in ranks], []
    while any(used[rank] < slots for rank in ranks):
        hot = max(ranks, key=lambda rank: load[rank])
        cold = min((rank for rank in ranks if used[rank] < slots), key=lambda rank: load[rank])
        expert = max(range(hot * each, (hot + 1) * each), key=lambda number: rows[number])
        spillover, spare = load[hot] - mean, mean - load[cold]
        moved = min(spillover, spare, rows[expert])
        if moved < min_rows:
            break
        clones.append(Clone(cold * slots + used[cold], expert, moved))
        rows[expert] -= moved
        load[hot] -= moved
        load[cold] += moved
        used[cold] += 1
    return clones


def loads_with(rows: list[int], clones: list[Clone], sizes: EchoSizes) -> list[int]:
    """Rows of each rank."""
    each = sizes.experts_each
    load = [sum(rows[rank * each : (rank + 1) * each]) for rank in range(sizes.num_ranks)]
    for clone in clones:
        load[clone.expert // each] -= clone.rows
        load[clone.slot // sizes.slots] += clone.rows
    return load


@lru_cache(maxsize=4096)
def cloned(sizes: EchoSizes, imbalance: float, min_share: float = 0.0) -> Cloned:
    """``imbalance``: without clones. ``min_share``: the fewest rows of a clone, over the mean rows of a rank."""
    if imbalance <= 1.0 or sizes.num_ranks == 1:
        return Cloned(imbalance, 0, 0)
    rows = skewed_rows(sizes, imbalance)
    clones = planned_clones(rows, sizes, max(1, round(min_share * _MEAN_ROWS)))
    sent = [clone.expert // sizes.experts_each for clone in clones]
    busiest = max(loads_with(rows, clones, sizes)) / _MEAN_ROWS
    # Popularities that are whole numbers of rows miss the imbalance by a little.
    return Cloned(min(busiest, imbalance), max((sent.count(rank) for rank in set(sent)), default=0), len(clones))


def skewed_rows(sizes: EchoSizes, imbalance: float) -> list[int]:
    """Rows of each expert, such that the busiest rank has so many times the mean, or as many as one rank can have."""
    low, high = 0.0, _STEEPEST
    for _ in range(40):
        middle = (low + high) / 2
        rows = _zipf_rows(sizes, middle)
        low, high = (middle, high) if max(loads_with(rows, [], sizes)) < imbalance * _MEAN_ROWS else (low, middle)
    return _zipf_rows(sizes, high)


def _zipf_rows(sizes: EchoSizes, exponent: float) -> list[int]:
    popularity = [(place + 1) ** -exponent for place in range(sizes.num_experts)]
    Random(7).shuffle(popularity)
    rows_each = _MEAN_ROWS * sizes.num_ranks / sum(popularity)
    return [round(rows_each * each) for each in popularity]
