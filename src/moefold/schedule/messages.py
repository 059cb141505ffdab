"""Do senders and receivers agree?

Between two ranks messages travel in sequence and without names: the receiver's n-th receive gets the sender's n-th
message. So both lists must name the same values in the same sequence, or a rank computes with another microbatch's
activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from moefold.schedule.actions import GIVES_GRADIENT, RECEIVES, SENDS, TRANSFERS, Action, Kind, Order
from moefold.schedule.fault import Fault
from moefold.schedule.transfers import received_as

# (sender, receiver)
Pair = tuple[int, int]
# (an output rather than a gradient, stage, microbatch)
Value = tuple[bool, int, int]


def message_faults(order: Order) -> Iterator[Fault]:
    """Nothing to find in an order that has no transfers yet."""
    if not order.has_transfers:
        return
    # After the last stage nothing travels; nor does it before the first, which is crosses[-1].
    crosses = [order.crosses(stage) for stage in range(order.num_stages)]
    # Positions in the lists of sender and receiver.
    sends: defaultdict[Pair, list[int]] = defaultdict(list)
    receives: defaultdict[Pair, list[int]] = defaultdict(list)
    for rank, actions in enumerate(order.actions):
        yield from _place_faults(rank, actions, crosses)
        for position, action in enumerate(actions):
            if action.kind in TRANSFERS and crosses[_edge(action)]:
                other = order.rank_of_stage[_edge(action) + (action.kind in (Kind.SEND_F, Kind.RECV_B))]
                if action.kind in SENDS:
                    sends[rank, other].append(position)
                else:
                    receives[other, rank].append(position)
    for pair in sorted(sends.keys() | receives.keys()):
        yield from _sequence_faults(order, pair, sends[pair], receives[pair])


def _edge(action: Action) -> int:
    """The stage on the near side of the border that a message crosses."""
    return action.stage if action.kind in (Kind.SEND_F, Kind.RECV_B) else action.stage - 1


def _place_faults(rank: int, actions: Sequence[Action], crosses: Sequence[bool]) -> Iterator[Fault]:
    """One rank: sends after the values are made, receives before they are used, each once, none too many."""
    # Where a value was made that is not sent yet, and received that is not used yet.
    unsent: dict[Value, int] = {}
    unused: dict[Value, int] = {}
    for position, action in enumerate(actions):
        kind = action.kind
        if kind in TRANSFERS:
            value = (kind in (Kind.SEND_F, Kind.RECV_F), action.stage, action.microbatch)
            if not crosses[_edge(action)]:
                yield Fault(rank, position, f"{action} has no other rank to go to or to come from")
            elif kind in RECEIVES:
                if value in unused:
                    yield Fault(rank, position, f"{action} is received a second time")
                unused[value] = position
            elif unsent.pop(value, None) is None:
                yield Fault(rank, position, f"{action} sends what is not there: not made yet, or sent already")
            continue
        for part in action.parts:
            forward = part.kind is Kind.FORWARD
            if not forward and part.kind not in GIVES_GRADIENT:
                continue
            value = (forward, part.stage, part.microbatch)
            before, after = crosses[part.stage - 1], crosses[part.stage]
            if (before if forward else after) and unused.pop(value, None) is None:
                yield Fault(rank, position, f"{part} uses what has not been received")
            if after if forward else before:
                unsent[value] = position
    for (forward, stage, microbatch), position in unsent.items():
        what = "output" if forward else "input gradient"
        yield Fault(rank, position, f"the {what} of stage {stage} for microbatch {microbatch} is never sent")
    for position in unused.values():
        yield Fault(rank, position, f"{actions[position]} comes after its use, or is of no use")


def _sequence_faults(order: Order, pair: Pair, sends: list[int], receives: list[int]) -> Iterator[Fault]:
    """The first place where the two lists differ; after it they differ everywhere."""
    sender, receiver = pair
    theirs, mine = order.actions[sender], order.actions[receiver]
    for number, (at, position) in enumerate(zip(sends, receives)):
        if received_as(theirs[at]) != mine[position]:
            message = f"message {number} from rank {sender} is {theirs[at]} (its position {at}), not {mine[position]}'s"
            yield Fault(receiver, position, message)
            return
    if len(receives) > len(sends):
        position = receives[len(sends)]
        yield Fault(receiver, position, f"{mine[position]} waits for a message that rank {sender} never sends")
    elif len(sends) > len(receives):
        position = sends[len(receives)]
        yield Fault(sender, position, f"rank {receiver} never receives {theirs[position]}")
