"""Two ways to put things of given sizes into bins, and a way to deal bins to ranks.

*First fit* puts each thing into the first bin with room and so needs few bins. *Evenly* puts each into the bin with
least work, and so makes bins alike, if there are enough of them. Both want the largest first. *Serpentine*:

    work            9 8 7 6 5 4 3 2 1            over 3 ranks
    wave 0          9 8 7
    wave 1          4 5 6                        a wave's bins are alike,
    wave 2          3 2 1                        and so are the ranks' sums
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Bin = tuple[int, ...]


def first_fit(order: Sequence[int], sizes: Sequence[int], bound: int) -> list[Bin]:
    """Each thing in the first bin that has room.

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
    """Each thing in the bin with least work among those with room; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [bound] * num_bins
    least = [(0.0, number) for number in range(num_bins)]
    smallest = min((sizes[i] for i in order), default=0)
    for i in order:
        passed = []
        while least and room[least[0][1]] < sizes[i]:
            candidate = heapq.heappop(least)
            # A bin that takes not even the smallest is never asked again.
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


def serpentine(bins: Sequence[Bin], ways: int, work: Sequence[float]) -> list[tuple[Bin, ...]]:
    """Bins by falling work, `ways` to a wave, every second wave backwards; empty bins fill up the last."""
    ordered = sorted(bins, key=lambda bin: (-sum(work[i] for i in bin), bin))
    waves = [tuple(ordered[start : start + ways]) for start in range(0, len(ordered), ways)] or [()]
    waves[-1] += ((),) * (ways - len(waves[-1]))
    return [wave[::-1] if number % 2 else wave for number, wave in enumerate(waves)]
