"""The point-to-point calls of a whole pipeline: the real `P2PChannels`, driven by the real orders, without ranks.

A compute stream is assumed that waits for every message it receives: whatever a rank launches afterwards starts after
all messages that it has waited for. The host never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import moefold.comm.p2p as p2p
from moefold.comm.process_groups import Ledger, boundary_rounds
from moefold.dryrun.fake_cuda.nccl_replay import Call
from moefold.schedule.actions import Action, Kind, Order
from moefold.schedule.passes import executable

# (sender, receiver, pipeline ranks) -> the name of the communicator.
Channels = Callable[[int, int, int], str]
MESSAGE = ((1, 1),)


def per_direction(sender: int, receiver: int, ranks: int) -> str:
    """As `Groups` makes them: for neighbours in the ring of stages only."""
    pairs = {pair for pairs in boundary_rounds(ranks) for pair in pairs}
    assert (sender, receiver) in pairs or (receiver, sender) in pairs, f"{sender} and {receiver} are no neighbours"
    return f"{sender}>{receiver}"


@dataclass
class _Rank:
    """The calls of one rank so far, and the last message of each communicator that its compute stream waited for."""

    number: int
    calls: list[Call] = field(default_factory=list)
    waited: dict[str, int] = field(default_factory=dict)

    def call(self, operation: str, peer: int, communicator: str) -> SimpleNamespace:
        number = len(self.calls)
        ranks = tuple(sorted((self.number, peer)))
        waits = tuple(self.waited.values())
        self.calls.append(Call(self.number, number, operation, communicator, ranks, peer, MESSAGE, 1, waits))

        def wait() -> None:
            if operation == "recv":
                self.waited[communicator] = number

        return SimpleNamespace(wait=wait, is_completed=lambda: False)


def pipeline_calls(
    schedule: str,
    ranks: int,
    virtual: int,
    microbatches: int,
    channels: Channels = per_direction,
    change: Callable[[int, list[Action]], list[Action]] | None = None,
) -> dict[int, list[Call]]:
    """Of every rank. ``change`` may reorder the actions of a rank."""
    order = executable(schedule, ranks, virtual, microbatches)
    found: dict[int, list[Call]] = {}
    for rank in range(ranks):
        here = _Rank(rank)
        actions = list(order.actions[rank])
        with _recording(here):
            _run(here, ranks, order, actions if change is None else change(rank, actions), channels)
        found[rank] = here.calls
    return found


@contextmanager
def _recording(rank: _Rank) -> Iterator[None]:
    def isend(tensor: Tensor, to: int, group: str) -> Any:
        return rank.call("send", to, group)

    def irecv(tensor: Tensor, source: int, group: str) -> Any:
        return rank.call("recv", source, group)

    with patch.object(p2p, "dist", SimpleNamespace(isend=isend, irecv=irecv)):
        yield


def _run(here: _Rank, ranks: int, order: Order, actions: list[Action], channels: Channels) -> None:
    peers = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
    moves = [
        (action, order.rank_of_stage[action.stage + peers[action.kind]]) for action in actions if action.kind in peers
    ]
    expected = deque(p2p.Expected(peer, MESSAGE) for action, peer in moves if action.kind in (Kind.RECV_F, Kind.RECV_B))
    group: Any = SimpleNamespace(
        name="pp",
        ranks=tuple(range(ranks)),
        index=here.number,
        ledger=Ledger(),
        channel=lambda sender, receiver: channels(sender, receiver, ranks),
    )
    messages = p2p.P2PChannels(group, torch.float32, torch.device("meta"), expected)
    payload = torch.empty(MESSAGE[0], device="meta")
    for action, peer in moves:
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            messages.send([payload], peer)
        else:
            messages.receive()
