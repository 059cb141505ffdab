"""The batches of the next steps, read and copied to the device while a step computes.

A thread of the host reads samples and builds batches; it takes part in no collective, because two threads could launch
collectives in different orders on two ranks. On a GPU the thread copies from pinned memory on a stream of its own. The
step's stream waits for the copy, and the allocator is told that it uses the tensors (`record_stream`): they belong to
the copying stream, which never waits for the step, and would otherwise reuse them for the next copy too early.

Samples are numbered, and what was read ahead is no state: a checkpoint holds the number of samples that were trained
on, and a resumed run reads from there. (Executed on fake CUDA tensors, `dryrun/fake_cuda`; not on a GPU.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.process_groups import Groups
from moefold.nn.batch import move_batch, tensors_of
from moefold.train.batches import LocalStep, StepData, count_divisors

# From the number of a step's first sample to its batches on the host; called on a thread.
ReadStep = Callable[[int], LocalStep]


class ReadAhead(NamedTuple):
    """A step's batches on the device, and the event after their copy; None on a CPU, where nothing is copied."""

    read: LocalStep
    copied: torch.cuda.Event | None


class Prefetcher:
    """``take`` returns the batches of a step and starts to read those of the steps after it."""

    def __init__(self, read: ReadStep, groups: Groups, device: torch.device) -> None:
        self._read, self._groups, self._device = read, groups, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._pending: dict[int, Future[ReadAhead]] = {}
        # Seconds that the last step was blocked until its samples were read.
        self.blocked = 0.0

    def take(self, first: int, following: Iterable[int] = ()) -> StepData:
        """The step that starts at sample ``first``; ``following`` are the first samples of steps to read meanwhile."""
        pending, began, computed = self._pending.pop(first, None), time.perf_counter(), time.thread_time()
        read = self._wait(self._start(first) if pending is None else pending.result())
        self.blocked = max(time.perf_counter() - began - (time.thread_time() - computed), 0.0)
        ahead = tuple(following)
        for number in [number for number in self._pending if number not in ahead]:
            self._pending.pop(number).cancel()
        for number in ahead:
            if number not in self._pending:
                self._pending[number] = self._thread.submit(self._start, number)
        return count_divisors(read, self._groups)

    def _start(self, first: int) -> ReadAhead:
        """Read a step and start its copy; called on the thread."""
        read = self._read(first)
        if self._stream is None:
            return ReadAhead(read, None)
        # A new thread begins with device 0; inside, the stream's device is the current one.
        with torch.cuda.stream(self._stream):
            batches = [move_batch(batch, self._to_device) for batch in read.data.batches]
            copied = self._stream.record_event()
        return ReadAhead(read._replace(data=read.data._replace(batches=batches)), copied)

    def _to_device(self, tensor: Tensor) -> Tensor:
        """torch keeps pinned memory from being reused until a copy from it has finished."""
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _wait(self, ahead: ReadAhead) -> LocalStep:
        """Called on the step's thread: its stream waits for the copy, and the allocator learns of the use."""
        if ahead.copied is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(ahead.copied)
            for batch in ahead.read.data.batches:
                for tensor in tensors_of(batch):
                    tensor.record_stream(here)
        return ahead.read

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """What was read ahead is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
