"""How to cut a row of costs into consecutive parts so that the most expensive part is as cheap as possible.

A pipeline is as slow as its slowest stage, so the first goal is the smallest maximum, which is found exactly. Second:
where the end of the row alone sets that maximum (a head over a large vocabulary), the other parts must not grow to it.
Third: the remaining freedom makes parts as equal as possible. The first cost stays in the first part and the last in
the last, for that is where the embedding and the loss belong; parts between them may be empty.

"Is a limit enough?" is answered by filling each part up to it, and halving finds the least limit that is. Costs become
whole numbers first, so every comparison is exact. Nothing here takes parts times costs steps.

    costs 1 5 1 1 1 4 over 3 parts      1 5 | 1 1 1 | 4      largest 6
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Where each part but the first begins: `parts - 1` indices into `costs`, never falling."""
    if parts < 1 or len(costs) < 2:
        raise ValueError(f"{len(costs)} costs over {parts} parts: needs two costs and one part or more")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"a cost of {min(costs)}: costs cannot be negative")
    if parts == 1:
        return []
    sums = (0, *accumulate(_whole_numbers(costs)))
    limit = _least(lambda limit: _fits(sums, parts, limit, limit), sums[-1])
    # The last part may cost the limit; the others may need less.
    others = _least(lambda smaller: _fits(sums, parts, smaller, limit), limit)
    return _spread(sums, parts, others, limit)


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The same costs in units of the finest fraction among them; a float is always a whole number of such."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    finest = max(denominator for _, denominator in ratios)
    return [numerator * (finest // denominator) for numerator, denominator in ratios]


def _least(enough: Callable[[int], bool], known: int) -> int:
    """The smallest number that is enough, at most `known`, which is."""
    low, high = 0, known
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def _fits(sums: Sequence[int], parts: int, limit: int, last: int) -> bool:
    """Whether every part but the last can stay within `limit`, and the last within `last`."""
    start = 0
    for _ in range(parts - 1):
        stop = _end_when_filled(sums, start, limit)
        if stop == start:
            break
        start = stop
    return start > 0 and sums[-1] - sums[start] <= last


def _end_when_filled(sums: Sequence[int], start: int, limit: int) -> int:
    """The farthest end of a part that begins at `start`; the last cost is left for the last part."""
    return bisect_right(sums, sums[start] + limit, start, len(sums) - 1) - 1


def _spread(sums: Sequence[int], parts: int, limit: int, last: int) -> list[int]:
    """Cuts within the limits, each as near as they allow to an even share of what is left to share."""
    earliest = _earliest_cuts(sums, parts, limit, last)
    # A last part that costs more than all others is no measure for them: they divide what comes before it.
    shared, takers = (sums[-1], parts) if limit == last else (sums[earliest[-1]], parts - 1)
    cuts: list[int] = []
    start = 0
    for part, low in enumerate(earliest):
        wanted = sums[start] + (shared - sums[start]) // (takers - part)
        start = max(low, start, min(_nearest(sums, wanted), _end_when_filled(sums, start, limit)))
        cuts.append(start)
    return cuts


def _earliest_cuts(sums: Sequence[int], parts: int, limit: int, last: int) -> list[int]:
    """For each cut the smallest index from which the rest still fits: parts filled from the back."""
    cuts, bound, stop = [0] * (parts - 1), last, len(sums) - 1
    for part in reversed(range(parts - 1)):
        start = bisect_left(sums, sums[stop] - bound, 0, stop)
        cuts[part] = stop = min(max(start, 1), len(sums) - 2)
        bound = limit
    return cuts


def _nearest(sums: Sequence[int], wanted: int) -> int:
    above = bisect_left(sums, wanted, 0, len(sums) - 1)
    return above - 1 if above > 0 and wanted - sums[above - 1] <= sums[above] - wanted else above
