"""Which forwards and backwards run side by side.

While one microbatch's tokens travel to their experts, another's can be computed. The forward of one and the backward of
another fit well: they need different directions of the pipeline and touch no common value. Pairs are formed where an
order already puts a forward right before a backward, so an order that wants pairs arranges its warm-up accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moefold.schedule.actions import GIVES_GRADIENT, Action, Kind, Order, overlap


def pair_overlaps(order: Order) -> Order:
    """Every forward that is followed by the backward of another microbatch becomes an OVERLAP with it."""
    return replace(order, actions=tuple(tuple(_paired(actions)) for actions in order.actions))


def independent(forward: Action, backward: Action) -> bool:
    """A backward waits for all forwards of its own microbatch, and for no other's."""
    return (
        forward.kind is Kind.FORWARD and backward.kind in GIVES_GRADIENT and forward.microbatch != backward.microbatch
    )


def _paired(actions: Sequence[Action]) -> list[Action]:
    paired: list[Action] = []
    for action in actions:
        if paired and independent(paired[-1], action):
            paired[-1] = overlap(paired[-1], action)
        else:
            paired.append(action)
    return paired
