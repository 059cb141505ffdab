"""Who waits for whom: the rules by which an order unfolds.

Every action needs some values and gives one. A rank carries out its list from first to last and stands still while a
value is missing. This is all there is to a pipeline, so the validator, the simulator and the pass that splits backwards
share it. Values have numbers, six per stage and microbatch; a computation whose input comes from another rank needs it
received if the order has transfers, and else simply made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moefold.schedule.actions import GIVES_GRADIENT, Action, Kind, Order

# What a value is, as its number modulo NUM_VALUES.
OUTPUT, GRADIENT, INPUT_HERE, GRADIENT_HERE, OUTPUT_SENT, GRADIENT_SENT = range(6)
NUM_VALUES = 6

# (value, whether it has to travel to get here)
Need = tuple[int, bool]


class Rules:
    """What each action of an order needs and gives."""

    def __init__(self, order: Order) -> None:
        self._num_microbatches = order.num_microbatches
        self._last_stage = order.num_stages - 1
        # From one stage to the same microbatch of the next.
        self._hop = NUM_VALUES * order.num_microbatches
        self._crosses = [order.crosses(stage) for stage in range(order.num_stages)]
        self._has_transfers = order.has_transfers

    def place(self, value: int) -> tuple[int, int, int]:
        """What a value is, its stage and its microbatch."""
        place, what = divmod(value, NUM_VALUES)
        return what, *divmod(place, self._num_microbatches)

    def needs(self, action: Action) -> tuple[Need, ...]:
        """In the order in which they are missed."""
        if action.pair:
            return self._needs(action.pair[0]) + self._needs(action.pair[1])
        return self._needs(action)

    def gives(self, action: Action) -> list[int]:
        return [self._own(part) + _GIVES[part.kind] for part in action.parts if part.kind in _GIVES]

    def _own(self, action: Action) -> int:
        return NUM_VALUES * (action.stage * self._num_microbatches + action.microbatch)

    def _needs(self, action: Action) -> tuple[Need, ...]:
        kind, stage, own = action.kind, action.stage, self._own(action)
        if kind is Kind.FORWARD:
            if stage == 0:
                return ()
            travels = self._crosses[stage - 1]
            received = travels and self._has_transfers
            return ((own + INPUT_HERE, False) if received else (own - self._hop + OUTPUT, travels),)
        if kind in GIVES_GRADIENT:
            if stage == self._last_stage:
                return ((own + OUTPUT, False),)
            travels = self._crosses[stage]
            received = travels and self._has_transfers
            gradient = (own + GRADIENT_HERE, False) if received else (own + self._hop + GRADIENT, travels)
            return ((own + OUTPUT, False), gradient)
        if kind is Kind.RECV_F:
            return ((own - self._hop + OUTPUT_SENT, True),)
        if kind is Kind.RECV_B:
            return ((own + self._hop + GRADIENT_SENT, True),)
        # A send waits for what it sends, a weight gradient for its input gradient.
        return ((own + (OUTPUT if kind is Kind.SEND_F else GRADIENT), False),)


_GIVES = {
    Kind.FORWARD: OUTPUT,
    Kind.BACKWARD: GRADIENT,
    Kind.BACKWARD_INPUT: GRADIENT,
    Kind.RECV_F: INPUT_HERE,
    Kind.RECV_B: GRADIENT_HERE,
    Kind.SEND_F: OUTPUT_SENT,
    Kind.SEND_B: GRADIENT_SENT,
}


@dataclass(frozen=True)
class Stuck:
    """A rank that waits for ever: at which of its actions, and for which value."""

    rank: int
    position: int
    action: Action
    value: int


# Called when an action's inputs are there: (rank, action, when the last of them arrives) -> when its results exist.
Carry = Callable[[int, Action, float], float]


def replay(rules: Rules, actions: Sequence[Sequence[Action]], carry: Carry, travel: float = 0.0) -> tuple[Stuck, ...]:
    """Calls ``carry`` for every action, each after those it depends on. Returns the ranks that did not finish.

    A rank starts an action when it is free and the values are there, so starting times do not depend on the order in
    which ranks are visited here, and one visit per action suffices.
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
            for value, travels in rules.needs(action):
                when = made.get(value)
                if when is None:
                    waiting[value].append(rank)
                    break
                arrival = max(arrival, when + travel if travels else when)
            else:
                stop = carry(rank, action, arrival)
                position += 1
                for value in rules.gives(action):
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
