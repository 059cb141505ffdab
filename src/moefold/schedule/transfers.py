"""Puts the messages between ranks into an order.

Between two ranks messages have no names, only a sequence. Sends come right after what makes a value, receives right
before what uses it. Where a rank needs a later message first, it receives the earlier ones along with it, so that each
pair's receives are in the order of its sends. Placed like this, a receive may block until its message is there. To hide
the transfer, the runtime may start receives sooner, in the same sequence.

Do senders and receivers agree?

Between two ranks messages travel in sequence and without names: the receiver's n-th receive gets the sender's n-th
message. So both lists must name the same values in the same sequence, or a rank computes with another microbatch's
activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moefold.schedule.actions import GIVES_GRADIENT, RECEIVES, SENDS, TRANSFERS, Action, Kind, Order
from moefold.schedule.fault import Fault


def add_transfers(order: Order) -> Order:
    """Sends after, and receives before, the computations that make and use the values."""
    # After the last stage nothing travels; nor does it before the first, which is crosses[-1].
    crosses = [order.crosses(stage) for stage in range(order.num_stages)]
    sent = [_with_sends(actions, crosses) for actions in order.actions]
    inboxes = _inboxes(order, sent)
    received = [_with_receives(actions, crosses, inbox) for actions, inbox in zip(sent, inboxes)]
    return replace(order, actions=tuple(map(tuple, received)))


def _with_sends(actions: Sequence[Action], crosses: Sequence[bool]) -> list[Action]:
    sent: list[Action] = []
    for action in actions:
        sent.append(action)
        for part in action.parts:
            if part.kind is Kind.FORWARD and crosses[part.stage]:
                sent.append(Action(Kind.SEND_F, part.stage, part.microbatch))
            elif part.kind in GIVES_GRADIENT and crosses[part.stage - 1]:
                sent.append(Action(Kind.SEND_B, part.stage, part.microbatch))
    return sent


class _Inbox:
    """The messages that one rank gets, by sender, as receives in the order of their sends."""

    def __init__(self) -> None:
        self._from: defaultdict[int, list[Action]] = defaultdict(list)
        self._num_taken: defaultdict[int, int] = defaultdict(int)
        # (kind, stage, microbatch) -> sender, and place among its messages.
        self._places: dict[tuple[Kind, int, int], tuple[int, int]] = {}

    def put(self, sender: int, receive: Action) -> None:
        messages = self._from[sender]
        self._places[receive.kind, receive.stage, receive.microbatch] = (sender, len(messages))
        messages.append(receive)

    def take(self, kind: Kind, stage: int, microbatch: int) -> list[Action]:
        """The receives up to this one that have not been taken yet; none, if an earlier one was later in sequence."""
        sender, place = self._places[kind, stage, microbatch]
        first = self._num_taken[sender]
        self._num_taken[sender] = max(first, place + 1)
        return self._from[sender][first : place + 1]


def _inboxes(order: Order, sent: Sequence[Sequence[Action]]) -> list[_Inbox]:
    inboxes = [_Inbox() for _ in sent]
    for rank, actions in enumerate(sent):
        for action in actions:
            if action.kind in SENDS:
                receive = _received_as(action)
                inboxes[order.rank_of_stage[receive.stage]].put(rank, receive)
    return inboxes


def _received_as(send: Action) -> Action:
    """The receive that takes a message."""
    if send.kind is Kind.SEND_F:
        return Action(Kind.RECV_F, send.stage + 1, send.microbatch)
    return Action(Kind.RECV_B, send.stage - 1, send.microbatch)


def _with_receives(actions: Sequence[Action], crosses: Sequence[bool], inbox: _Inbox) -> list[Action]:
    received: list[Action] = []
    for action in actions:
        for part in action.parts:
            if part.kind is Kind.FORWARD and crosses[part.stage - 1]:
                received += inbox.take(Kind.RECV_F, part.stage, part.microbatch)
            elif part.kind in GIVES_GRADIENT and crosses[part.stage]:
                received += inbox.take(Kind.RECV_B, part.stage, part.microbatch)
        received.append(action)
    return received


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
