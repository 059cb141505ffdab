"""Puts the messages between ranks into an order.

Between two ranks messages have no names, only a sequence. Sends come right after what makes a value, receives right
before what uses it. Where a rank needs a later message first, it receives the earlier ones along with it, so that each
pair's receives are in the order of its sends. Placed like this, a receive may block until its message is there. To hide
the transfer, the runtime may start receives sooner, in the same sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from moefold.schedule.actions import GIVES_GRADIENT, SENDS, Action, Kind, Order


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
