"""SIGINT and SIGTERM are remembered, and the loop stops after the step under way, with a checkpoint.

A job is often signalled twice: a terminal, `timeout`, systemd and SLURM signal the whole process group, and the
launcher passes its own signal on; a person presses Ctrl-C again. So a second signal means what the first one meant, and
no number of them ends a rank before it has saved. What ends a process that does not stop is SIGKILL (or Ctrl-\\, which
is SIGQUIT), and the launcher's deadline: see `supervise.py`.

The handler is installed before anything heavy is imported, so this file imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 75  # the exit code: try again later, by the convention of sysexits


class StopRequest:
    """Set by the first signal, read by the loop between steps; ``asked_at`` is in the clock of ``time.monotonic``."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.asked_at: float | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.asked_at = number, time.monotonic()

    def install(self) -> None:
        """Hear both signals from now on, in the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self.hear)
            # Libraries in C++ need not expect that a signal cuts their system calls short.
            signal.siginterrupt(number, False)


@contextmanager
def stop_on_signals(*, until_exit: bool = False) -> Iterator[StopRequest]:
    """Inside, SIGINT and SIGTERM are remembered; what they did before comes back at the end.

    ``until_exit``: the process ends after this, with an exit code that a late signal must not replace. The interpreter
    takes its handlers down before it is gone, so from here on the kernel ignores both signals.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    request.install()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if until_exit else handler)


def nothing_to_save(step: int = 0) -> str:
    stands = f"; the run stands at step {step}" if step else ""
    return f"stopped before a step was done, nothing to save{stands}"


def say(sentence: str) -> None:
    """One line on stderr. A handler may run in the middle of a print, so it cannot print itself; and the reader of
    stderr may be gone, ended by the same signal."""
    with suppress(OSError):
        os.write(2, f"moefold: {sentence}\n".encode())
