"""Which groups stay inside an NVLink domain, and how many domains the others span.

Rank r is in domain r // size. A group is a first rank plus fixed offsets, so the domains it touches depend only on the
first rank modulo the domain. It is therefore enough to know how many groups start at each such offset, and that follows
from the strides of the axes the group does not use: exact for any world, with work that does not grow with the number
of groups. A domain size that does not divide the world (72 and a power of two) needs no special case.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd

from moefold.topology.folded_layout import FoldedLayout, Grid, GroupSpec


@dataclass(frozen=True)
class Locality:
    """How the groups of one kind lie over domains of one size."""

    domain: int
    num_groups: int
    # Groups whose ranks are not all in one domain.
    num_leaving: int
    # Domains touched by a group: by the one that touches least and by the one that touches most.
    fewest_domains: int
    most_domains: int


def locality(layout: FoldedLayout, spec: GroupSpec, domain: int) -> Locality:
    """Over all groups of this kind, how many leave a domain of `domain` consecutive ranks."""
    grid = layout.grid_of(spec)
    offsets = grid.offsets(spec.axes)
    others = tuple(name for name, _ in grid.axes if name not in spec.axes)
    starts = _groups_by_start(grid, others, domain)
    spans = {start: len({(start + offset) // domain for offset in offsets}) for start in starts}
    return Locality(
        domain=domain,
        num_groups=sum(starts.values()),
        num_leaving=sum(count for start, count in starts.items() if spans[start] > 1),
        fewest_domains=min(spans.values()),
        most_domains=max(spans.values()),
    )


def _groups_by_start(grid: Grid, axes: tuple[str, ...], domain: int) -> Counter[int]:
    """First rank modulo the domain -> how many groups start there."""
    starts = Counter({0: 1})
    for axis in axes:
        steps = _multiples(grid.size(axis), grid.stride(axis), domain)
        added: Counter[int] = Counter()
        for start, groups in starts.items():
            for step, times in steps.items():
                added[(start + step) % domain] += groups * times
        starts = added
    return starts


def _multiples(count: int, stride: int, domain: int) -> dict[int, int]:
    """How often each remainder occurs among the first `count` multiples of `stride`; they repeat soon."""
    period = domain // gcd(stride, domain)
    rounds, rest = divmod(count, period)
    return {i * stride % domain: rounds + (i < rest) for i in range(min(period, count))}
