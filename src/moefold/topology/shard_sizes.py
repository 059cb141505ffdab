"""Sizes of contiguous shards when the total does not divide evenly."""

from __future__ import annotations

from itertools import accumulate


def shard_sizes(total: int, num_shards: int) -> tuple[int, ...]:
    """Sizes that differ by at most one; the first ones are the larger."""
    base, extra = divmod(total, num_shards)
    return tuple(base + (i < extra) for i in range(num_shards))


def shard_starts(total: int, num_shards: int) -> tuple[int, ...]:
    return (0, *accumulate(shard_sizes(total, num_shards)))[:-1]
