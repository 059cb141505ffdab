"""Do senders and receivers agree?

Between two ranks messages travel in sequence and without names: the receiver's n-th receive gets the sender's n-th
message. So both lists must name the same values in the same sequence, or a rank computes with another microbatch's
activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from moefold.schedule.actions import RECEIVES, SENDS, TRANSFERS, Kind, Order
from moefold.schedule.fault import Fault

# (sender, receiver)
Pair = tuple[int, int]
# Those that carry an activation forward, and those whose message crosses the border after their stage.
_FORWARD = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
_AFTER = (Kind.SEND_F, Kind.RECV_B)


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
        hop = 1 if send.kind is Kind.SEND_F else -1
        taken = (receive.kind is Kind.RECV_F) == (hop == 1) and receive.stage == send.stage + hop
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
