"""A stream for communication: submitted work runs in order, concurrently with the caller's computation.

On a CPU the stream is one thread; collectives wait without holding the GIL, so the caller's thread computes meanwhile.

On a GPU it is a CUDA stream, and the caller's thread launches on it: with a second thread, two ranks could launch
collectives of two communicators in different orders, and wait for each other forever. Events order the two streams.
What ``work`` uses stays alive until ``wait``, when the caller's stream has waited for it; what it returns was allocated
on the communication stream, which waits for the caller's stream before it allocates again. So no block is reused while
a kernel of the other stream uses it. (Executed on fake CUDA tensors, `dryrun/fake_cuda`; not on a GPU.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class CommStream(Protocol):
    """Runs work in order; ``wait`` returns its result."""

    def submit(self, work: Callable[[], Any]) -> Any:
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
