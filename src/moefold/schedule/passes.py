"""Passes: functions that take an order and return a better one.

    pair_overlaps    a forward and the backward after it become one OVERLAP (in overlaps.py)
    split_backward   B becomes I and a W that is put off until the rank would idle (in split.py)
    add_transfers    sends after, and receives before, the computations that make and use the values

`executable` is all of it: the checked order of a named schedule, ready to be carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from moefold.schedule.actions import GIVES_GRADIENT, Action, Kind, Order
from moefold.schedule.names import schedule_named
from moefold.schedule.overlaps import pair_overlaps

__all__ = ["add_transfers", "executable", "pair_overlaps"]


# A step may have another number of microbatches than the one before, but not many different ones.
@lru_cache(maxsize=32)
def executable(name: str, ranks: int, virtual: int, microbatches: int) -> Order:
    """The order that pipeline ranks carry out."""
    return add_transfers(schedule_named(name).build(ranks, virtual, microbatches))


def add_transfers(order: Order) -> Order:
    """Sends right after what makes a value, receives right before what uses it.

    Between two ranks messages have no names, only a sequence. Where a rank needs a later message first, it receives the
    earlier ones along with it, so that each pair's receives are in the order of its sends. A receive may therefore block
    until its message is there. To hide the transfer, the runtime may start receives sooner, in the same sequence.
    """
    sent = [_with_sends(order, actions) for actions in order.actions]
    queues = _messages(order, sent)
    return replace(order, actions=tuple(tuple(_with_receives(order, actions, queues)) for actions in sent))


def _with_sends(order: Order, actions: Sequence[Action]) -> list[Action]:
    sent: list[Action] = []
    for action in actions:
        sent.append(action)
        for part in action.parts:
            if part.kind is Kind.FORWARD and order.crosses(part.stage):
                sent.append(Action(Kind.SEND_F, part.stage, part.microbatch))
            elif part.kind in GIVES_GRADIENT and order.crosses(part.stage - 1):
                sent.append(Action(Kind.SEND_B, part.stage, part.microbatch))
    return sent


class _Queue:
    """The messages of one rank to another, as receives in the order of their sends."""

    def __init__(self) -> None:
        self.receives: list[Action] = []
        self.num_received = 0


def _messages(order: Order, sent: Sequence[Sequence[Action]]) -> dict[Action, tuple[_Queue, int]]:
    """Where each receive stands: its queue, and its place in it."""
    queues: dict[tuple[int, int], _Queue] = {}
    places: dict[Action, tuple[_Queue, int]] = {}
    for rank, actions in enumerate(sent):
        for action in actions:
            if action.kind is Kind.SEND_F:
                receive = Action(Kind.RECV_F, action.stage + 1, action.microbatch)
            elif action.kind is Kind.SEND_B:
                receive = Action(Kind.RECV_B, action.stage - 1, action.microbatch)
            else:
                continue
            queue = queues.setdefault((rank, order.rank_of_stage[receive.stage]), _Queue())
            places[receive] = (queue, len(queue.receives))
            queue.receives.append(receive)
    return places


def _with_receives(order: Order, actions: Sequence[Action], places: dict[Action, tuple[_Queue, int]]) -> list[Action]:
    received: list[Action] = []
    for action in actions:
        for part in action.parts:
            if part.kind is Kind.FORWARD and order.crosses(part.stage - 1):
                needed = Action(Kind.RECV_F, part.stage, part.microbatch)
            elif part.kind in GIVES_GRADIENT and order.crosses(part.stage):
                needed = Action(Kind.RECV_B, part.stage, part.microbatch)
            else:
                continue
            queue, place = places[needed]
            received += queue.receives[queue.num_received : place + 1]
            queue.num_received = max(queue.num_received, place + 1)
        received.append(action)
    return received
