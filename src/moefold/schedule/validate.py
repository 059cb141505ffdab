"""Can ranks run this order? If not, where does it go wrong?

An order is valid if every stage does every microbatch once, backward after forward and weight gradient after input
gradient; if every value that goes to another rank is sent once and received once, each pair of ranks agreeing on the
sequence; and if no ranks wait for each other in a cycle. All of it takes time in proportion to the number of actions.

Messages between two ranks have no tags: the receiver's n-th receive gets the sender's n-th message. So both lists must
name the same values in the same sequence, or a rank computes with another microbatch's activations.

A fault is shown with the cells around it. Rows are ranks, columns are positions in their lists; the number after the
letter is the microbatch, the one after @ the stage.

    rank 0 |  SF1@0   RB0@0   B0@0   F2@0   SF2@0
    rank 1 |  RF0@1    F0@1  [B0@1]  SB0@1  RF1@1
                              ^^^^ position 2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moefold.errors import OrderError
from moefold.schedule.actions import PRODUCES_GRADIENT, RECEIVES, SENDS, TRANSFERS, Action, Kind, Order
from moefold.schedule.simulate import Dependencies, Stuck, replay

# How many ranks and positions to each side are shown.
_RANKS, _POSITIONS = 2, 4


@dataclass(frozen=True)
class Fault:
    """What is wrong, at which position of which rank's list; ``position`` is None if an action is missing."""

    rank: int
    position: int | None
    message: str
    # Other cells to point out: (rank, position).
    marks: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        where = f"rank {self.rank}" + ("" if self.position is None else f", position {self.position}")
        return f"{where}: {self.message}"


def excerpt(order: Order, fault: Fault) -> str:
    """The part of the order around a fault, its cell in brackets. A row that has a mark is centred on it."""
    marks = dict(fault.marks)
    if fault.position is not None:
        marks[fault.rank] = fault.position
    # Of something missing only the row is known; its end is as good a place as any.
    focus = fault.position if fault.position is not None else len(order.actions[fault.rank])
    ranks = range(max(0, fault.rank - _RANKS), min(order.num_ranks, fault.rank + _RANKS + 1))
    rows = [(rank, _row(order, rank, marks.get(rank, focus), rank in marks)) for rank in ranks]
    widths = [max(len(row[column]) for _, row in rows) for column in range(2 * _POSITIONS + 1)]
    lines = []
    for rank, row in rows:
        head = f"rank {rank}".rjust(len(f"rank {ranks[-1]}")) + " |"
        lines.append(" ".join([head, *(cell.center(width) for cell, width in zip(row, widths))]).rstrip())
        if rank == fault.rank:
            lines.append(_pointer(len(head), widths, fault))
    return "\n".join(lines)


def _row(order: Order, rank: int, centre: int, marked: bool) -> list[str]:
    actions = order.actions[rank]
    cells = []
    for position in range(centre - _POSITIONS, centre + _POSITIONS + 1):
        cell = str(actions[position]) if 0 <= position < len(actions) else ""
        cells.append(f"[{cell}]" if marked and position == centre else f" {cell} ")
    return cells


def _pointer(head: int, widths: list[int], fault: Fault) -> str:
    if fault.position is None:
        return " " * (head + 1) + "^ nowhere in this row"
    before = head + 1 + sum(width + 1 for width in widths[:_POSITIONS])
    return " " * before + "^" * widths[_POSITIONS] + f" position {fault.position}"


# One mistake in a schedule often makes many faults.
_MOST_FAULTS = 20


def check(order: Order) -> Order:
    """The order, if it can run; else an OrderError that shows the first fault."""
    found = problems(order)
    if found:
        raise OrderError(_message(order, found))
    return order


def problems(order: Order) -> list[Fault]:
    """At most 20 faults; empty if the order is valid."""
    # Each check relies on those before it.
    for checks in (_shape_faults, _compute_faults, message_faults, _deadlock_faults):
        found = [fault for _, fault in zip(range(_MOST_FAULTS), checks(order))]
        if found:
            return found
    return []


def _message(order: Order, found: list[Fault]) -> str:
    sizes = f"{order.num_ranks} ranks, {order.num_stages} stages, {order.num_microbatches} microbatches"
    first, others = found[0], found[1:]
    lines = [f"{order.name} ({sizes}) cannot run: {first}", "", excerpt(order, first)]
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
    if forward.kind is not Kind.FORWARD or backward.kind not in PRODUCES_GRADIENT:
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
            # Backwards first: within an OVERLAP the backward does not depend on the forward.
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
    dependencies = Dependencies(order)
    stuck = {fault.rank: fault for fault in replay(dependencies, order.actions, lambda rank, action, arrival: 0.0)}
    if not stuck:
        return
    producers = _producers(order, dependencies, stuck)
    cycle = _cycle(stuck, producers)
    marks = tuple((rank, fault.position) for rank, fault in stuck.items())
    for rank in cycle:
        fault = stuck[rank]
        other, position = producers[fault.value]
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


