"""A second lane for communication: work handed to it runs in order, beside whatever the caller goes on computing.

On a CPU the lane is one thread; collectives wait outside of Python's lock, so the other thread computes meanwhile. On a
GPU the same thread launches on a stream of its own, and events order the two streams. (The GPU side is written and
has not been run.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class CommStream:
    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="comm-lane")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Start ``work`` after everything submitted before it."""
        if self._stream is None:
            return self._thread.submit(work)
        ready = torch.cuda.Event()
        ready.record()
        return self._thread.submit(self._on_stream, self._stream, ready, work)

    @staticmethod
    def _on_stream(stream: torch.cuda.Stream, ready: torch.cuda.Event, work: Callable[[], Any]) -> Any:
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = work()
            done = torch.cuda.Event()
            done.record()
        return result, done

    def take(self, future: Future[Any], meanwhile: Callable[[], bool]) -> Any:
        """The result; until it is there, ``meanwhile`` is called for as long as it says that there was something."""
        while not future.done() and meanwhile():
            pass
        result = future.result()
        if self._stream is None:
            return result
        result, done = result
        torch.cuda.current_stream().wait_event(done)
        return result


class SynchronousStream(CommStream):
    """A lane that is no second thread: work is done when it has been submitted. For whoever watches this thread."""

    def __init__(self) -> None:
        self._stream = None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done
