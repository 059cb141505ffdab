"""Is this an order that ranks can carry out? If not, where does it go wrong?

An order is valid if every stage does every microbatch once, backward after forward and weight gradient after input
gradient; if every value that goes to another rank is sent once and received once, each pair of ranks agreeing on the
sequence; and if, everybody waiting for what they need, everybody gets to the end. All of it takes time in proportion to
the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterator

from moefold.errors import OrderError
from moefold.schedule.actions import GIVES_GRADIENT, TRANSFERS, Action, Kind, Order
from moefold.schedule.fault import Fault, surroundings
from moefold.schedule.replay import Rules, Stuck, replay
from moefold.schedule.transfers import message_faults

# An order that is wrong once is often wrong everywhere.
_MOST_FAULTS = 20


def check(order: Order) -> Order:
    """The order, if it can be carried out; else an OrderError that shows the first place where it cannot."""
    found = problems(order)
    if found:
        raise OrderError(_message(order, found))
    return order


def problems(order: Order) -> list[Fault]:
    """What is wrong, at most 20 things; empty if the order is valid."""
    # Each check relies on those before it.
    for checks in (_shape_faults, _compute_faults, message_faults, _deadlock_faults):
        found = [fault for _, fault in zip(range(_MOST_FAULTS), checks(order))]
        if found:
            return found
    return []


def _message(order: Order, found: list[Fault]) -> str:
    sizes = f"{order.num_ranks} ranks, {order.num_stages} stages, {order.num_microbatches} microbatches"
    first, others = found[0], found[1:]
    lines = [f"{order.name} ({sizes}) cannot be carried out: {first}", "", surroundings(order, first)]
    if others:
        lines += ["", "also:" if len(found) < _MOST_FAULTS else "also, among others:", *map(str, others)]
    return "\n".join(lines)


def _shape_faults(order: Order) -> Iterator[Fault]:
    """Lists and numbers that fit each other."""
    if len(order.actions) != order.num_ranks:
        yield Fault(0, None, f"there are lists of {len(order.actions)} ranks, not of {order.num_ranks}")
        return
    if len(order.rank_of_stage) != order.num_stages:
        yield Fault(0, None, f"{len(order.rank_of_stage)} stages have a rank, not {order.num_stages}")
        return
    for rank, actions in enumerate(order.actions):
        for position, action in enumerate(actions):
            for part in action.parts:
                if not (0 <= part.stage < order.num_stages and 0 <= part.microbatch < order.num_microbatches):
                    yield Fault(rank, position, f"there is no stage {part.stage} with a microbatch {part.microbatch}")
                elif order.rank_of_stage[part.stage] != rank:
                    holder = order.rank_of_stage[part.stage]
                    yield Fault(rank, position, f"stage {part.stage} is on rank {holder}, not on rank {rank}")
            if (action.kind is Kind.OVERLAP) != (action.pair is not None):
                yield Fault(rank, position, "an OVERLAP has a pair, and nothing else has one")
            elif action.pair:
                yield from _pair_faults(rank, position, action)


def _pair_faults(rank: int, position: int, action: Action) -> Iterator[Fault]:
    forward, backward = action.parts
    if forward.kind is not Kind.FORWARD or backward.kind not in GIVES_GRADIENT:
        yield Fault(rank, position, "an OVERLAP pairs a forward with a backward or an input gradient")
    elif (forward.stage, forward.microbatch) != (action.stage, action.microbatch):
        yield Fault(rank, position, "an OVERLAP has the stage and the microbatch of its forward")
    elif forward.microbatch == backward.microbatch:
        yield Fault(
            rank, position, f"both are of microbatch {forward.microbatch}, so the backward waits for the forward"
        )


def _compute_faults(order: Order) -> Iterator[Fault]:
    """Each microbatch once through each stage, forward and back."""
    size = order.num_stages * order.num_microbatches
    forwards, gradients, weights = bytearray(size), bytearray(size), bytearray(size)
    for rank, actions in enumerate(order.actions):
        for position, action in enumerate(actions):
            if action.kind in TRANSFERS:
                continue
            # Backwards first: within an overlap nothing waits for the forward beside it.
            for part in action.parts[::-1]:
                at = part.stage * order.num_microbatches + part.microbatch
                if part.kind is Kind.FORWARD:
                    if forwards[at]:
                        yield Fault(rank, position, f"{part} is done a second time")
                    forwards[at] = 1
                elif part.kind is Kind.BACKWARD_WEIGHT:
                    if weights[at]:
                        yield Fault(rank, position, f"the weight gradient of {part} is done a second time")
                    elif not gradients[at]:
                        yield Fault(rank, position, f"{part} comes before its input gradient")
                    weights[at] = 1
                else:
                    if gradients[at]:
                        yield Fault(rank, position, f"the backward of {part} is done a second time")
                    elif not forwards[at]:
                        yield Fault(rank, position, f"{part} comes before its forward")
                    gradients[at] = 1
                    weights[at] |= part.kind is Kind.BACKWARD
    yield from _missing(order, "forward", forwards)
    yield from _missing(order, "backward", gradients)
    yield from _missing(order, "weight gradient", weights)


def _missing(order: Order, what: str, done: bytearray) -> Iterator[Fault]:
    at = done.find(0)
    while at >= 0:
        stage, microbatch = divmod(at, order.num_microbatches)
        rank = order.rank_of_stage[stage]
        yield Fault(rank, None, f"stage {stage} never does the {what} of microbatch {microbatch}")
        at = done.find(0, at + 1)


def _deadlock_faults(order: Order) -> Iterator[Fault]:
    rules = Rules(order)
    stuck = {fault.rank: fault for fault in replay(rules, order.actions, lambda rank, action, arrival: 0.0)}
    if not stuck:
        return
    givers = _givers(order, rules, stuck)
    circle = _circle(stuck, givers)
    marks = tuple((rank, fault.position) for rank, fault in stuck.items())
    for rank in circle:
        fault = stuck[rank]
        other, position = givers[fault.value]
        what = order.actions[other][position]
        where = (
            "which comes later in its own list"
            if other == rank
            else f"which is stuck before it at {stuck[other].action}"
        )
        yield Fault(
            rank,
            fault.position,
            f"deadlock: {fault.action} waits for {what} of rank {other} at position {position}, {where}",
            marks,
        )


def _givers(order: Order, rules: Rules, stuck: dict[int, Stuck]) -> dict[int, tuple[int, int]]:
    """Who would give each value that somebody waits for: rank and position."""
    wanted = {fault.value for fault in stuck.values()}
    return {
        value: (rank, position)
        for rank in stuck
        for position, action in enumerate(order.actions[rank])
        for value in rules.gives(action)
        if value in wanted
    }


def _circle(stuck: dict[int, Stuck], givers: dict[int, tuple[int, int]]) -> list[int]:
    """Ranks that wait for each other in turn: whoever is stuck waits for somebody who is stuck."""
    seen: list[int] = []
    rank = min(stuck)
    while rank not in seen:
        seen.append(rank)
        rank = givers[stuck[rank].value][0]
    return seen[seen.index(rank) :]
