"""Writes down one rank's actions where a rank takes the microbatches of each stage in order, as V-shaped orders do."""

from __future__ import annotations

from collections import Counter, deque

from moefold.schedule.actions import Action, Kind, overlap


class Tally:
    """The ``actions`` so far. A computation takes the next microbatch of its stage; 0 and 1 name the rank's two."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._taken: Counter[tuple[Kind, int]] = Counter()
        self._put_off: deque[Action] = deque()

    def forward(self, which: int) -> None:
        self.actions.append(self._next(Kind.FORWARD, which))

    def backward(self, which: int) -> None:
        self.actions.append(self._next(Kind.BACKWARD, which))

    def input_gradient(self, which: int) -> None:
        """And puts off the weight gradient."""
        action = self._next(Kind.BACKWARD_INPUT, which)
        self.actions.append(action)
        self._put_off.append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch))

    def weight_gradient(self, which: int | None = None) -> None:
        """The longest put off, of stage ``which`` or of either."""
        for action in self._put_off:
            if which is None or action.stage == self._stages[which]:
                self._put_off.remove(action)
                self.actions.append(action)
                return

    def overlap(self, forward: int, backward: int) -> None:
        self.actions.append(overlap(self._next(Kind.FORWARD, forward), self._next(Kind.BACKWARD, backward)))

    def num_forwards(self, which: int) -> int:
        return self._taken[Kind.FORWARD, which]

    def _next(self, kind: Kind, which: int) -> Action:
        # Whole backwards and input gradients take from the same row.
        row = Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
        microbatch = self._taken[row, which]
        self._taken[row, which] += 1
        return Action(kind, self._stages[which], microbatch)
