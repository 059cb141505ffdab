"""Which gradients are reduced in one collective. The step and the planner fill buckets by the same rule."""

from __future__ import annotations

from collections.abc import Mapping

MEBIBYTE = 1 << 20


def fill_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names from the smallest to the largest, in buckets of at most ``limit`` bytes; one that is larger has its own.

    >>> fill_buckets({"b": 3, "a": 4, "c": 9, "d": 1}, 8)
    [['d', 'b', 'a'], ['c']]
    """
    buckets: list[list[str]] = []
    held = 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if not buckets or held + sizes[name] > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(name)
        held += sizes[name]
    return buckets
