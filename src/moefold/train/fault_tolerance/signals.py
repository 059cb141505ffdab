"""SIGINT and SIGTERM set a flag, and the loop stops after the step under way, with a checkpoint.

One request often arrives as several signals: a terminal, `timeout`, systemd and SLURM signal the whole process group,
and the launcher passes its own signal on. So signals within a second of the first are the same request. A signal 1 to
10 seconds after it is a person who does not want to wait: the process that a person signals (`--nproc`'s launcher, or a
run of one process) then stops at once, without saving. Later ones begin anew: a scheduler reminds at the end of its
grace time, and the checkpoint under way must not be lost to that. Ranks never stop at once by themselves, since their
peers would wait for them.

The handler is installed before anything heavy is imported, so this file imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

TYPE_CHECKING = False  # true for a type checker; `typing` is slow to import
if TYPE_CHECKING:
    from mmap import mmap
    from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 75  # the exit code: try again later, by the convention of sysexits
# Signals up to the first are one request; after it and up to the second, a request to stop at once.
SAME_SECONDS, AT_ONCE_SECONDS = 1.0, 10.0
# Set by launchers, per rank: see `comm/launchers.py`.
_LAUNCHED = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class StopRequest:
    """Set by the first signal, read by the loop between steps; ``asked_at`` is in the clock of ``time.monotonic``.

    ``first`` is called by the handler for the first signal, ``at_once`` for one that asks to stop at once; without it,
    such a signal changes nothing.
    """

    def __init__(
        self, first: Callable[[int], None] | None = None, at_once: Callable[[int], None] | None = None
    ) -> None:
        self.signal: int | None = None
        self.asked_at: float | None = None
        self.first, self.at_once = first, at_once
        self._burst = 0.0
        self._shared: mmap | None = None

    def __bool__(self) -> bool:
        """Whether this process, or one that shares this request, was asked to stop."""
        return self.signal is not None or (self._shared is not None and self._shared[0] != 0)

    def share(self) -> None:
        """With the processes that are forked from now on: each sees what the others were asked for.

        A rank may be signalled and then die; its launcher must not start it again.
        """
        import mmap

        if self._shared is None:
            self._shared = mmap.mmap(-1, 1)

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.asked_at, self._burst = number, now, now
            if self._shared is not None:
                self._shared[0] = number
            if self.first is not None:
                self.first(number)
        elif now - self._burst > AT_ONCE_SECONDS:
            self._burst = now
        elif now - self._burst > SAME_SECONDS and self.at_once is not None:
            self.at_once(number)

    def in_rank(self) -> None:
        """In a forked rank: its launcher decides whether to stop at once, and tells."""
        self.first = self.at_once = None
        self.install()

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
    removes its handlers before the process ends, so from here on the kernel ignores both signals. A request to stop at
    once ends this process; without ``until_exit`` it raises KeyboardInterrupt.
    """
    request = StopRequest()
    if not launched():
        request.first = tell_first
        request.at_once = exit_at_once if until_exit else interrupt
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    request.install()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if until_exit else handler)


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return any(rank in os.environ and world in os.environ for rank, world in _LAUNCHED)


def tell_first(number: int) -> None:
    print_stderr(
        f"{signal.Signals(number).name}: stopping after the step under way, with a checkpoint; "
        f"again {SAME_SECONDS:g} to {AT_ONCE_SECONDS:g} s later: at once, without one"
    )


def exit_at_once(number: int) -> NoReturn:
    """Nothing needs an orderly end: checkpoints are committed by a rename, and locks are the kernel's."""
    print_stderr(f"second {signal.Signals(number).name}: stopped at once; the same command resumes")
    os._exit(INTERRUPTED)


def interrupt(number: int) -> NoReturn:
    raise KeyboardInterrupt


def nothing_to_save(step: int = 0) -> str:
    stands = f"; the run stands at step {step}" if step else ""
    return f"stopped before a step was done, nothing to save{stands}"


def print_stderr(sentence: str) -> None:
    """One line on stderr. A signal handler may interrupt a print, so it must not print itself; and the process that
    reads stderr may have been ended by the same signal."""
    with suppress(OSError):
        os.write(2, f"moefold: {sentence}\n".encode())
