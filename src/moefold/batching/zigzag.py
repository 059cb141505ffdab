"""Which tokens of a microbatch a context-parallel rank holds.

In causal attention a late token attends to more keys than an early one, so contiguous shards would be unequal work.
Every document is cut into 2c chunks for c ranks, and rank i takes chunk i from the front and chunk i from the back: all
ranks then have about equal work. Chunks differ by at most one token and may be empty, so no document needs padding,
however short it is.

    a document of 11 tokens over 2 ranks      0 0 0 1 1 1 1 1 1 0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from moefold.topology.folded_layout import shard_sizes

Span = tuple[int, int]


def chunks(length: int, size: int) -> tuple[Span, ...]:
    """The 2 * size pieces of one document, as (start, stop)."""
    ends = tuple(accumulate(shard_sizes(length, 2 * size)))
    return tuple(zip((0, *ends[:-1]), ends))


def chunks_of(index: int, size: int) -> tuple[int, int]:
    """The numbers of the early and the late chunk that rank ``index`` holds."""
    return index, 2 * size - 1 - index


def held_spans(lengths: Sequence[int], index: int, size: int) -> tuple[Span, ...]:
    """The spans of the microbatch that rank ``index`` holds, ascending; empty ones are left out."""
    if size == 1:
        return ((0, sum(lengths)),)
    held: list[Span] = []
    first = 0
    for length in lengths:
        pieces = chunks(length, size)
        held += [(first + pieces[number][0], first + pieces[number][1]) for number in chunks_of(index, size)]
        first += length
    return tuple((start, stop) for start, stop in held if start < stop)


def num_held(lengths: Sequence[int], index: int, size: int) -> int:
    """How many tokens that is."""
    return sum(stop - start for start, stop in held_spans(lengths, index, size))
