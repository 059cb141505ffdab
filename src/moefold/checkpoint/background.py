"""One piece of work beside the training loop, whose failure is not lost.

It runs in a thread of low priority: hashing and writing leave Python alone while they work on large pieces, and the
loop should not feel them. Nothing here talks to other ranks; collectives belong to the loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Result = TypeVar("Result")
_POLITENESS = 10


class Job(Generic[Result]):
    """Starts at once; ``ended`` tells, ``wait`` waits, then either ``error`` or ``result`` is there."""

    def __init__(self, work: Callable[[], Result], *, background: bool) -> None:
        self._work = work
        self._result: list[Result] = []
        self.error: Exception | None = None
        # A process that ends does not wait: what was not committed was never there.
        self._thread = threading.Thread(target=self._run_politely, name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._run()

    def _run_politely(self) -> None:
        # A courtesy, not a need.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITENESS)
        self._run()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except Exception as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def result(self) -> Result:
        if self.error is not None:
            raise self.error
        return self._result[0]
