"""SIGINT and SIGTERM set a flag, and the loop stops after the step under way, with a checkpoint.

A job is often signalled twice: a terminal, `timeout`, systemd and SLURM signal the whole process group, and the
launcher passes its own signal on; a person presses Ctrl-C again. So a second signal means what the first one meant, and
no number of them ends a rank before it has saved. A process that does not stop is ended by SIGKILL (or Ctrl-\\, which
is SIGQUIT), and by the launcher's deadline: see `supervise.py`.

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

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.asked_at = number, time.monotonic()

    def install(self) -> None:
        """Handle both signals from now on; must be called in the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self.handle)
            # Libraries in C++ need not expect that a signal cuts their system calls short.
            signal.siginterrupt(number, False)


@contextmanager
def stop_on_signals(*, until_exit: bool = False) -> Iterator[StopRequest]:
    """Inside, SIGINT and SIGTERM set the flag; the previous handlers are restored at the end.

    ``until_exit``: the process ends after this, with an exit code that a late signal must not replace. The interpreter
    removes its handlers before the process ends, so from here on the kernel ignores both signals.
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


def print_stderr(sentence: str) -> None:
    """One line on stderr. A signal handler may interrupt a print, so it must not print itself; and the process that
    reads stderr may have been ended by the same signal."""
    with suppress(OSError):
        os.write(2, f"moefold: {sentence}\n".encode())
