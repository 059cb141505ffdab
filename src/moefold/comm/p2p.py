"""Messages between pipeline ranks, in sequence.

A message has no name: what a rank sends to another arrives in the order of sending, and the order of receives was made
to match before anything started. A send does not wait for its receiver. Receives are posted a little ahead of their
use, in the same sequence, so that a message travels while the rank still computes.

Ranks in a circle: everyone hands something to the rank some places on and is handed something from as far behind.

Nothing waits until it must: ``shift`` starts the transfer and returns at once, the caller computes, and ``wait`` hands
over what has arrived. All ranks shift in the same order, and a send and its receive start together, so that two ranks
that send to each other do not wait for each other. What nobody needs is not sent: both ends know the sizes, and a shift
of no rows is no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.process_groups import Group
from moefold.ops.fp32_linear import upcast


@dataclass(frozen=True)
class Expected:
    """A message to come: from which peer, and what its tensors look like."""

    peer: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class P2PChannels:
    """One rank's messages during one step; ``expected`` lists everything it will receive, in order of use."""

    group: Group
    dtype: torch.dtype
    device: torch.device
    expected: deque[Expected]
    # How many messages are awaited at a time.
    posted_ahead: int = 2
    _posted: deque[list[tuple[Tensor, Any]]] = field(default_factory=deque)
    _leaving: list[tuple[Tensor, Any]] = field(default_factory=list)

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            self.group.ledger.record("send", self.group.name, tensor)
            if tensor.numel():
                work = dist.isend(tensor, self.group.ranks[peer], group=self.group.connected)
                self._leaving.append((tensor, work))
        self._leaving = [(tensor, work) for tensor, work in self._leaving if not work.is_completed()]

    def receive(self) -> list[Tensor]:
        """The next message."""
        self._post(1)
        arrived = self._posted.popleft()
        self._post(self.posted_ahead)
        for _, work in arrived:
            if work is not None:
                work.wait()
        return [tensor for tensor, _ in arrived]

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()

    def _post(self, count: int) -> None:
        while len(self._posted) < count and self.expected:
            message = self.expected.popleft()
            self._posted.append([self._receive(shape, message.peer) for shape in message.shapes])

    def _receive(self, shape: tuple[int, ...], peer: int) -> tuple[Tensor, Any]:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if not tensor.numel():
            return tensor, None
        return tensor, dist.irecv(tensor, self.group.ranks[peer], group=self.group.connected)


def sum_among(x: Tensor, members: Sequence[int], group: Group) -> Tensor:
    """The sum over some members of a group, added in their order so that all of them get the same bits."""
    x = x.contiguous()
    parts: list[Tensor] = []
    works: list[Any] = []
    for member in members:
        if member == group.index:
            parts.append(x)
            continue
        group.ledger.record("send", group.name, x)
        parts.append(torch.empty_like(x))
        works.append(dist.isend(x, group.ranks[member], group=group.connected))
        works.append(dist.irecv(parts[-1], group.ranks[member], group=group.connected))
    for work in works:
        work.wait()
    total = upcast(parts[0])
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


@dataclass
class Shift:
    """A transfer under way. It keeps what is being sent alive until the wait."""

    _arriving: Tensor
    _sent: Tensor | None
    _works: list[dist.Work]

    def wait(self) -> Tensor:
        """The rows of the rank behind."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], None
        return self._arriving


def shift(rows: Tensor, arriving: int, group: Group, *, places: int = 1, tag: int = 0) -> Shift:
    """Send all rows to the rank ``places`` on (negative: back), and receive ``arriving`` rows of the same kind.

    Transfers between the same two ranks arrive in the order they were sent, per ``tag``.
    """
    here = group.index
    to, source = (group.ranks[(here + step) % group.size] for step in (places, -places))
    rows = rows.contiguous()
    buffer = rows.new_empty(arriving, *rows.shape[1:])
    transfers = []
    if rows.numel():
        group.ledger.record("send", group.name, rows)
        transfers.append(dist.P2POp(dist.isend, rows, to, group.handle, tag))
    if buffer.numel():
        transfers.append(dist.P2POp(dist.irecv, buffer, source, group.handle, tag))
    works = dist.batch_isend_irecv(transfers) if transfers else []
    return Shift(buffer, rows, works)