def _producers(order: Order, dependencies: Dependencies, stuck: dict[int, Stuck]) -> dict[int, tuple[int, int]]:
    """The rank and position that would produce each value that a rank waits for."""
    wanted = {fault.value for fault in stuck.values()}
    return {
        value: (rank, position)
        for rank in stuck
        for position, action in enumerate(order.actions[rank])
        for value in dependencies.produces(action)
        if value in wanted
    }


def _cycle(stuck: dict[int, Stuck], producers: dict[int, tuple[int, int]]) -> list[int]:
    """Ranks that wait for each other in a cycle: every stuck rank waits for another stuck one."""
    seen: list[int] = []
    rank = min(stuck)
    while rank not in seen:
        seen.append(rank)
        rank = producers[stuck[rank].value][0]
    return seen[seen.index(rank) :]


# (sender, receiver)
Pair = tuple[int, int]
# Those that carry an activation forward, and those whose message crosses the border after their stage.
_FORWARD = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
_AFTER = (Kind.SEND_F, Kind.RECV_B)


def message_faults(order: Order) -> Iterator[Fault]:
    """Sends and receives that do not match; none in an order without transfers."""
    if not order.has_transfers:
        return
    # After the last stage nothing travels; nor does it before the first, which is crosses[-1].
    crosses = [order.crosses(stage) for stage in range(order.num_stages)]
    # Positions in the lists of sender and receiver.
    sends: defaultdict[Pair, list[int]] = defaultdict(list)
    receives: defaultdict[Pair, list[int]] = defaultdict(list)
    for rank, actions in enumerate(order.actions):
        yield from _place_faults(order, rank, crosses)
        for position, action in enumerate(actions):
            kind = action.kind
            if kind in TRANSFERS:
                after = kind in _AFTER
                if crosses[action.stage if after else action.stage - 1]:
                    other = order.rank_of_stage[action.stage + (1 if after else -1)]
                    if kind in SENDS:
                        sends[rank, other].append(position)
                    else:
                        receives[other, rank].append(position)
    for pair in sorted(sends.keys() | receives.keys()):
        yield from _sequence_faults(order, pair, sends[pair], receives[pair])


def _place_faults(order: Order, rank: int, crosses: Sequence[bool]) -> Iterator[Fault]:
    """One rank: sends after the values are made, receives before they are used, each once, none too many."""
    actions = order.actions[rank]
    # Where a value was made that is not sent yet, and received that is not used yet. Values are numbers: two, forward
    # and back, for each stage and microbatch.
    unsent: dict[int, int] = {}
    unused: dict[int, int] = {}
    for position, action in enumerate(actions):
        for part in action.parts:
            kind = part.kind
            if kind is Kind.BACKWARD_WEIGHT:
                continue
            forward = kind in _FORWARD
            value = 2 * (part.stage * order.num_microbatches + part.microbatch) + forward
            before, after = crosses[part.stage - 1], crosses[part.stage]
            if kind in TRANSFERS:
                if not (after if kind in _AFTER else before):
                    yield Fault(rank, position, f"{action} has no other rank to go to or to come from")
                elif kind in RECEIVES:
                    if value in unused:
                        yield Fault(rank, position, f"{action} is received a second time")
                    unused[value] = position
                elif unsent.pop(value, None) is None:
                    yield Fault(rank, position, f"{action} sends what is not there: not made yet, or sent already")
            else:
                if (before if forward else after) and unused.pop(value, None) is None:
                    yield Fault(rank, position, f"{part} uses what has not been received")
                if after if forward else before:
                    unsent[value] = position
    for value, position in unsent.items():
        stage, microbatch = divmod(value // 2, order.num_microbatches)
        what = "output" if value % 2 else "input gradient"
        yield Fault(rank, position, f"the {what} of stage {stage} for microbatch {microbatch} is never sent")
    for position in unused.values():
        yield Fault(rank, position, f"{actions[position]} comes after its use, or is of no use")


def _sequence_faults(order: Order, pair: Pair, sends: list[int], receives: list[int]) -> Iterator[Fault]:
    """The first place where the two lists differ; after it they differ everywhere."""
    sender, receiver = pair
    theirs, mine = order.actions[sender], order.actions[receiver]
    for number, (at, position) in enumerate(zip(sends, receives)):
        send, receive = theirs[at], mine[position]
        step = 1 if send.kind is Kind.SEND_F else -1
        taken = (receive.kind is Kind.RECV_F) == (step == 1) and receive.stage == send.stage + step
        if not taken or receive.microbatch != send.microbatch:
            message = f"message {number} from rank {sender} is {send} (its position {at}), not {receive}'s"
            yield Fault(receiver, position, message)
            return
    if len(receives) > len(sends):
        position = receives[len(sends)]
        yield Fault(receiver, position, f"{mine[position]} waits for a message that rank {sender} never sends")
    elif len(sends) > len(receives):
        position = sends[len(receives)]
        yield Fault(sender, position, f"rank {receiver} never receives {theirs[position]}")
