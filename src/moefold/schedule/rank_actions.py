"""What schedules share when they write down one rank's actions: the V's two stages, and pairs that overlap.

While one microbatch is in dispatch or combine, another can be computed. The forward of one and the backward of another
fit well: they need different directions of the pipeline and touch no common value. Pairs are formed where an order
already puts a forward right before a backward, so a schedule that wants pairs arranges its warm-up accordingly. The
warm-up itself stays as it is: other ranks wait for its forwards, and a pair would delay them until the first gradient.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from moefold.schedule.actions import PRODUCES_GRADIENT, Action, Kind, Order, overlap


class RankActions:
    """The ``actions`` of a rank with two stages, 0 and 1; each computation takes the next microbatch of its stage."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._taken: Counter[tuple[Kind, int]] = Counter()
        self._deferred: deque[Action] = deque()

    def forward(self, which: int) -> None:
        self.actions.append(self._next(Kind.FORWARD, which))

    def backward(self, which: int) -> None:
        self.actions.append(self._next(Kind.BACKWARD, which))

    def input_gradient(self, which: int) -> None:
        """Defers the weight gradient."""
        action = self._next(Kind.BACKWARD_INPUT, which)
        self.actions.append(action)
        self._deferred.append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch))

    def weight_gradient(self, which: int | None = None) -> None:
        """The one deferred longest, of stage ``which`` or of either."""
        for action in self._deferred:
            if which is None or action.stage == self._stages[which]:
                self._deferred.remove(action)
                self.actions.append(action)
                return

    def overlap(self, forward: int, backward: int) -> None:
        self.actions.append(overlap(self._next(Kind.FORWARD, forward), self._next(Kind.BACKWARD, backward)))

    def num_forwards(self, which: int) -> int:
        return self._taken[Kind.FORWARD, which]

    def _next(self, kind: Kind, which: int) -> Action:
        # Whole backwards and input gradients share one count.
        row = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
        microbatch = self._taken[row, which]
        self._taken[row, which] += 1
        return Action(kind, self._stages[which], microbatch)


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
    return next((at for at, action in enumerate(actions) if action.kind in PRODUCES_GRADIENT), len(actions))


def independent(forward: Action, backward: Action) -> bool:
    """A backward waits for all forwards of its own microbatch, and for no other's."""
    return (
        forward.kind is Kind.FORWARD
        and backward.kind in PRODUCES_GRADIENT
        and forward.microbatch != backward.microbatch
    )


def _paired(actions: Sequence[Action]) -> list[Action]:
    paired: list[Action] = []
    for action in actions:
        if paired and independent(paired[-1], action):
            paired[-1] = overlap(paired[-1], action)
        else:
            paired.append(action)
    return paired
