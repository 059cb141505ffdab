"""GPipe and 1F1B, one stage per rank.

**GPipe**: all forwards, then all backwards. The simplest order. Every rank holds the activations of all microbatches at
once, which is why 1F1B replaced it; its bubble is the same.

    rank 0   F0 F1 F2 F3                   B0 .. B1 .. B2 .. B3 ..
    rank 1      F0 F1 F2 F3          B0 .. B1 .. B2 .. B3 ..
    rank 2         F0 F1 F2 F3 B0 .. B1 .. B2 .. B3 ..

**1F1B**: each rank runs forwards until the pipeline is full, then alternates one forward and one backward, then drains.

    rank 0   F0 F1 F2                B0 .. F3 B1 .. F4 B2 .. ...
    rank 1      F0 F1          B0 .. F2 B1 .. F3 B2 ..
    rank 2         F0 B0 .. F1 B1 .. F2 B2 .. F3 B3 ..

The bubble is GPipe's, but rank r holds at most P - r microbatches, however many there are.

**Overlapped.** To run a forward beside a backward, the two must be of different microbatches. On the last rank of 1F1B
they never are: B3 waits for F3. One more microbatch in the warm-up of every rank makes them so: F4 runs beside B3.
That alone would be correct and slow: a pair has both its results at its end, so ranks r and r + 1 would wait for each
other alternately. With a second microbatch per rank (rank r warms up with 2 (P - 1 - r) + 1 forwards) the pairs of
all ranks run at the same time. The price is memory: rank 0 holds 2P instead of P microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from moefold.schedule.actions import Action, Kind, Order, make_order
from moefold.schedule.rank_actions import pair_overlaps


def one_f_one_b(ranks: int, microbatches: int) -> Order:
    """One stage per rank."""
    warm_ups = [min(ranks - 1 - rank, microbatches) for rank in range(ranks)]
    return _order("1f1b", warm_ups, microbatches)


def one_f_one_b_overlapped(ranks: int, microbatches: int) -> Order:
    """With warm-ups long enough that every forward after them runs beside the backward of another microbatch."""
    warm_ups = [min(2 * (ranks - 1 - rank) + 1, microbatches) for rank in range(ranks)]
    return pair_overlaps(_order("1f1b_overlapped", warm_ups, microbatches), warm_ups)


def _order(name: str, warm_ups: Sequence[int], microbatches: int) -> Order:
    actions = [_rank_actions(rank, warm_up, microbatches) for rank, warm_up in enumerate(warm_ups)]
    return make_order(name, len(warm_ups), 1, microbatches, actions, "loop")


def _rank_actions(stage: int, warm_up: int, microbatches: int) -> list[Action]:
    actions = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            actions.append(Action(Kind.FORWARD, stage, microbatch + warm_up))
        actions.append(Action(Kind.BACKWARD, stage, microbatch))
    return actions


def gpipe(ranks: int, microbatches: int) -> Order:
    """One stage per rank."""
    actions = [
        [Action(kind, rank, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(microbatches)]
        for rank in range(ranks)
    ]
    return make_order("gpipe", ranks, 1, microbatches, actions, "loop")
