"""How many microbatches of a step show everything that a step of many more would show.

Between its warm-up and its end, a pipeline rank does the same few things over and over. What a rank holds during an
action follows from what is under way at that moment: how many forwards of each stage wait for their backward, how many
weight gradients are put off, what has arrived and what is to leave, and whether the stage has had a backward before
(the first one makes the gradients, later ones add to them). Two orders whose actions meet the same states therefore
have the same peak, if all microbatches have one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moefold.config.run import RunConfig
from moefold.errors import ConfigError
from moefold.schedule.actions import RECEIVES, SENDS, TRANSFERS, Action, Kind, Order
from moefold.schedule.names import schedule_named
from moefold.schedule.passes import executable

# Messages that are awaited at a time, see comm/p2p.py: the one in use, and those after it.
_POSTED_AHEAD = 2

State = tuple[object, ...]


def order_of(run: RunConfig, microbatches: int) -> Order:
    return executable(run.parallel.schedule, run.parallel.pp, run.parallel.vpp, microbatches)


def fewest_microbatches(run: RunConfig, most: int) -> int:
    """The shortest step that the schedule can order."""
    parallel = run.parallel
    schedule = schedule_named(parallel.schedule)
    for number in range(1, most):
        if not schedule.problems(parallel.pp, parallel.vpp, number) and _has_order(run, number):
            return number
    return most


def enough_microbatches(run: RunConfig, pipeline_rank: int, most: int) -> int:
    """The shortest step whose actions on this rank meet all states that they meet with ``most`` microbatches."""
    wanted = set(states(order_of(run, most), pipeline_rank))
    for number in range(fewest_microbatches(run, most), most):
        if _has_order(run, number) and set(states(order_of(run, number), pipeline_rank)) == wanted:
            return number
    return most


def _has_order(run: RunConfig, number: int) -> bool:
    try:
        order_of(run, number)
    except ConfigError:
        return False
    return True


def states(order: Order, rank: int) -> Iterator[State]:
    """What each action of a rank finds, and what it does."""
    actions = order.actions[rank]
    receives = [(action.kind, action.stage) for action in actions if action.kind in RECEIVES]
    under_way = _UnderWay(order)
    received = 0
    for action in actions:
        posted = tuple(receives[received : received + 1 + _POSTED_AHEAD])
        yield what_is_done(action), posted, under_way.state()
        received += action.kind in RECEIVES
        under_way.after(action)


def what_is_done(action: Action) -> tuple[tuple[Kind, int], ...]:
    """An action, whatever its microbatch."""
    return tuple((part.kind, part.stage) for part in action.parts)


class _UnderWay:
    """What a rank holds between two actions. Only counts above 0 mean something: the ends of a pipeline wait for
    less."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.waiting: Counter[tuple[str, int]] = Counter()
        # Stages that have had a backward, and those whose weights have gradients.
        self.touched: set[int] = set()
        self.begun: set[int] = set()
        # What was computed last, and the backward of the last pair: its weight gradients wait for the next pair's end.
        self.before: tuple[tuple[Kind, int], ...] = ()
        self.left: int | None = None

    def state(self) -> State:
        counts = frozenset((+self.waiting).items())
        return counts, frozenset(self.touched), frozenset(self.begun), self.before, self.left

    def after(self, action: Action) -> None:
        for part in action.parts:
            self._pass(part)
        if action.kind not in TRANSFERS:
            self.before = what_is_done(action)
        if action.kind in (Kind.OVERLAP, Kind.BACKWARD) and self.left is not None:
            self.begun.add(self.left)
            self.left = None
        if action.kind is Kind.OVERLAP and (back := action.parts[1]).kind is Kind.BACKWARD:
            self.left = back.stage
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.begun.add(action.stage)

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
            waiting["put off", stage] -= 1
        else:
            self.touched.add(stage)
            waiting["put off", stage] += kind is Kind.BACKWARD_INPUT
            for what in ("forward", "input", "gradient"):
                waiting[what, stage] -= 1
            if stage > 0:
                waiting[("leaving", stage) if self.order.crosses(stage - 1) else ("gradient", stage - 1)] += 1
