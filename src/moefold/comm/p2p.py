"""Transfers beside computation: a stream for communication, pipeline messages, and shifts around a ring.

``CommStream``: submitted work runs in order, concurrently with the caller's computation. On a CPU the stream is one
thread; collectives wait without holding the GIL, so the caller's thread computes meanwhile. On a GPU it is a CUDA
stream, and the caller's thread launches on it: with a second thread, two ranks could launch collectives of two
communicators in different orders, and wait for each other forever. Events order the two streams. What ``work`` uses
stays alive until ``wait``, when the caller's stream has waited for it; what it returns was allocated on the
communication stream, which waits for the caller's stream before it allocates again. So no block is reused while a
kernel of the other stream uses it. (Executed on fake CUDA tensors, `dryrun/fake_cuda`; not on a GPU.)

``P2PChannels``: messages carry no tags. In each direction between two ranks they arrive in the order of sending, and
the schedule has ordered the receives to match. A send does not wait for its receiver. Receives are posted a few
messages ahead of their use, in the same order, so that a transfer overlaps with computation.

``shift``: every rank of a ring sends to the rank ``distance`` after it and receives from the one ``distance`` before
it. The call starts the transfer and returns; ``Shift.wait`` returns the received rows. All ranks shift in the same
order, and each starts its send and its receive together, so that two ranks that send to each other cannot deadlock.
Both ends know the sizes, and an empty transfer is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.process_groups import Group, Ledger
from moefold.comm.spans import NOT_TIMED, SpanRecorder, TimedWork
from moefold.ops.fp32_linear import upcast

T = TypeVar("T")


class CommStream(Protocol):
    """Runs work in order; ``wait`` returns its result."""

    def submit(self, work: Callable[[], object]) -> Any:
        """Start ``work`` after everything submitted before it; returns a handle for ``wait``."""
        ...

    def wait(self, handle: Any, meanwhile: Callable[[], bool]) -> Any:
        """The result. Until it is there, ``meanwhile`` is called repeatedly, until it returns False (nothing to do)."""
        ...


def comm_stream(device: torch.device) -> CommStream:
    return CudaCommStream(device) if device.type == "cuda" else ThreadCommStream()


class ThreadCommStream:
    """For CPUs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="comm-stream")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def wait(self, handle: Future[T], meanwhile: Callable[[], bool]) -> T:
        while not handle.done() and meanwhile():
            pass
        return handle.result()


class CudaCommStream:
    """For GPUs. A handle is the result, the event after it, and the work, which keeps alive what it uses."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], T]) -> tuple[T, torch.cuda.Event, Callable[[], T]]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            result = work()
        return result, self._stream.record_event(), work

    def wait(self, handle: tuple[T, torch.cuda.Event, Callable[[], T]], meanwhile: Callable[[], bool]) -> T:
        result, done, _ = handle
        while not done.query() and meanwhile():
            pass
        torch.cuda.current_stream(self._stream.device).wait_event(done)
        return result


class SynchronousStream:
    """Runs work on the caller's thread, inside ``submit``: for tracers that observe one thread."""

    def submit(self, work: Callable[[], T]) -> T:
        return work()

    def wait(self, handle: T, meanwhile: Callable[[], bool]) -> T:
        return handle


class TimedCommStream:
    """A stream whose waits are spans while a step is profiled; what it runs has spans on its own stream."""

    def __init__(self, stream: CommStream, ledger: Ledger) -> None:
        self.stream, self.ledger = stream, ledger

    def submit(self, work: Callable[[], T]) -> object:
        if (spans := self.ledger.spans) is None:
            return self.stream.submit(work)

        def run() -> T:
            with spans.span("compute", "on the comm stream"):
                return work()

        return self.stream.submit(run)

    def wait(self, handle: object, meanwhile: Callable[[], bool]) -> object:
        if (spans := self.ledger.spans) is None:
            return self.stream.wait(handle, meanwhile)

        def work_meanwhile() -> bool:
            with spans.span("compute", "weight gradients meanwhile"):
                return meanwhile()

        with spans.span("wait", "for the comm stream"):
            return self.stream.wait(handle, work_meanwhile)


