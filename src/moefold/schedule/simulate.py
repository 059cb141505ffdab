"""Replays an order by the dependencies of its actions, and simulates it: its time, where ranks idle, what they hold.

Every action needs some values and produces one. A rank runs its list from first to last and blocks while a value is
missing. Values are numbered, six per stage and microbatch; a computation whose input comes from another rank needs it
received if the order has transfers, and otherwise only produced. The validator, the simulator and the pass that splits
backwards all use this `replay`.

The simulation adds durations: a rank starts an action as soon as it is free and the inputs have arrived; sends take
the rank no time and arrive after `send`. The result is exact for these assumptions, so it equals the closed forms of
the papers where they exist: 1F1B idles (P - 1) / (M + P - 1) of the time, interleaved 1F1B (P - 1) / (V M + P - 1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moefold.schedule.actions import PRODUCES_GRADIENT, TRANSFERS, Action, Kind, Order

# What a value is, as its number modulo NUM_VALUES.
OUTPUT, GRADIENT, INPUT_RECEIVED, GRADIENT_RECEIVED, OUTPUT_SENT, GRADIENT_SENT = range(6)
NUM_VALUES = 6

# (value, whether it comes from another rank)
Need = tuple[int, bool]


class Dependencies:
    """The values that each action of an order needs and produces."""

    def __init__(self, order: Order) -> None:
        self._num_microbatches = order.num_microbatches
        self._last_stage = order.num_stages - 1
        # From one stage to the same microbatch of the next.
        self._stage_stride = NUM_VALUES * order.num_microbatches
        self._crosses = [order.crosses(stage) for stage in range(order.num_stages)]
        self._has_transfers = order.has_transfers

    def place(self, value: int) -> tuple[int, int, int]:
        """What a value is, its stage and its microbatch."""
        place, what = divmod(value, NUM_VALUES)
        return what, *divmod(place, self._num_microbatches)

    def needs(self, action: Action) -> tuple[Need, ...]:
        """The values it waits for, in this order."""
        if action.pair:
            return self._needs(action.pair[0]) + self._needs(action.pair[1])
        return self._needs(action)

    def produces(self, action: Action) -> list[int]:
        return [self._own(part) + _PRODUCES[part.kind] for part in action.parts if part.kind in _PRODUCES]

    def _own(self, action: Action) -> int:
        return NUM_VALUES * (action.stage * self._num_microbatches + action.microbatch)

    def _needs(self, action: Action) -> tuple[Need, ...]:
        kind, stage, own = action.kind, action.stage, self._own(action)
        if kind is Kind.FORWARD:
            if stage == 0:
                return ()
            is_remote = self._crosses[stage - 1]
            received = is_remote and self._has_transfers
            return ((own + INPUT_RECEIVED, False) if received else (own - self._stage_stride + OUTPUT, is_remote),)
        if kind in PRODUCES_GRADIENT:
            if stage == self._last_stage:
                return ((own + OUTPUT, False),)
            is_remote = self._crosses[stage]
            received = is_remote and self._has_transfers
            gradient = (
                (own + GRADIENT_RECEIVED, False) if received else (own + self._stage_stride + GRADIENT, is_remote)
            )
            return ((own + OUTPUT, False), gradient)
        if kind is Kind.RECV_F:
            return ((own - self._stage_stride + OUTPUT_SENT, True),)
        if kind is Kind.RECV_B:
            return ((own + self._stage_stride + GRADIENT_SENT, True),)
        # A send waits for its value, a weight gradient for its input gradient.
        return ((own + (OUTPUT if kind is Kind.SEND_F else GRADIENT), False),)


_PRODUCES = {
    Kind.FORWARD: OUTPUT,
    Kind.BACKWARD: GRADIENT,
    Kind.BACKWARD_INPUT: GRADIENT,
    Kind.RECV_F: INPUT_RECEIVED,
    Kind.RECV_B: GRADIENT_RECEIVED,
    Kind.SEND_F: OUTPUT_SENT,
    Kind.SEND_B: GRADIENT_SENT,
}


@dataclass(frozen=True)
class Stuck:
    """A rank that never finishes: at which of its actions it blocks, and for which value."""

    rank: int
    position: int
    action: Action
    value: int


# Called when an action's inputs are there: (rank, action, when the last of them arrives) -> when its results exist.
RunAction = Callable[[int, Action, float], float]


def replay(
    dependencies: Dependencies, actions: Sequence[Sequence[Action]], run_action: RunAction, latency: float = 0.0
) -> tuple[Stuck, ...]:
    """Calls ``run_action`` for every action, each after those it depends on. Returns the ranks that did not finish.

    A rank starts an action when it is free and the values are there, so start times do not depend on the order in which
    ranks are visited here, and one visit per action suffices.
    """
    made: dict[int, float] = {}
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    positions = [0] * len(actions)
    awake = list(range(len(actions)))[::-1]
    while awake:
        rank = awake.pop()
        mine = actions[rank]
        position = positions[rank]
        while position < len(mine):
            action = mine[position]
            arrival = 0.0
            for value, is_remote in dependencies.needs(action):
                when = made.get(value)
                if when is None:
                    waiting[value].append(rank)
                    break
                arrival = max(arrival, when + latency if is_remote else when)
            else:
                stop = run_action(rank, action, arrival)
                position += 1
                for value in dependencies.produces(action):
                    made[value] = stop
                    if value in waiting:
                        awake += waiting.pop(value)
                continue
            break
        positions[rank] = position
    blocked = {rank: value for value, ranks in waiting.items() for rank in ranks}
    return tuple(
        Stuck(rank, positions[rank], actions[rank][positions[rank]], value) for rank, value in sorted(blocked.items())
    )


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
