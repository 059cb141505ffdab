"""Supervise local ranks: start them, and restart all of them from the newest checkpoint when one is lost.

The supervising process has imported everything and computes nothing, so a restart is a fork, not an import: a fraction
of a second. A fault that recurs on every start is not cured by restarting, so a few starts in a row without a new
checkpoint end the run.

Once SIGINT or SIGTERM has asked for a stop, of this process or of a rank, ranks are never started again. The signal is
passed on to them, since it may have come to this process alone; they stop after the same step, save, and their exit
code is returned. Ranks that have not stopped ``patience`` seconds later are ended, and a second request (see
`signals.py`) ends them at once. Whatever became of the ranks, a run that was asked to stop exits with 75: it can be
resumed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType

from moefold.comm.spawn import spawn_ranks
from moefold.errors import RankError, TrainingError
from moefold.train.fault_tolerance.signals import INTERRUPTED, STOP_SIGNALS, StopRequest, print_stderr, tell_first

MAX_FRUITLESS_STARTS = 3


class _Ranks:
    """Forwards a signal to the ranks that run now, or that are being started."""

    def __init__(self, stop: StopRequest, patience: float) -> None:
        self.pids: list[int] = []
        self.stop, self.patience = stop, patience
        self.ended_at_once = self.restarting = False
        stop.share()
        stop.first, stop.at_once = self._tell, self._end_at_once

    def started(self, pids: list[int]) -> None:
        self.pids = pids
        if self.stop:
            # The request came while they were forked. A first start ends in order; another one must not even begin.
            at_once = self.ended_at_once or self.restarting
            self._send(signal.SIGKILL if at_once else self.stop.signal or signal.SIGTERM)

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.stop.handle(number, frame)
        self._send(number)

    def deadline(self) -> float:
        """When ranks must have ended, in the clock of ``time.monotonic``; asked again about once per second."""
        if self.stop and self.stop.asked_at is None:
            # A rank was signalled, not this process.
            self.stop.asked_at = time.monotonic()
        return inf if self.stop.asked_at is None else self.stop.asked_at + self.patience

    def _tell(self, number: int) -> None:
        tell_first(number)
        print_stderr(f"ranks still running in {self.patience:g} s are ended")

    def _end_at_once(self, number: int) -> None:
        self.ended_at_once = True
        print_stderr(f"second {signal.Signals(number).name}: ranks are ended at once")
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def supervise(
    work: Callable[[int], int],
    world: int,
    checkpoints: Path,
    patience: float,
    max_fruitless: int = MAX_FRUITLESS_STARTS,
    stop: StopRequest | None = None,
    spawn: Callable[..., list[int]] = spawn_ranks,
) -> int:
    """Run ``work(rank) -> exit code`` on ``world`` ranks until they end by themselves; returns their exit code.

    ``stop`` is set by signals, and shared between this process and its ranks. ``spawn`` is called as ``spawn_ranks``;
    that of a `Watchdog` ends ranks that hang.
    """
    stop = StopRequest() if stop is None else stop
    told = stop.first, stop.at_once
    ranks = _Ranks(stop, patience)
    before = {number: signal.signal(number, ranks.handle) for number in STOP_SIGNALS}
    try:
        return _keep_alive(partial(spawn, work, world), checkpoints, ranks, max_fruitless)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.first, stop.at_once = told


def _keep_alive(spawn: Callable[..., list[int]], checkpoints: Path, ranks: _Ranks, max_fruitless: int) -> int:
    fruitless, seen = 0, _newest(checkpoints)
    while True:
        try:
            codes = spawn(
                seconds=inf,
                collective_timeout=ranks.patience,
                grace=0.3,
                deadline=ranks.deadline,
                in_rank=ranks.stop.in_rank,
                started=ranks.started,
            )
            return max(codes)
        except RankError as error:
            newest, said = _newest(checkpoints), str(error).splitlines()[0]
            if ranks.stop and not error.mendable:
                why = "" if ranks.ended_at_once else f" ({said})"
                print_stderr(f"stopped without another checkpoint{why}; the same command resumes from {_named(newest)}")
                return INTERRUPTED
            if error.mendable:
                raise
            fruitless = 0 if newest != seen else fruitless + 1
            seen = newest
            if fruitless >= max_fruitless:
                raise TrainingError(
                    f"given up after {fruitless} starts without a new checkpoint; the last failure: {error}"
                ) from None
            print_stderr(f"{said}; restarting from {_named(seen)}")
            ranks.restarting = True


def _named(checkpoint: str) -> str:
    return checkpoint or "the beginning"


def _newest(checkpoints: Path) -> str:
    """The newest committed step's name; committing is a rename, so a name is enough."""
    names = [path.name for path in checkpoints.glob("step_*") if path.suffix == ""]
    return max(names, default="")
