"""The smallest number of microbatches with the same peak memory as a step of many more.

Between warm-up and cool-down, a pipeline rank repeats the same few actions. What it holds during an action follows from
its state: how many forwards of each stage wait for their backward, how many weight gradients are deferred, what was
received and what is to be sent, and whether the stage has had a backward before (the first allocates the gradients,
later ones accumulate). Two orders whose actions reach the same states therefore have the same peak, if all microbatches
have one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moefold.config.run import RunConfig
from moefold.errors import ConfigError
from moefold.schedule.actions import RECEIVES, SENDS, TRANSFERS, Action, Kind, Order
from moefold.schedule.names import schedule_named
from moefold.schedule.passes import executable

# Receives that are posted in advance, see comm/p2p.py.
_POSTED_AHEAD = 2

State = tuple[object, ...]


def order_of(run: RunConfig, microbatches: int) -> Order:
    return executable(run.parallel.schedule, run.parallel.pp, run.parallel.vpp, microbatches)


def fewest_microbatches(run: RunConfig, maximum: int) -> int:
    """Of the shortest step that the schedule supports."""
    parallel = run.parallel
    schedule = schedule_named(parallel.schedule)
    for number in range(1, maximum):
        if not schedule.problems(parallel.pp, parallel.vpp, number) and _has_order(run, number):
            return number
    return maximum


def enough_microbatches(run: RunConfig, pipeline_rank: int, maximum: int) -> int:
    """Of the shortest step whose actions on this rank reach all states that ``maximum`` microbatches reach."""
    wanted = set(states(order_of(run, maximum), pipeline_rank))
    for number in range(fewest_microbatches(run, maximum), maximum):
        if _has_order(run, number) and set(states(order_of(run, number), pipeline_rank)) == wanted:
            return number
    return maximum


def _has_order(run: RunConfig, number: int) -> bool:
    try:
        order_of(run, number)
    except ConfigError:
        return False
    return True


def states(order: Order, rank: int) -> Iterator[State]:
    """Each action of a rank, and the state before it."""
    actions = order.actions[rank]
    receives = [(action.kind, action.stage) for action in actions if action.kind in RECEIVES]
    rank_state = _RankState(order)
    received = 0
    for action in actions:
        posted = tuple(receives[received : received + 1 + _POSTED_AHEAD])
        yield kind_and_stage(action), posted, rank_state.state()
        received += action.kind in RECEIVES
        rank_state.after(action)


def kind_and_stage(action: Action) -> tuple[tuple[Kind, int], ...]:
    """An action without its microbatch."""
    return tuple((part.kind, part.stage) for part in action.parts)


class _RankState:
    """What a rank holds between two actions. Only counts above 0 matter: the first and last stage receive less."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waiting: Counter[tuple[str, int]] = Counter()
        # Stages that have had a backward, and those whose weights have gradients.
        self.had_backward: set[int] = set()
        self.with_gradients: set[int] = set()
        # What was computed last; and the backward stage of the last overlapped pair, whose weight gradients are
        # deferred to the end of the next pair.
        self.previous: tuple[tuple[Kind, int], ...] = ()
        self.deferred_pair: int | None = None

    def state(self) -> State:
        counts = frozenset((+self.waiting).items())
        return counts, frozenset(self.had_backward), frozenset(self.with_gradients), self.previous, self.deferred_pair

    def after(self, action: Action) -> None:
        for part in action.parts:
            self._pass(part)
        if action.kind not in TRANSFERS:
            self.previous = kind_and_stage(action)
        if action.kind in (Kind.OVERLAP, Kind.BACKWARD) and self.deferred_pair is not None:
            self.with_gradients.add(self.deferred_pair)
            self.deferred_pair = None
        if action.kind is Kind.OVERLAP and (back := action.parts[1]).kind is Kind.BACKWARD:
            self.deferred_pair = back.stage
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.with_gradients.add(action.stage)

    def _pass(self, action: Action) -> None:
        kind, stage, waiting = action.kind, action.stage, self.waiting
        if kind is Kind.FORWARD:
            waiting["forward", stage] += 1
            if stage + 1 < self.order.num_stages:
                waiting[("leaving", stage) if self.order.crosses(stage) else ("input", stage + 1)] += 1
        elif kind in SENDS:
            waiting["leaving", stage] -= 1
        elif kind in RECEIVES:
            waiting["input" if kind is Kind.RECV_F else "gradient", stage] += 1
        elif kind is Kind.BACKWARD_WEIGHT:
            waiting["deferred", stage] -= 1
        else:
            self.had_backward.add(stage)
            waiting["deferred", stage] += kind is Kind.BACKWARD_INPUT
            for what in ("forward", "input", "gradient"):
                waiting[what, stage] -= 1
            if stage > 0:
                waiting[("leaving", stage) if self.order.crosses(stage - 1) else ("gradient", stage - 1)] += 1