@dataclass(frozen=True)
class Expected:
    """A message to receive: its peer and the shapes of its tensors."""

    peer: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class P2PChannels:
    """One rank's messages during one step; ``expected`` lists everything it will receive, in order of use."""

    group: Group
    dtype: torch.dtype
    device: torch.device
    expected: deque[Expected]
    # How many receives are posted at a time.
    posted_ahead: int = 2
    _posted: deque[list[tuple[Tensor, dist.Work | None]]] = field(default_factory=deque)
    _pending_sends: list[tuple[Tensor, dist.Work]] = field(default_factory=list)

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            self.group.ledger.record("send", self.group.name, tensor)
            if tensor.numel():
                channel = self.group.channel(self.group.index, peer)
                stamp = self._stamp("send", channel, peer, tensor)
                work = _started(dist.isend(tensor, self.group.ranks[peer], group=channel))
                self._pending_sends.append((tensor, self._timed(work, "send", stamp)))
        self._pending_sends = [(tensor, work) for tensor, work in self._pending_sends if not work.is_completed()]

    def receive(self) -> list[Tensor]:
        """The next message."""
        self._post(1)
        message = self._posted.popleft()
        self._post(self.posted_ahead)
        for _, work in message:
            if work is not None:
                work.wait()
        return [tensor for tensor, _ in message]

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for _, work in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    def _post(self, count: int) -> None:
        while len(self._posted) < count and self.expected:
            message = self.expected.popleft()
            self._posted.append([self._receive(shape, message.peer) for shape in message.shapes])

    def _receive(self, shape: tuple[int, ...], peer: int) -> tuple[Tensor, dist.Work | None]:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if not tensor.numel():
            return tensor, None
        channel = self.group.channel(peer, self.group.index)
        stamp = self._stamp("receive", channel, peer, tensor)
        return tensor, self._timed(
            _started(dist.irecv(tensor, self.group.ranks[peer], group=channel)), "receive", stamp
        )

    def _stamp(self, operation: str, channel: dist.ProcessGroup, peer: int, tensor: Tensor) -> int | None:
        """Both ends number the messages of a channel alike: it has one direction."""
        spans, size = self.group.ledger.spans, tensor.numel() * tensor.element_size()
        if spans is None:
            return None
        peers = (self.group.ranks[peer],)
        return spans.start_operation(operation, self.group.name, str(channel.group_name), peers, size)

    def _timed(self, work: dist.Work, operation: str, stamp: int | None) -> dist.Work:
        spans = self.group.ledger.spans
        return work if spans is None or stamp is None else TimedWork(work, spans, f"{operation} pp", stamp)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "torch returns no work on a rank outside the group"
    return work


def all_reduce_p2p(x: Tensor, members: Sequence[int], group: Group) -> Tensor:
    """The sum over some members of a group, added in member order so that all of them get the same bits."""
    x = x.contiguous()
    parts: list[Tensor] = []
    transfers: list[dist.P2POp] = []
    for member in members:
        if member == group.index:
            parts.append(x)
            continue
        group.ledger.record("send", group.name, x)
        parts.append(torch.empty_like(x))
        transfers.append(dist.P2POp(dist.isend, x, group.ranks[member], group.connected))
        transfers.append(dist.P2POp(dist.irecv, parts[-1], group.ranks[member], group.connected))
    ranks = tuple(group.ranks[member] for member in members)
    with _exchange(group, "all_reduce_p2p", f"members {ranks}", ranks, x):
        # In one launch: under NCCL, two ends that both send first would wait for each other.
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
    total = upcast(parts[0])
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


@dataclass
class Shift:
    """A transfer in progress. It keeps the sent tensor alive until the wait."""

    _received: Tensor
    _sent: Tensor | None
    _works: list[dist.Work]

    def wait(self) -> Tensor:
        """The received rows."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], None
        return self._received


def shift(rows: Tensor, num_received: int, group: Group, *, distance: int = 1, tag: int = 0) -> Shift:
    """Send all rows to the rank ``distance`` after this one (negative: before), and receive ``num_received`` rows.

    Transfers between the same two ranks arrive in the order they were sent, per ``tag``.
    """
    to, source = (group.ranks[(group.index + step) % group.size] for step in (distance, -distance))
    rows = rows.contiguous()
    buffer = rows.new_empty(num_received, *rows.shape[1:])
    transfers = []
    if rows.numel():
        group.ledger.record("send", group.name, rows)
        transfers.append(dist.P2POp(dist.isend, rows, to, group.handle, tag))
    if buffer.numel():
        transfers.append(dist.P2POp(dist.irecv, buffer, source, group.handle, tag))
    spans = group.ledger.spans
    stamp = (
        None if spans is None else _stamp_exchange(spans, group, "shift", f"shift {distance} {tag}", (source,), rows)
    )
    works = dist.batch_isend_irecv(transfers) if transfers else []
    if spans is not None and stamp is not None:
        works = [TimedWork(work, spans, f"shift {group.name}", stamp) for work in works]
    return Shift(buffer, rows, works)


def _exchange(
    group: Group, operation: str, channel: str, peers: tuple[int, ...], sent: Tensor
) -> AbstractContextManager[None]:
    """A span around several messages that are waited for at once, if there is a recorder."""
    spans = group.ledger.spans
    if spans is None:
        return NOT_TIMED
    stamp = _stamp_exchange(spans, group, operation, channel, peers, sent)
    return spans.span("comm", f"{operation} {group.name}", (stamp,))


def _stamp_exchange(
    spans: SpanRecorder, group: Group, operation: str, channel: str, peers: tuple[int, ...], sent: Tensor
) -> int:
    """All ranks exchange in the same order, empty messages included, so they number exchanges alike."""
    name, size = f"{group.connected.group_name} {channel}", sent.numel() * sent.element_size()
    return spans.start_operation(operation, group.name, name, peers, size)
