"""How many things each of several takers gets, when the things need not divide evenly."""

from __future__ import annotations

from itertools import accumulate


def share_sizes(total: int, takers: int) -> tuple[int, ...]:
    """Contiguous shares whose sizes differ by at most one; the first ones are the larger."""
    base, extra = divmod(total, takers)
    return tuple(base + (i < extra) for i in range(takers))


def share_starts(total: int, takers: int) -> tuple[int, ...]:
    return (0, *accumulate(share_sizes(total, takers)))[:-1]
