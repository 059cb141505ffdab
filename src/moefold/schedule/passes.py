"""Passes: functions that take an order and return another one.

    pair_overlaps    a forward and the backward after it become one OVERLAP (`actions.py`)
    split_backward   B becomes I and a deferred W
    add_transfers    sends after, and receives before, the computations that produce and use the values

`executable` applies them: the checked order of a named schedule, ready to run.

**Splitting.** The stage before waits for the input gradient, no rank waits for the weight gradient. So B becomes I, and
its W is deferred until one of these:

- the rank would wait for its next input longer than a W takes: W fills the bubble;
- the next action is a forward, and the rank already holds the activations of as many microbatches as it may;
- nothing else is left.

After an OVERLAP the W comes at once: it needs no message, so it keeps the rank busy while those of the pair are in
transit. Split like this, 1F1B becomes ZB-H1, action for action, and other orders gain as much: a third of the bubble is
left where nothing overlaps.

**Transfers.** Between two ranks messages have no tags, only a sequence. Sends come right after the computation of a
value, receives right before its use. Where a rank needs a later message first, it receives the earlier ones with it, so
that each pair's receives are in the order of its sends. A receive may therefore block until its message is there. To
hide the transfer, the runtime may start receives sooner, in the same sequence.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from moefold.schedule.actions import PRODUCES_GRADIENT, SENDS, Action, Kind, Order, overlap, pair_overlaps
from moefold.schedule.names import schedule_named
from moefold.schedule.simulate import Dependencies, Durations, peak_live, replay
from moefold.schedule.validate import check

__all__ = ["add_transfers", "executable", "pair_overlaps", "split_backward"]


# A step may have another number of microbatches than the one before, but not many different ones.
@lru_cache(maxsize=32)
def executable(name: str, ranks: int, virtual: int, microbatches: int, *, split: bool = False) -> Order:
    """The order that pipeline ranks run; with ``split``, all its backwards in two."""
    order = schedule_named(name).build(ranks, virtual, microbatches)
    return check(add_transfers(split_backward(order) if split else order))


def split_backward(order: Order, durations: Durations | None = None, max_live: int | None = None) -> Order:
    """Every BACKWARD in two. ``durations`` say where the bubbles are.

    ``max_live`` bounds the (stage, microbatch) pairs that a rank holds; unless given, to what the fullest rank of the
    order held before.
    """
    assert not order.has_transfers, "backwards are split before transfers are added"
    if max_live is None:
        max_live = max(map(peak_live, order.actions))
    durations = durations or Durations()
    ranks = [_Rank(durations, max_live) for _ in order.actions]
    # A whole backward and an input gradient have the same dependencies, so the order is replayed as it is.
    stuck = replay(
        Dependencies(order),
        order.actions,
        lambda rank, action, arrival: ranks[rank].run_action(action, arrival),
        durations.send,
    )
    assert not stuck, f"{order.name} never finishes: {stuck[0]}"
    return replace(order, actions=tuple(tuple(rank.finish()) for rank in ranks))


class _Rank:
    """One rank's actions so far, its clock, and its deferred weight gradients."""

    def __init__(self, durations: Durations, max_live: int) -> None:
        self._durations = durations
        self._max_live = max_live
        self._clock = 0.0
        self._live = 0
        self._actions: list[Action] = []
        self._deferred: deque[Action] = deque()

    def run_action(self, action: Action, arrival: float) -> float:
        """Runs the next action of the old order, and before it the deferred weight gradients that are due."""
        forwards = any(part.kind is Kind.FORWARD for part in action.parts)
        while self._deferred and (
            self._fits(self._deferred[0], arrival) or (forwards and self._live >= self._max_live)
        ):
            self._do(self._deferred.popleft())
        self._clock = max(self._clock, arrival)
        if action.pair and action.pair[1].kind is Kind.BACKWARD:
            forward, backward = action.pair
            self._do(overlap(forward, _half(Kind.BACKWARD_INPUT, backward)))
            stop = self._clock
            self._do(_half(Kind.BACKWARD_WEIGHT, backward))
            return stop
        if action.kind is Kind.BACKWARD:
            self._do(_half(Kind.BACKWARD_INPUT, action))
            self._deferred.append(_half(Kind.BACKWARD_WEIGHT, action))
        else:
            self._do(action)
        return self._clock

    def finish(self) -> list[Action]:
        return self._actions + list(self._deferred)

    def _fits(self, action: Action, arrival: float) -> bool:
        # Sums of durations may differ in the last digit.
        return self._clock + self._durations.of(action) <= arrival * (1 + 1e-9)

    def _do(self, action: Action) -> None:
        self._actions.append(action)
        self._clock += self._durations.of(action)
        for part in action.parts:
            self._live += part.kind is Kind.FORWARD
            self._live -= part.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _half(kind: Kind, backward: Action) -> Action:
    return Action(kind, backward.stage, backward.microbatch)


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
            elif part.kind in PRODUCES_GRADIENT and crosses[part.stage - 1]:
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
            elif part.kind in PRODUCES_GRADIENT and crosses[part.stage]:
                received += inbox.take(Kind.RECV_B, part.stage, part.microbatch)
        received.append(action)
    return received
