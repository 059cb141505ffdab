"""Supervise local ranks: start them, and restart all of them from the newest checkpoint when one is lost.

The supervising process has imported everything and computes nothing, so a restart is a fork, not an import: a fraction
of a second. A fault that recurs on every start is not cured by restarting, so a few starts in a row without a new
checkpoint end the run.

Once SIGINT or SIGTERM has asked for a stop, ranks are never started again. The signal is passed on to them, since it
may have come to this process alone; they stop after the same step, save, and their exit code is returned. Ranks that
have not stopped ``patience`` seconds later are ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import FrameType

from moefold.comm.spawn import spawn_ranks
from moefold.errors import RankError, TrainingError
from moefold.train.signals import STOP_SIGNALS, StopRequest, print_stderr

MAX_FRUITLESS_STARTS = 3


class _Ranks:
    """Forwards a signal to the ranks that run now, or that are being started."""

    def __init__(self, stop: StopRequest, patience: float) -> None:
        self.pids: list[int] = []
        self.stop, self.patience = stop, patience

    def started(self, pids: list[int]) -> None:
        self.pids = pids
        if self.stop.signal is not None:
            self._send(self.stop.signal)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.stop:
            name = signal.Signals(number).name
            print_stderr(
                f"{name}: stopping after the step under way; ranks still running in {self.patience:g} s are ended"
            )
        self.stop.handle(number, frame)
        self._send(number)

    def deadline(self) -> float:
        """When ranks must have ended, in the clock of ``time.monotonic``."""
        return inf if self.stop.asked_at is None else self.stop.asked_at + self.patience

    def _send(self, number: int) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def supervise(
    work: Callable[[int], int],
    world: int,
    checkpoints: Path,
    patience: float,
    max_fruitless: int = MAX_FRUITLESS_STARTS,
    stop: StopRequest | None = None,
) -> int:
    """Run ``work(rank) -> exit code`` on ``world`` ranks until they end by themselves; returns their exit code.

    ``stop`` is set by signals: in this process, and in every rank in the rank's own copy of it.
    """
    stop = StopRequest() if stop is None else stop
    ranks = _Ranks(stop, patience)
    before = {number: signal.signal(number, ranks.handle) for number in STOP_SIGNALS}
    try:
        return _keep_alive(work, world, checkpoints, ranks, max_fruitless)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep_alive(work: Callable[[int], int], world: int, checkpoints: Path, ranks: _Ranks, max_fruitless: int) -> int:
    fruitless, seen = 0, _newest(checkpoints)
    while True:
        try:
            codes = spawn_ranks(
                work,
                world,
                seconds=inf,
                collective_timeout=ranks.patience,
                grace=0.3,
                deadline=ranks.deadline,
                in_rank=ranks.stop.install,
                started=ranks.started,
            )
            return max(codes)
        except RankError as error:
            if error.mendable:
                raise
            newest = _newest(checkpoints)
            fruitless = 0 if newest != seen else fruitless + 1
            seen = newest
            if ranks.stop:
                raise TrainingError(
                    f"asked to stop, and the ranks ended without saving: {error}\n"
                    f"the same command resumes from {seen or 'the beginning'}"
                ) from None
            if fruitless >= max_fruitless:
                raise TrainingError(
                    f"given up after {fruitless} starts without a new checkpoint; the last failure: {error}"
                ) from None
            print(
                f"moefold: {str(error).splitlines()[0]}; restarting from {seen or 'the beginning'}",
                file=sys.stderr,
            )


def _newest(checkpoints: Path) -> str:
    """The newest committed step's name; committing is a rename, so a name is enough."""
    names = [path.name for path in checkpoints.glob("step_*") if path.suffix == ""]
    return max(names, default="")
