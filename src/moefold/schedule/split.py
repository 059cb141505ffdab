"""Splits backwards: the input gradient at once, the weight gradient when there is time for it.

The stage before waits for the input gradient, nobody waits for the weight gradient. So B becomes I, and its W is put
off until one of these:

- the rank would wait for its next input longer than a W takes: the bubble is used;
- the next action is a forward, and the rank already holds as many microbatches as it may: memory is given back first;
- nothing else is left.

After an OVERLAP the W comes at once: it needs no message, so it keeps the rank busy while those of the pair are still
on their way.

Split like this, 1F1B becomes ZB-H1, action for action, and other orders gain as much: a third of the bubble is left
where nothing overlaps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from moefold.schedule.actions import Action, Kind, Order, overlap
from moefold.schedule.replay import Rules, replay
from moefold.schedule.simulate import Durations, peak_live


def split_backward(order: Order, durations: Durations | None = None, max_live: int | None = None) -> Order:
    """Every BACKWARD in two. ``durations`` say where the bubbles are.

    ``max_live`` bounds the (stage, microbatch) pairs that a rank holds; unless given, to what the fullest rank of the
    order held before.
    """
    assert not order.has_transfers, "backwards are split before transfers are added"
    if max_live is None:
        max_live = max(map(peak_live, order.actions))
    durations = durations or Durations()
    ranks = [_Rank(durations, max_live) for _ in order.actions]
    # A whole backward and an input gradient need and give the same, so the order unfolds as it stands.
    stuck = replay(
        Rules(order),
        order.actions,
        lambda rank, action, arrival: ranks[rank].carry(action, arrival),
        durations.send,
    )
    assert not stuck, f"{order.name} never finishes: {stuck[0]}"
    return replace(order, actions=tuple(tuple(rank.finish()) for rank in ranks))


class _Rank:
    """One rank's actions so far, its clock, and the weight gradients that it has put off."""

    def __init__(self, durations: Durations, max_live: int) -> None:
        self._durations = durations
        self._max_live = max_live
        self._clock = 0.0
        self._live = 0
        self._actions: list[Action] = []
        self._put_off: deque[Action] = deque()

    def carry(self, action: Action, arrival: float) -> float:
        """Does the next action of the old order, and before it the weight gradients whose time has come."""
        forwards = any(part.kind is Kind.FORWARD for part in action.parts)
        while self._put_off and (self._fits(self._put_off[0], arrival) or (forwards and self._live >= self._max_live)):
            self._do(self._put_off.popleft())
        self._clock = max(self._clock, arrival)
        if action.pair and action.pair[1].kind is Kind.BACKWARD:
            forward, backward = action.pair
            self._do(overlap(forward, _half(Kind.BACKWARD_INPUT, backward)))
            stop = self._clock
            self._do(_half(Kind.BACKWARD_WEIGHT, backward))
            return stop
        if action.kind is Kind.BACKWARD:
            self._do(_half(Kind.BACKWARD_INPUT, action))
            self._put_off.append(_half(Kind.BACKWARD_WEIGHT, action))
        else:
            self._do(action)
        return self._clock

    def finish(self) -> list[Action]:
        return self._actions + list(self._put_off)

    def _fits(self, action: Action, arrival: float) -> bool:
        # Sums of durations may differ in the last digit.
        return self._clock + self._durations.of(action) <= arrival * (1 + 1e-9)

    def _do(self, action: Action) -> None:
        self._actions.append(action)
        self._clock += self._durations.of(action)
        for part in action.parts:
            self._live += part.kind is Kind.FORWARD
            self._live -= part.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _half(kind: Kind, backward: Action) -> Action:
    return Action(kind, backward.stage, backward.microbatch)
