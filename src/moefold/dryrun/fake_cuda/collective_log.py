"""A log of every collective and point-to-point call of one rank, as NCCL would get it.

`logged_collectives` replaces the functions of `torch.distributed` inside: each call goes to torch's fake process group
and is noted with its group, shapes, dtype, device, host thread and what it must wait for on this rank. Streams follow
ProcessGroupNCCL: a synchronous call is a kernel on the current stream; an asynchronous one runs on a stream of the
communicator, which waits for the current stream, and `wait()` makes the current stream wait for it.

The logs of all ranks of a world are compared by `nccl_replay.py`.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from moefold.comm import collectives
from moefold.dryrun.fake_cuda.fake_device import FakeEvent, FakeStream, current_stream
from moefold.dryrun.fake_cuda.nccl_replay import Call
from moefold.dryrun.fake_cuda.stream_hazards import StreamHazards, launched_from

# None is the world's.
AnyGroup = dist.ProcessGroup | None


@dataclass
class CollectiveLog:
    """The calls of one rank, in the order of their launches."""

    rank: int
    hazards: StreamHazards
    # Communicators are made eagerly where init_process_group was given a device; else at their first use.
    eager: bool = True
    # The host thread that calls; set by whoever stands in for threads.
    thread: str = "main"
    calls: list[Call] = field(default_factory=list)
    # Communicators that this rank has.
    made: set[str] = field(default_factory=set)
    # Of each communicator: the stream of its asynchronous calls.
    streams: dict[str, FakeStream] = field(default_factory=dict)
    # Of each stream: the counts of its launches that were calls, and the calls' numbers. Both ascend.
    launched: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def record(
        self,
        operation: str,
        group: AnyGroup,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        asynchronous: bool,
        peer: int | None = None,
        sizes: tuple[tuple[int, ...], ...] = (),
        batch: int | None = None,
    ) -> LoggedWork:
        tensors = [*reads, *writes]
        devices = {x.device.type for x in tensors}
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        name = self.connect(group, peer, batch is not None)
        where = launched_from()
        on_gpu = "cuda" in devices
        guard = self.hazards._guard
        stream: FakeStream | None = None
        waits: tuple[int, ...] = ()
        if on_gpu:
            now = current_stream(tensors[0].device)
            stream = now
            if asynchronous:
                stream = self.streams.setdefault(name, FakeStream(tensors[0].device))
                stream.wait_stream(now)
            self.hazards.launch(operation, reads, writes, stream.number)
            waits = tuple(n for n in self._earlier_calls(guard, stream.number) if batch is None or n < batch)
        self.calls.append(
            Call(
                rank=self.rank,
                number=len(self.calls),
                operation=operation,
                communicator=name,
                ranks=ranks,
                peer=peer,
                signature=(
                    sizes or tuple(tuple(x.shape) for x in tensors),
                    str(tensors[0].dtype) if tensors else "",
                    "/".join(sorted(devices)),
                ),
                stream=stream.number if stream is not None else None,
                waits=waits,
                thread=self.thread,
                where=where,
                batch=batch,
            )
        )
        if stream is not None:
            count = guard.fake_cuda_finished(stream.number, stream.number)
            counts, numbers = self.launched.setdefault(stream.number, ([], []))
            counts.append(count)
            numbers.append(len(self.calls) - 1)
        done = stream.record_event() if stream is not None and asynchronous else None
        return LoggedWork(done, tensors)

    def connect(self, group: AnyGroup, peer: int | None, batched: bool) -> str:
        """The name of NCCL's communicator: the group's, or without eager initialisation one per pair for single
        transfers. One that is made at its first use makes the host wait for all its ranks: a call of its own."""
        group = group or dist.group.WORLD
        assert group is not None, "a collective before the process group was made"
        name, ranks = str(group.group_name), tuple(dist.get_process_group_ranks(group))
        if self.eager:
            return name
        if peer is not None and not batched:
            ranks = tuple(sorted((self.rank, peer)))
            name = f"{name}:{ranks[0]}-{ranks[1]}"
        if name not in self.made:
            self.made.add(name)
            self.calls.append(
                Call(self.rank, len(self.calls), "init", name, ranks, thread=self.thread, where=launched_from())
            )
        return name

    def _earlier_calls(self, guard: ctypes.CDLL, stream: int) -> tuple[int, ...]:
        """The last call of each stream that must have finished before a kernel on this stream starts."""
        found = []
        for other, (counts, numbers) in self.launched.items():
            finished = bisect_right(counts, guard.fake_cuda_finished(stream, other))
            if finished:
                found.append(numbers[finished - 1])
        return tuple(found)


@dataclass
class LoggedWork:
    """The handle of an asynchronous call; it keeps the tensors alive until `wait`, as ProcessGroupNCCL does."""

    done: FakeEvent | None
    tensors: list[Tensor]

    def wait(self, *_: object) -> bool:
        if self.done is not None and self.tensors:
            current_stream(self.tensors[0].device).wait_event(self.done)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return False

    def is_success(self) -> bool:
        return True


@contextmanager
def logged_collectives(log: CollectiveLog) -> Iterator[None]:
    """Inside, `torch.distributed` writes to this log."""
    logged = _LoggedCollectives(log)
    replaced: dict[str, object] = {
        "all_reduce": logged.all_reduce,
        "all_gather_into_tensor": logged.all_gather,
        "all_gather_single": logged.all_gather,
        "reduce_scatter_tensor": logged.reduce_scatter,
        "reduce_scatter_single": logged.reduce_scatter,
        "all_to_all_single": logged.all_to_all,
        "broadcast": logged.broadcast,
        "barrier": logged.barrier,
        "isend": logged.isend,
        "irecv": logged.irecv,
        "batch_isend_irecv": logged.batch,
    }
    known = {name: function for name, function in replaced.items() if hasattr(dist, name)}
    # Names that were taken from torch.distributed when the module was imported.
    aliases: dict[str, object] = {
        "_all_gather_single": logged.all_gather,
        "_reduce_scatter_single": logged.reduce_scatter,
    }
    transfers: dict[str, object] = {"isend": logged.isend, "irecv": logged.irecv}
    with (
        patch.multiple(dist, **known),  # type: ignore[call-overload]
        patch.multiple(distributed_c10d, **transfers),  # type: ignore[call-overload]
        patch.multiple(collectives, **aliases),  # type: ignore[call-overload]
    ):
        yield


class _FakeCollectives:
    """torch's own functions on its fake process group: they are dispatched, so that a trace of the step sees them."""

    def __init__(self) -> None:
        self.all_reduce, self.all_to_all = dist.all_reduce, dist.all_to_all_single
        self.all_gather, self.reduce_scatter = collectives._all_gather_single, collectives._reduce_scatter_single
        self.isend, self.irecv = dist.isend, dist.irecv


