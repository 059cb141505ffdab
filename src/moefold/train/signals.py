"""Ctrl-C and SIGTERM ask the loop to stop after the step under way; a second one does not ask."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by a signal, read by the loop between steps."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside, SIGINT and SIGTERM are remembered; what they did before comes back at the end."""
    request = StopRequest()
    before = {number: signal.signal(number, request.hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
