"""GPipe: all forwards, then all backwards.

    rank 0   F0 F1 F2 F3                   B0 .. B1 .. B2 .. B3 ..
    rank 1      F0 F1 F2 F3          B0 .. B1 .. B2 .. B3 ..
    rank 2         F0 F1 F2 F3 B0 .. B1 .. B2 .. B3 ..

The simplest order. Every rank holds the activations of all microbatches at once, which is why 1F1B replaced it; its
bubble is the same.
"""

from __future__ import annotations

from moefold.schedule.actions import Action, Kind, Order, make_order


def gpipe(ranks: int, microbatches: int) -> Order:
    """One stage per rank."""
    actions = [
        [Action(kind, rank, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(microbatches)]
        for rank in range(ranks)
    ]
    return make_order("gpipe", ranks, 1, microbatches, actions, "loop")
