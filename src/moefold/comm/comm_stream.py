"""A stream for communication: submitted work runs in order, concurrently with the caller's computation.

On a CPU the stream is one thread; collectives wait without holding the GIL, so the caller's thread computes meanwhile.
On a GPU the same thread launches on a CUDA stream of its own, and events order the two streams. (The GPU path is
written and has not been run.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class CommStream:
    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="comm-stream")
        self._cuda_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Start ``work`` after everything submitted before it."""
        if self._cuda_stream is None:
            return self._thread.submit(work)
        ready = torch.cuda.Event()
        ready.record()
        return self._thread.submit(self._on_cuda_stream, self._cuda_stream, ready, work)

    @staticmethod
    def _on_cuda_stream(stream: torch.cuda.Stream, ready: torch.cuda.Event, work: Callable[[], Any]) -> Any:
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = work()
            done = torch.cuda.Event()
            done.record()
        return result, done

    def wait(self, future: Future[Any], meanwhile: Callable[[], bool]) -> Any:
        """The result. Until it is there, ``meanwhile`` is called repeatedly, until it returns False (nothing to do)."""
        while not future.done() and meanwhile():
            pass
        result = future.result()
        if self._cuda_stream is None:
            return result
        result, done = result
        torch.cuda.current_stream().wait_event(done)
        return result


class SynchronousStream(CommStream):
    """Runs work on the caller's thread, inside ``submit``: for tracers that observe one thread."""

    def __init__(self) -> None:
        self._cuda_stream = None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done
