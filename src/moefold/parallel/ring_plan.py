"""Which keys travel at each step of ring attention, computed from the lengths of the documents alone.

Ranks that share documents form a ring of *members*; a member is one rank, or several consecutive ranks that have
all-to-all'ed heads and so hold each other's tokens. At step s of c, member i reads the keys of member i - s, and member
i + s reads those of i. Every rank computes both sides without communication, and only the rows that will be read are
sent: with zigzag chunks a later member needs the early half of an earlier one's keys, and a window needs few rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from moefold.attention.mask_blocks import Block, Run, blocks, chunk_runs, stacks
from moefold.attention.packed_mask import PackedMask
from moefold.batching.zigzag import Span, chunks, chunks_of

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class RingStep:
    """The transfer and the attention blocks at one distance around the ring."""

    distance: int
    # This member's rows that the member at ``distance`` after it will read.
    sent_spans: tuple[Span, ...]
    # How many rows come from the member at ``distance`` before it, and which of them each query sees.
    num_received: int
    mask: PackedMask

    @property
    def num_sent(self) -> int:
        return sum(stop - start for start, stop in self.sent_spans)


@lru_cache(maxsize=128)
def ring_steps(
    lengths: Lengths, size: int, inner: int, member: int, window: int | None, chunk: int | None = None
) -> tuple[RingStep, ...]:
    """The steps of a ring member, its own keys first; ``inner`` of ``size`` ranks make one member."""
    members = size // inner
    runs_of_member = [token_runs(lengths, range(i * inner, (i + 1) * inner), size) for i in range(members)]
    runs_of_member = [chunk_runs(runs, lengths, chunk) for runs in runs_of_member]
    mine = runs_of_member[member]
    own = RingStep(0, (), 0, PackedMask(mine, mine, window, stacks(blocks(mine, mine, window))))
    return own, *(_step(runs_of_member, member, distance, window) for distance in range(1, members))


def token_runs(lengths: Lengths, ranks: Iterable[int], size: int) -> tuple[Run, ...]:
    """The tokens of these ranks together, ascending; adjacent chunks are joined into one run."""
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


def _step(runs_of_member: list[tuple[Run, ...]], member: int, distance: int, window: int | None) -> RingStep:
    on, behind = (
        runs_of_member[(member + distance) % len(runs_of_member)],
        runs_of_member[(member - distance) % len(runs_of_member)],
    )
    mine = runs_of_member[member]
    seen = blocks(mine, behind, window)
    arriving = _key_spans(seen)
    return RingStep(
        distance,
        _key_spans(blocks(on, mine, window)),
        sum(stop - start for start, stop in arriving),
        PackedMask(mine, _runs_within(behind, arriving), window, stacks(_reindex_keys(seen, arriving))),
    )


def _runs_within(runs: Iterable[Run], spans: tuple[Span, ...]) -> tuple[Run, ...]:
    """The parts of the runs whose rows are in the spans, with rows counted in the received tensor."""
    stops = [stop for _, stop in spans]
    found: list[Run] = []
    row = 0
    for run in runs:
        end = run.row + run.stop - run.start
        for start, stop in spans[bisect_right(stops, run.row) :]:
            if start >= end:
                break
            first, last = max(start, run.row), min(stop, end)
            found.append(Run(run.document, run.start + first - run.row, run.start + last - run.row, row))
            row += last - first
    return tuple(found)


def _key_spans(seen: Iterable[Block]) -> tuple[Span, ...]:
    """The rows of keys that occur in some block, as few ascending spans."""
    spans: list[Span] = []
    for start, stop in sorted((block.k_row, block.k_row + block.num_k) for block in seen):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return tuple(spans)


def _reindex_keys(seen: Iterable[Block], spans: tuple[Span, ...]) -> list[Block]:
    """The same blocks, with key rows counted in the received tensor, which has only these spans."""
    starts = [start for start, _ in spans]
    before = [0]
    for start, stop in spans:
        before.append(before[-1] + stop - start)
    moved = []
    for block in seen:
        at = bisect_right(starts, block.k_row) - 1
        moved.append(block._replace(k_row=block.k_row - starts[at] + before[at]))
    return moved
