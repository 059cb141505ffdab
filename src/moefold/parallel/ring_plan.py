"""Who reads whose keys under context parallelism, worked out from the lengths of the documents alone.

Ranks that share documents form a circle of *members*; a member is one rank, or a set of neighbouring ranks that have
pooled their tokens. At step s of c, member i reads from member i - s and is read by member i + s. Every rank can work
out both sides, so nobody has to ask, and only the rows that will be read travel: with zigzag chunks a later member
needs the early half of an earlier one's keys, and a window needs next to nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from moefold.attention.mask_blocks import Block, Run, Stack, blocks, stacks
from moefold.batching.zigzag import Span, chunks, chunks_of

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """What happens at one distance around the circle."""

    places: int
    # Of my rows: those that the member this many places on will read.
    sent: tuple[Span, ...]
    # How many rows come from the member as far behind, and what my queries see of them.
    num_arriving: int
    stacks: tuple[Stack, ...]

    @property
    def num_sent(self) -> int:
        return sum(stop - start for start, stop in self.sent)


@lru_cache(maxsize=128)
def around(lengths: Lengths, size: int, inner: int, member: int, window: int | None) -> tuple[Step, ...]:
    """The steps of a member of the circle, its own keys first; ``inner`` of ``size`` ranks make one member."""
    members = size // inner
    held = [held_runs(lengths, range(i * inner, (i + 1) * inner), size) for i in range(members)]
    own = Step(0, (), 0, stacks(blocks(held[member], held[member], window)))
    return own, *(_step(held, member, places, window) for places in range(1, members))


def held_runs(lengths: Lengths, ranks: Iterable[int], size: int) -> tuple[Run, ...]:
    """The tokens of these ranks together, ascending; chunks that touch are one run."""
    numbers = sorted(number for rank in ranks for number in chunks_of(rank, size))
    pieces = {length: chunks(length, size) for length in set(lengths)}
    runs: list[Run] = []
    row = 0
    for document, length in enumerate(lengths):
        for number in numbers:
            start, stop = pieces[length][number]
            if start == stop:
                continue
            if runs and runs[-1].document == document and runs[-1].stop == start:
                runs[-1] = runs[-1]._replace(stop=stop)
            else:
                runs.append(Run(document, start, stop, row))
            row += stop - start
    return tuple(runs)


def _step(held: list[tuple[Run, ...]], member: int, places: int, window: int | None) -> Step:
    on, behind = held[(member + places) % len(held)], held[(member - places) % len(held)]
    seen = blocks(held[member], behind, window)
    arriving = _rows_read(seen)
    return Step(
        places,
        _rows_read(blocks(on, held[member], window)),
        sum(stop - start for start, stop in arriving),
        stacks(_as_sent(seen, arriving)),
    )


def _rows_read(seen: Iterable[Block]) -> tuple[Span, ...]:
    """The rows of keys that occur in some block, as few ascending spans."""
    spans: list[Span] = []
    for start, stop in sorted((block.k_row, block.k_row + block.num_k) for block in seen):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return tuple(spans)


def _as_sent(seen: Iterable[Block], spans: tuple[Span, ...]) -> list[Block]:
    """The same blocks, over keys of which only these spans are there."""
    starts = [start for start, _ in spans]
    before = [0]
    for start, stop in spans:
        before.append(before[-1] + stop - start)
    moved = []
    for block in seen:
        at = bisect_right(starts, block.k_row) - 1
        moved.append(block._replace(k_row=block.k_row - starts[at] + before[at]))
    return moved
