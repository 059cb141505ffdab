"""Keep a run alive on this machine: start its ranks, and start them again when one is lost.

The process that supervises has imported everything and computes nothing, so starting ranks anew is a fork, not an
import: a fraction of a second. Each start takes up the newest checkpoint. A fault that comes back each time is not
survivable by trying again, so a few starts in a row without a new checkpoint end it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import FrameType

from moefold.comm.launch import fork_ranks
from moefold.errors import RankError, TrainingError

MOST_FRUITLESS = 3


class _Ranks:
    """Passes a signal on to the ranks that are alive now."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def started(self, pids: list[int]) -> None:
        self.pids = pids

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def supervise(
    work: Callable[[int], int], world: int, checkpoints: Path, patience: float, most_fruitless: int = MOST_FRUITLESS
) -> int:
    """Run ``work(rank) -> exit code`` on ``world`` ranks until they end by themselves; returns their exit code."""
    ranks, fruitless, seen = _Ranks(), 0, _newest(checkpoints)
    # A terminal sends Ctrl-C to the ranks itself; SIGTERM comes to this process alone.
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, ranks.pass_on),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
    }
    try:
        while True:
            try:
                return max(fork_ranks(work, world, seconds=inf, patience=patience, grace=0.3, started=ranks.started))
            except RankError as error:
                if error.mendable:
                    raise
                newest = _newest(checkpoints)
                fruitless = 0 if newest != seen else fruitless + 1
                seen = newest
                if fruitless >= most_fruitless:
                    raise TrainingError(
                        f"given up after {fruitless} starts without a new checkpoint; the last failure: {error}"
                    ) from None
                print(
                    f"moefold: {str(error).splitlines()[0]}; starting again from {seen or 'the beginning'}",
                    file=sys.stderr,
                )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _newest(checkpoints: Path) -> str:
    """The newest committed step's name; committing is a rename, so a name is enough."""
    names = [path.name for path in checkpoints.glob("step_*") if path.suffix == ""]
    return max(names, default="")
