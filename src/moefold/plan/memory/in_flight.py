"""Microbatches in flight: how many of each of its stages a pipeline rank holds when it holds most.

A rank keeps the activations of a (stage, microbatch) from its forward until its backward is done. The order says how
many those are, and of which stages: with several virtual stages per rank more microbatches of the early stages are in
flight than of the late ones, and stages differ in size. So the result for a rank is a list of **moments**: how many
microbatches of each of its stages it holds, at every time that is not dominated by another. Where a schedule splits
backwards, those whose input gradient is done and whose weight gradients wait are counted apart, behind the others: they
hold inputs and output gradients of matmuls, and nothing else.

Walking an order is exact for every schedule (`moments_reference`). 1F1B, interleaved and both with overlapped dispatch,
which a search asks for by the hundred, have a closed form: ranks forward `warm_up` times and then alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

from moefold.schedule.actions import Action, Kind
from moefold.schedule.names import SCHEDULES
from moefold.topology.folded_layout import shard_sizes

# Microbatches held of each of the rank's stages, in the model's order; then, of each, those with deferred gradients.
Moment = tuple[int, ...]
# Orders are periodic once the pipeline is full, so longer ones hold no more.
_ENOUGH_ROUNDS = 3
# Schedules with a closed form, and by how many forwards the warm-up of the last rank exceeds all laps but its last.
_CLOSED = {"1f1b": 0, "interleaved": 0, "1f1b_overlapped": 1, "interleaved_overlapped": 1}


@lru_cache(maxsize=4096)
def moments(schedule: str, ranks: int, virtual: int, microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    """The fullest moments of every rank."""
    if schedule not in _CLOSED:
        most = microbatches if schedule == "gpipe" else _enough(ranks * virtual, ranks, microbatches)
        return moments_reference(schedule, ranks, virtual, most)
    microbatches, extra = _enough(ranks, ranks, microbatches), _CLOSED[schedule]
    hops = 1 if schedule == "1f1b" and virtual == 1 else 2
    return tuple(
        _fullest(_alternating(hops * (ranks - 1 - rank) + extra, ranks, virtual, microbatches, extra > 0), virtual)
        for rank in range(ranks)
    )


def moments_reference(schedule: str, ranks: int, virtual: int, microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    """The same of any schedule, by walking its order."""
    order = SCHEDULES[schedule].build(ranks, virtual, microbatches)
    counts = 2 * virtual if SCHEDULES[schedule].splits_backward else virtual
    return tuple(
        _fullest(_changes(actions, order.stages_of(rank)), counts) for rank, actions in enumerate(order.actions)
    )


def _enough(stages: int, ranks: int, microbatches: int) -> int:
    """Fewer microbatches with the same moments. Uneven rounds differ all along the order: those keep all of them."""
    return min(microbatches, _ENOUGH_ROUNDS * stages) if microbatches % ranks == 0 else microbatches


def _changes(actions: Iterable[Action], stages: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(which count, +1 or -1) in the order's own sequence.

    The two of a pair run layer by layer in turn, the backward first, so that one frees what the other fills.
    """
    for action in actions:
        for part in action.parts:
            if part.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                yield stages.index(part.stage), -1
            if part.kind is Kind.BACKWARD_INPUT:
                yield len(stages) + stages.index(part.stage), 1
            if part.kind is Kind.BACKWARD_WEIGHT:
                yield len(stages) + stages.index(part.stage), -1
        for part in action.parts:
            if part.kind is Kind.FORWARD:
                yield stages.index(part.stage), 1


def _alternating(ahead: int, ranks: int, virtual: int, microbatches: int, overlaps: bool) -> Iterator[tuple[int, int]]:
    """The same for 1F1B and interleaved: `ahead` forwards more than all laps but the last, then one by one by turns."""
    rounds = shard_sizes(microbatches, max(1, microbatches // ranks))
    warm_up = min(rounds[0] * (virtual - 1) + ahead, virtual * microbatches)
    forwards = _laps(rounds, range(virtual))
    backwards = _laps(rounds, range(virtual - 1, -1, -1))
    yield from ((lap, 1) for lap, _ in forwards[:warm_up])
    for (forth, its), (back, other) in zip(forwards[warm_up:], backwards):
        if overlaps and its != other:
            yield back, -1
            yield forth, 1
        else:
            yield forth, 1
            yield back, -1
    yield from ((lap, -1) for lap, _ in backwards[len(forwards) - warm_up :])


def _laps(rounds: tuple[int, ...], virtual_stages: range) -> list[tuple[int, int]]:
    """(which of a rank's stages, microbatch) in turn."""
    starts = accumulate(rounds, initial=0)
    return [(lap, first + one) for size, first in zip(rounds, starts) for lap in virtual_stages for one in range(size)]


def _fullest(changes: Iterable[tuple[int, int]], counts: int) -> tuple[Moment, ...]:
    """Moments that no other moment matches or exceeds in every stage."""
    held = [0] * counts
    seen: set[Moment] = set()
    grew = False
    for which, change in changes:
        if grew and change < 0:
            seen.add(tuple(held))
        grew = change > 0
        held[which] += change
    if grew:
        seen.add(tuple(held))
    # Only a larger total can outdo a moment; in 1F1B nearly all have the same.
    most = max(map(sum, seen), default=0)
    full = [one for one in seen if sum(one) == most]
    for one in sorted(seen.difference(full), key=sum, reverse=True):
        if not any(all(mine <= theirs for mine, theirs in zip(one, other)) for other in full):
            full.append(one)
    return tuple(sorted(full, reverse=True))
