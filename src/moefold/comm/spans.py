"""Time stamps of what a rank does: spans of work, and the start of every operation over a group.

A ``SpanRecorder`` is handed to the ledger of a rank (`Ledger.spans`); without one nothing is stamped. While it is on,

    span        a named interval on one stream: a forward, a wait, a collection of garbage. Spans nest.
    operation   a collective, or one message between two ranks: its communicator, its number there, and when this rank
                started it. All members number the operations of a communicator alike, so the starts of all ranks can be
                laid side by side on one clock: until the last of them a rank waits for its peers, and from then on for
                the transfer. `train/profile/account.py` does that.
    mark        where the training loop is (`Heartbeat.enter`); what no span covers belongs to the mark before it.

A stream runs one thing after the other: a thread on a CPU, a CUDA stream on a GPU. On a CPU a stamp is a reading of the
host's monotonic clock. On a GPU it is an event on the current stream, so that a span has the time in which the stream
was busy with it or waited; the host waits for the device before the first stamp of a profiled step and after the last,
and for none between. (Executed on fake CUDA tensors, `tests/gpu_lab/test_clock_on_fake_cuda.py`; not on a GPU.)
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

# A reading of a clock, or an event.
Stamp = Any
NOT_TIMED: AbstractContextManager[None] = nullcontext()


class Operation(NamedTuple):
    """One operation of this rank. ``peers``: those whose start it needs, beside this rank's own."""

    communicator: str
    number: int
    operation: str
    group: str
    peers: tuple[int, ...]
    bytes: int
    start: Stamp


class Span(NamedTuple):
    """``operations``: those that it waits for, by their place in the list of operations."""

    stream: int
    kind: str
    name: str
    start: Stamp
    end: Stamp
    operations: tuple[int, ...] = ()


class Mark(NamedTuple):
    name: str
    at: Stamp


class RankStep(NamedTuple):
    """One step of one rank, in seconds of its host's clock. Stream 0 is the one that trains."""

    rank: int
    step: int
    began: float
    ended: float
    marks: list[Mark]
    spans: list[Span]
    operations: list[Operation]


Row = TypeVar("Row", Mark, Span, Operation)


class Clock(Protocol):
    def now(self) -> Stamp: ...

    def stream(self) -> int:
        """Of the caller: the same number for the same thread or stream."""
        ...

    def start(self) -> None:
        """Before the first stamp of a step."""
        ...

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """On the host's monotonic clock, once all of them are past."""
        ...


class HostClock:
    """For CPUs. All processes of a host have the same monotonic clock."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.now = read

    def stream(self) -> int:
        return threading.get_ident()

    def start(self) -> None:
        """A reading needs no origin."""

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        return list(stamps)


class CudaClock:
    """For GPUs: events, relative to one whose time on the host is known because the host waited for it."""

    def __init__(self, device: torch.device, read: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.read = device, read
        self._origin: Stamp = None
        self._origin_seconds = 0.0

    def now(self) -> Stamp:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        self._origin = self.now()
        self._origin.synchronize()
        self._origin_seconds = self.read()

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        torch.cuda.synchronize(self.device)
        return [self._origin_seconds + self._origin.elapsed_time(stamp) * 1e-3 for stamp in stamps]


class Ranges(Protocol):
    """Names spans for another tool: NVTX, or torch's profiler."""

    def push(self, name: str) -> None: ...

    def pop(self) -> None: ...


