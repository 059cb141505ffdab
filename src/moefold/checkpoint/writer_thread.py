"""One thread that writes checkpoints, for as long as its `Saver` lives.

A thread per save would need memory at the worst moment. ``threading.Thread.start`` waits for the new thread to report,
and waits for good if that thread dies of a failed allocation before it can. So the thread is started once, before
training, by ``_thread``, which waits for nothing; and whoever waits for a job also looks whether the thread lives.

That is seen by an object which only the thread's arguments refer to: it is gone when the thread is, whatever ended it.
A job whose thread is gone, or was never started, has failed like any other; the next job starts the thread anew.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

from moefold.errors import CheckpointError

Result = TypeVar("Result")
_NICENESS = 10
_POLL_SECONDS = 0.2


class Job(Generic[Result]):
    """A function whose exception is kept for the training loop.

    After ``wait``, or once ``ended``, either ``error`` or ``result`` is set.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work: Callable[[], Result] | None = work
        self._result: list[Result] = []
        self._done = False
        self._alive: Callable[[], object | None] | None = None
        self.error: BaseException | None = None
        # Held until the job has ended. To release a lock needs no memory, unlike to set an event.
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """In this thread."""
        try:
            assert self._work is not None
            self._result.append(self._work())
        except BaseException as error:
            self.error = error
        self._end()

    def watch(self, alive: Callable[[], object | None]) -> None:
        """It runs in a thread that lives as long as this returns an object."""
        self._alive = alive

    def fail(self, error: BaseException) -> None:
        """Instead of running it."""
        self.error = error
        self._end()

    def _end(self) -> None:
        # The function refers to tensors and, by way of the saver, to the thread's queue.
        self._work = None
        self._done = True
        self._running.release()

    @property
    def ended(self) -> bool:
        # In this order: a thread marks the job before it is gone.
        alive = self._alive is None or self._alive() is not None
        if not self._done and not alive:
            self.fail(CheckpointError("the thread that writes checkpoints has died, probably for lack of memory"))
        return self._done

    def wait(self) -> None:
        while not self.ended:
            if self._running.acquire(timeout=_POLL_SECONDS):
                self._running.release()

    @property
    def result(self) -> Result:
        if self.error is not None:
            raise self.error
        return self._result[0]


class _Token:
    """Lives as long as the thread whose argument it is."""


class WriterThread:
    """Runs jobs one after the other, at low priority.

    Hashing and writing release the GIL for large blocks, so the loop is hardly slowed. An ending process does not wait
    for the thread: an uncommitted checkpoint is ignored.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._token: weakref.ref[_Token] | None = None
        # Failing now is not final: the first job tries again, and fails with the reason.
        with suppress(RuntimeError, MemoryError):
            self._start()

    @property
    def alive(self) -> bool:
        return self._token is not None and self._token() is not None

    def submit(self, job: Job) -> None:
        """Run it in the thread; whatever prevents that is the job's error."""
        try:
            if not self.alive:
                self._start()
            assert self._token is not None
            job.watch(self._token)
            self._jobs.put(job)
        except (RuntimeError, MemoryError) as error:
            job.fail(CheckpointError(f"the thread that writes checkpoints cannot be started: {error or 'no memory'}"))

    def close(self) -> None:
        """The thread ends after the jobs that it has."""
        self._jobs.put(None)

    def _start(self) -> None:
        # A new queue: jobs that a thread left when it died have failed.
        self._jobs, token = SimpleQueue(), _Token()
        self._token = weakref.ref(token)
        _thread.start_new_thread(_serve, (self._jobs, token))


def _serve(jobs: SimpleQueue[Job | None], token: _Token) -> None:
    # The priority is not required.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    while (job := jobs.get()) is not None:
        job.run()
        # A job must not be kept until the next one comes.
        del job
