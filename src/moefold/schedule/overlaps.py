"""Which forwards and backwards run side by side.

While one microbatch's tokens travel to their experts, another's can be computed. The forward of one and the backward of
another fit well: they need different directions of the pipeline and touch no common value. Pairs are formed where an
order already puts a forward right before a backward, so an order that wants pairs arranges its warm-up accordingly. The
warm-up itself stays as it is: others wait for its forwards, and a pair would hold them back until the first gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moefold.schedule.actions import GIVES_GRADIENT, Action, Kind, Order, overlap


def pair_overlaps(order: Order, warm_ups: Sequence[int] | None = None) -> Order:
    """Every forward that is followed by the backward of another microbatch becomes an OVERLAP with it.

    ``warm_ups`` are the numbers of actions at the start of each rank's list that stay alone; unless given, all before
    its first backward.
    """
    if warm_ups is None:
        warm_ups = [_first_backward(actions) for actions in order.actions]
    paired = [(*actions[:warm_up], *_paired(actions[warm_up:])) for actions, warm_up in zip(order.actions, warm_ups)]
    return replace(order, actions=tuple(paired))


def _first_backward(actions: Sequence[Action]) -> int:
    return next((at for at, action in enumerate(actions) if action.kind in GIVES_GRADIENT), len(actions))


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