class SpanRecorder:
    """One rank's stamps, a step at a time."""

    def __init__(self, rank: int, clock: Clock | None = None, ranges: Ranges | None = None) -> None:
        self.rank, self.clock, self.ranges = rank, HostClock() if clock is None else clock, ranges
        self._lock = threading.Lock()
        self._step, self._streams = 0, dict[int, int]()
        # One value after the other, in rows of the fields of Mark, Span and Operation: an object per stamp would cause
        # collections of garbage, which are to be measured.
        self._marks: list[Stamp] = []
        self._spans: list[Stamp] = []
        self._operations: list[Stamp] = []
        self._numbers: dict[str, int] = {}
        self._began: Stamp = None
        # By stream, since garbage is collected on whichever thread allocates.
        self._collecting: dict[int, Stamp] = {}

    # ---- a step ----

    def begin(self, step: int) -> None:
        self._streams.clear()
        self._marks, self._spans, self._operations = [], [], []
        self._numbers = {}
        self.clock.start()
        self._step, self._began = step, self.clock.now()
        self._stream()
        gc.callbacks.append(self._on_gc)

    def end(self) -> RankStep:
        gc.callbacks.remove(self._on_gc)
        ended = self.clock.now()
        marks, spans = _rows(Mark, self._marks), _rows(Span, self._spans)
        operations = _rows(Operation, self._operations)
        stamps = [self._began, ended, *(mark.at for mark in marks), *(op.start for op in operations)]
        stamps += [stamp for span in spans for stamp in (span.start, span.end)]
        seconds = iter(self.clock.seconds(stamps))
        began, over = next(seconds), next(seconds)
        timed_marks = [mark._replace(at=next(seconds)) for mark in marks]
        timed_operations = [op._replace(start=next(seconds)) for op in operations]
        timed_spans = [span._replace(start=next(seconds), end=next(seconds)) for span in spans]
        return RankStep(self.rank, self._step, began, over, timed_marks, timed_spans, timed_operations)

    # ---- stamps ----

    def mark(self, name: str) -> None:
        self._marks.extend((name, self.clock.now()))

    def span(self, kind: str, name: str, operations: tuple[int, ...] = ()) -> AbstractContextManager[None]:
        return _Timed(self, kind, name, operations)

    def start_operation(
        self, operation: str, group: str, communicator: str, peers: tuple[int, ...], num_bytes: int
    ) -> int:
        """The operation's place in the list; called right before it is started."""
        with self._lock:
            number = self._numbers[communicator] = self._numbers.get(communicator, 0) + 1
            self._operations.extend((communicator, number, operation, group, peers, num_bytes, self.clock.now()))
            return len(self._operations) // len(Operation._fields) - 1

    def add(self, kind: str, name: str, start: Stamp, operations: tuple[int, ...] = ()) -> None:
        """A span that began at ``start`` and ends now."""
        # One call, so that rows of two threads do not mix.
        self._spans.extend((self._stream(), kind, name, start, self.clock.now(), operations))

    def _stream(self) -> int:
        return self._streams.setdefault(self.clock.stream(), len(self._streams))

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        stream = self.clock.stream()
        if phase == "start":
            self._collecting[stream] = self.clock.now()
        elif stream in self._collecting:
            self.add("gc", f"generation {info.get('generation')}", self._collecting.pop(stream))


def _rows(kind: type[Row], values: list[Stamp]) -> list[Row]:
    columns = [values[i :: len(kind._fields)] for i in range(len(kind._fields))]
    return [kind(*row) for row in zip(*columns, strict=True)]


class _Timed:
    def __init__(self, recorder: SpanRecorder, kind: str, name: str, operations: tuple[int, ...]) -> None:
        self.recorder, self.kind, self.name, self.operations = recorder, kind, name, operations
        self.start: Stamp = None

    def __enter__(self) -> None:
        if self.recorder.ranges is not None:
            self.recorder.ranges.push(f"{self.kind}: {self.name}")
        self.start = self.recorder.clock.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.recorder.add(self.kind, self.name, self.start, self.operations)
        if self.recorder.ranges is not None:
            self.recorder.ranges.pop()


def timed(recorder: SpanRecorder | None, kind: str, name: object) -> AbstractContextManager[None]:
    """A span, if there is a recorder; only then the name becomes text."""
    return NOT_TIMED if recorder is None else recorder.span(kind, str(name))


class TimedWork(torch.distributed.Work):
    """The handle of an asynchronous operation, whose wait is a span."""

    def __init__(self, work: torch.distributed.Work, recorder: SpanRecorder, name: str, operation: int) -> None:
        super().__init__()
        self.work, self.recorder, self.name, self.operation = work, recorder, name, operation

    def wait(self, *timeout: timedelta) -> bool:
        with self.recorder.span("comm", self.name, (self.operation,)):
            return bool(self.work.wait(*timeout))

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())
