"""A background job whose exception is kept for the training loop.

It runs in a thread of low priority; hashing and writing release the GIL for large blocks, so the loop is hardly slowed.
No collectives here: those belong to the loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Result = TypeVar("Result")
_NICENESS = 10


class Job(Generic[Result]):
    """Starts at once. After ``wait``, or once ``ended``, either ``error`` or ``result`` is set."""

    def __init__(self, work: Callable[[], Result], *, background: bool) -> None:
        self._work = work
        self._result: list[Result] = []
        self.error: Exception | None = None
        # Daemon: an ending process does not wait, and an uncommitted checkpoint is ignored.
        self._thread = threading.Thread(target=self._run_at_low_priority, name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._run()

    def _run_at_low_priority(self) -> None:
        # The priority is not required.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
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
