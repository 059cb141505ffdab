"""Supervise local ranks: start them, and restart all of them from the newest checkpoint when one is lost.

The supervising process has imported everything and computes nothing, so a restart is a fork, not an import: a fraction
of a second. A fault that recurs on every start is not cured by restarting, so a few starts in a row without a new
checkpoint end the run; unless it is the same places that failed, while the others did not.

Ranks run at places. A place is lost for good when it has failed that often, while at least half of them have not, or
once less if no step was done in the last start, or when a `RankError` says that its rank is excluded. Lost places are
not used again by this launcher. Spare places take over first, in the same layout; when there are none, ``shrink``
chooses a layout for the places that are left. A fault that follows a rank to another place is the run's own, and ends
it.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from moefold.comm.spawn import spawn_ranks
from moefold.errors import RankError, TrainingError, name_ranks
from moefold.train.fault_tolerance.signals import INTERRUPTED, STOP_SIGNALS, StopRequest, print_stderr, tell_first

MAX_FRUITLESS_STARTS = 3
# A rank reads the number of its place here.
PLACE_VARIABLE = "MOEFOLD_PLACE"


class SmallerWorld(NamedTuple):
    """How many ranks the run goes on with, and its layout in words."""

    world: int
    layout: str


# From the number of places that are left; raises a `TrainingError` if the run must not go on with so few.
Shrink = Callable[[int], SmallerWorld]


class Places:
    """Where ranks run: rank r at place ``left[r]``. Those beyond the world are spares."""

    def __init__(self, world: int, spares: int = 0) -> None:
        self.world, self.left = world, list(range(world + spares))
        self._failed: dict[int, int] = {}
        # Ranks whose place was lost, and places that have failed at all, since the last checkpoint.
        self._given_up: set[int] = set()
        self._suspects: set[int] = set()

    def of(self, ranks: Iterable[int]) -> list[int]:
        return [self.left[rank] for rank in ranks if rank < self.world]

    def lost(self, error: RankError, progressed: bool, max_failed: int) -> tuple[int, ...]:
        """Ranks whose places are lost for good by this failure of a start; ``progressed``: it has saved a checkpoint.

        The same rank of the same layout lost twice without progress in between is not the fault of its places.
        """
        if progressed:
            self._failed, self._given_up, self._suspects = {}, set(), set()
        if len(error.ranks) < self.world:
            self._suspects.update(self.of(error.ranks))
        if error.exclude:
            return tuple(sorted(rank for rank in error.exclude if rank < self.world))
        if not progressed and len(error.ranks) < self.world:
            for place in self.of(error.ranks):
                self._failed[place] = self._failed.get(place, 0) + 1
        # What fails everywhere is not the fault of places.
        if not self._few_failed:
            return ()
        # Before the first step, the data and most of the code are not yet to blame, so one failure less is enough.
        enough = max_failed - error.at_once
        ranks = tuple(rank for rank in error.ranks if self._failed.get(self.left[rank], 0) >= enough)
        if self._given_up.intersection(ranks):
            return ()
        self._given_up.update(ranks)
        return ranks

    @property
    def _few_failed(self) -> bool:
        return 2 * len(self._failed) <= self.world

    @property
    def more_starts(self) -> int:
        """Of several places that are lost at the same time, a start may show but one."""
        return max(0, len(self._failed) - 1) if self._few_failed else 0

    def take_out(self, ranks: Iterable[int]) -> None:
        """Spares take over from the last on, so that all other ranks stay where they are, as long as there are any."""
        for place in self.of(ranks):
            if len(self.left) > self.world:
                self.left[self.left.index(place)] = self.left.pop()
            else:
                self.left.remove(place)
                self.world -= 1

    def resize(self, world: int) -> None:
        """Another layout, in which ranks have other work; places that have failed as well are the last to be used."""
        self.left.sort(key=lambda place: place in self._suspects)
        self.world, self._failed, self._given_up = world, {}, set()


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
    spares: int = 0,
    shrink: Shrink | None = None,
    memory: Path | None = None,
) -> int:
    """Run ``work(rank) -> exit code`` on ``world`` ranks until they end by themselves; returns their exit code.

    ``stop`` is set by signals, and shared between this process and its ranks. ``spawn`` is called as ``spawn_ranks``;
    that of a `Watchdog` ends ranks that hang. Without ``spares`` and ``shrink``, the run ends when a place is lost.
    ``memory`` is where copies of checkpoints are kept in memory, from which ranks resume if they are newer.
    """
    stop = StopRequest() if stop is None else stop
    told = stop.first, stop.at_once
    ranks, places = _Ranks(stop, patience), Places(world, spares)

    def at_place(rank: int) -> int:
        os.environ[PLACE_VARIABLE] = str(places.left[rank])
        return work(rank)

    def start() -> int:
        codes = spawn(
            at_place,
            places.world,
            seconds=inf,
            collective_timeout=patience,
            grace=0.3,
            deadline=ranks.deadline,
            in_rank=stop.in_rank,
            started=ranks.started,
        )
        return max(codes)

    before = {number: signal.signal(number, ranks.handle) for number in STOP_SIGNALS}
    try:
        return _keep_alive(start, partial(_newest, checkpoints, memory), ranks, max_fruitless, places, shrink)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.first, stop.at_once = told


def _keep_alive(
    start: Callable[[], int],
    find_newest: Callable[[], str],
    ranks: _Ranks,
    max_fruitless: int,
    places: Places,
    shrink: Shrink | None,
) -> int:
    fruitless, seen = 0, find_newest()
    while True:
        try:
            return start()
        except RankError as error:
            newest, said = find_newest(), str(error).splitlines()[0]
            if ranks.stop and not error.mendable:
                why = "" if ranks.ended_at_once else f" ({said})"
                print_stderr(f"stopped without another checkpoint{why}; the same command resumes from {_named(newest)}")
                return INTERRUPTED
            if error.mendable:
                raise
            progressed = newest != seen
            fruitless, seen = 0 if progressed else fruitless + 1, newest
            lost = places.lost(error, progressed, max_fruitless)
            if lost and (error.exclude or len(places.left) > places.world or shrink is not None):
                going_on = _without(places, lost, shrink, error)
                fruitless = 0
                print_stderr(f"{said}; {going_on} from {_named(seen)}")
            elif fruitless >= max_fruitless + (0 if shrink is None else places.more_starts):
                raise TrainingError(
                    f"given up after {fruitless} starts without a new checkpoint; the last failure: {error}"
                ) from None
            else:
                print_stderr(f"{said}; restarting from {_named(seen)}")
            ranks.restarting = True


def _without(places: Places, lost: tuple[int, ...], shrink: Shrink | None, error: RankError) -> str:
    """Take the places of these ranks out, and say how the run goes on."""
    world, before = places.world, list(places.left)
    places.take_out(lost)
    gone = f"{name_ranks(lost)} {'are' if len(lost) > 1 else 'is'} gone"
    if places.world == world:
        moved = ", ".join(f"{places.left[rank]} takes over rank {rank}" for rank in lost)
        spare = f"; {len(places.left) - world} spare left" if len(places.left) > world else "; no spare is left"
        return (
            f"{gone} (lost place {', '.join(str(before[rank]) for rank in lost)}): spare place {moved}{spare}; going on"
        )
    if shrink is None:
        raise TrainingError(f"{gone}, and there is no spare place; the failure: {error}") from None
    try:
        chosen = shrink(len(places.left))
    except TrainingError as reason:
        raise TrainingError(f"{gone}, and the run cannot go on: {reason}; the failure: {error}") from None
    places.resize(chosen.world)
    return f"{gone}; going on with world {chosen.world}: {chosen.layout}"


def _named(checkpoint: str) -> str:
    return checkpoint or "the beginning"


def _newest(checkpoints: Path, memory: Path | None = None) -> str:
    """The newest committed step's name, and whether only memory has it; committing is a rename, so names are enough."""
    on_disk, in_memory = (
        [path.name for path in root.glob("step_*") if path.suffix == ""] if root is not None else []
        for root in (checkpoints, memory)
    )
    # As numbers: from step 100,000,000 on, a name has more than eight digits.
    name = max((*on_disk, *in_memory), key=lambda name: (len(name), name), default="")
    return name if name in ("", *on_disk) else f"{name} in memory"
