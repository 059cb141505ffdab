"""Simulates an order: how long it takes, where ranks idle and how many activations they hold, for given durations.

A rank starts an action as soon as it is free and the inputs have arrived; sends take the rank no time and arrive after
`send`. The result is exact for these assumptions, so it equals the closed forms of the papers where they exist: 1F1B
idles (P - 1) / (M + P - 1) of the time, interleaved 1F1B (P - 1) / (V M + P - 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moefold.schedule.actions import TRANSFERS, Action, Kind, Order
from moefold.schedule.replay import Dependencies, Stuck, replay

# One number for all stages, or one per stage.
PerStage = float | Sequence[float]
Span = tuple[float, float]


@dataclass(frozen=True)
class Durations:
    """In any unit of time."""

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    # From the end of a computation until its result is on the next rank.
    send: float = 0.0
    # An OVERLAP's time over the sum of its parts' times. Less than 1 is what is gained by hiding communication.
    overlap: float = 1.0

    def of(self, action: Action) -> float:
        """How long the rank is busy with it."""
        kind, stage = action.kind, action.stage
        if kind is Kind.FORWARD:
            return _at(self.forward, stage)
        if kind is Kind.BACKWARD:
            return _at(self.backward_input, stage) + _at(self.backward_weight, stage)
        if kind is Kind.BACKWARD_INPUT:
            return _at(self.backward_input, stage)
        if kind is Kind.BACKWARD_WEIGHT:
            return _at(self.backward_weight, stage)
        if action.pair:
            return self.overlap * (self.of(action.pair[0]) + self.of(action.pair[1]))
        return 0.0


def _at(duration: PerStage, stage: int) -> float:
    return float(duration) if isinstance(duration, int | float) else duration[stage]


@dataclass(frozen=True)
class Timeline:
    """An order in time. ``spans[rank][i]``: start and stop of that rank's i-th action; nan if it never ran."""

    order: Order
    spans: tuple[tuple[Span, ...], ...]
    # The last stop; infinite if ranks deadlock.
    finish: float
    busy: tuple[float, ...]
    # (stage, microbatch) pairs whose forward has begun and whose backward, weights included, has not ended: the most
    # that a rank holds at once. Each is the activations of one stage.
    peak_live: tuple[int, ...]
    # Ranks that never finish; empty in a valid order.
    stuck: tuple[Stuck, ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Each rank's idle fraction of the time until the last one finishes."""
        return tuple(1 - busy / self.finish if self.finish else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle fraction over all ranks."""
        return 1 - sum(self.busy) / (self.finish * len(self.busy)) if self.finish else 0.0


def simulate(order: Order, durations: Durations | None = None) -> Timeline:
    """With or without transfers; they take the same time."""
    durations = durations or Durations()
    clocks = [0.0] * order.num_ranks
    busy = [0.0] * order.num_ranks
    spans: list[list[Span]] = [[] for _ in range(order.num_ranks)]

    def run_action(rank: int, action: Action, arrival: float) -> float:
        if action.kind in TRANSFERS:
            # Takes no time, but a receive blocks its rank until the message is there.
            start = stop = max(clocks[rank], arrival)
        else:
            duration = durations.of(action)
            start = max(clocks[rank], arrival)
            stop = start + duration
            busy[rank] += duration
        clocks[rank] = stop
        spans[rank].append((start, stop))
        return stop

    stuck = replay(Dependencies(order), order.actions, run_action, durations.send)
    for ran, actions in zip(spans, order.actions):
        ran += [(math.nan, math.nan)] * (len(actions) - len(ran))
    return Timeline(
        order,
        tuple(map(tuple, spans)),
        math.inf if stuck else max(clocks, default=0.0),
        tuple(busy),
        tuple(map(peak_live, order.actions)),
        stuck,
    )


def peak_live(actions: Iterable[Action]) -> int:
    """The most (stage, microbatch) pairs that a rank holds at once; this follows from its own list alone."""
    live = peak = 0
    for action in actions:
        kinds = [part.kind for part in action.parts]
        live += kinds.count(Kind.FORWARD)
        peak = max(peak, live)
        live -= kinds.count(Kind.BACKWARD) + kinds.count(Kind.BACKWARD_WEIGHT)
    return peak