class _LoggedCollectives:
    """What stands in for functions of `torch.distributed`, with their arguments."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log, self._fake = log, _FakeCollectives()

    def all_reduce(
        self, tensor: Tensor, op: object = None, group: AnyGroup = None, async_op: bool = False
    ) -> LoggedWork | None:
        self._fake.all_reduce(tensor, group=group)
        return _answer(self._log.record("all_reduce", group, [tensor], [tensor], async_op), async_op)

    def all_gather(
        self, *tensors: Tensor, group: AnyGroup = None, async_op: bool = False, **named: Tensor
    ) -> LoggedWork | None:
        output, source = tensors or _named(named, "output", "input")
        self._fake.all_gather(output, source, group=group)
        return _answer(self._log.record("all_gather", group, [source], [output], async_op), async_op)

    def reduce_scatter(
        self, *tensors: Tensor, op: object = None, group: AnyGroup = None, async_op: bool = False, **named: Tensor
    ) -> LoggedWork | None:
        output, source = tensors or _named(named, "output", "input")
        self._fake.reduce_scatter(output, source, group=group)
        return _answer(self._log.record("reduce_scatter", group, [source], [output], async_op), async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: object = None,
        input_split_sizes: object = None,
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> LoggedWork | None:
        self._fake.all_to_all(output, tensor, group=group)
        # Ranks differ in how many rows they send; the row itself is the same everywhere.
        sizes = (tuple(tensor.shape[1:]),) if input_split_sizes else ()
        return _answer(self._log.record("all_to_all", group, [tensor], [output], async_op, sizes=sizes), async_op)

    def broadcast(
        self, tensor: Tensor, src: int = 0, group: AnyGroup = None, async_op: bool = False, **_: object
    ) -> LoggedWork | None:
        return _answer(self._log.record("broadcast", group, [tensor], [tensor], async_op), async_op)

    def barrier(self, group: AnyGroup = None, async_op: bool = False, device_ids: object = None) -> LoggedWork | None:
        return _answer(self._log.record("barrier", group, [], [], async_op), async_op)

    def isend(self, tensor: Tensor, dst: int, group: AnyGroup = None, tag: int = 0) -> LoggedWork:
        self._fake.isend(tensor, dst, group=group)
        return self._log.record("send", group, [tensor], [], True, peer=dst)

    def irecv(self, tensor: Tensor, src: int, group: AnyGroup = None, tag: int = 0) -> LoggedWork:
        self._fake.irecv(tensor, src, group=group)
        return self._log.record("recv", group, [], [tensor], True, peer=src)

    def batch(self, transfers: Sequence[dist.P2POp]) -> list[LoggedWork]:
        """One launch for all of them: they start together, and none waits for another."""
        for transfer in transfers:
            self._log.connect(transfer.group, transfer.peer, True)
        works, first = [], len(self._log.calls)
        for transfer in transfers:
            sending = transfer.op is dist.isend
            reads, writes = ([transfer.tensor], []) if sending else ([], [transfer.tensor])
            name = "send" if sending else "recv"
            (self._fake.isend if sending else self._fake.irecv)(transfer.tensor, transfer.peer, group=transfer.group)
            works.append(self._log.record(name, transfer.group, reads, writes, True, peer=transfer.peer, batch=first))
        return works


def _named(named: dict[str, Tensor], output: str, source: str) -> tuple[Tensor, Tensor]:
    """torch has called these arguments differently over time."""
    (to,) = (named[name] for name in (output, f"{output}_tensor") if name in named)
    (given,) = (named[name] for name in (source, f"{source}_tensor") if name in named)
    return to, given


def _answer(work: LoggedWork, asynchronous: bool) -> LoggedWork | None:
    return work if asynchronous else None
