"""Notice that a run hangs, say which rank is to blame, and have all ranks ended.

The launcher polls its ranks' heartbeats (`comm/heartbeat.py`). A hang is a time in which *no* rank has a beat: a rank
that is held up soon holds up all others, and one that still computes is not hung. How long such a time may be is
learned: a few times the slowest recent step, and at least some seconds. Before there is a step to learn from, and while
a rank is in a callback or waits for a disk, ``--patience`` is the limit. A process that the kernel says is stopped, and
ranks that have called different collectives, are noticed after the same few seconds in any phase.

The time is counted in polls, each for a second at most. When the whole machine pauses, so does this process, and
nothing is alarmed afterwards. No wall clock is read.

A hang becomes a `RankError`, which restarts the ranks as any other failure does. Before they are ended, their Python
stacks are written by `faulthandler` on a signal, which needs neither the GIL nor a running main thread, and everything
is left in ``hangs/`` of the run's directory.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moefold.comm.heartbeat import STEP_PHASES, Heartbeat, Pulse
from moefold.comm.process_probe import is_stopped, network_of, state_of
from moefold.comm.spawn import Join, spawn_ranks
from moefold.config.train import WatchdogConfig
from moefold.errors import RankError
from moefold.train.fault_tolerance.hang_diagnosis import RankEvidence, Verdict, diagnose, mismatch

# What a poll may add to the time without a beat; they are a fifth of a second apart, unless the machine is busy.
_MAX_POLL_SECONDS = 1.0
FOLDER = "hangs"
MAX_REPORTS = 20
# No program gives this signal a meaning of its own, as some do with SIGUSR1 and SIGUSR2.
STACKS_SIGNAL = signal.SIGRTMIN + 7
_MAX_STACK_BYTES = 256 << 10
_STACK_SECONDS = 1.0
_MARGIN_SECONDS = 0.5


def learned_limit(pulses: Sequence[Pulse], config: WatchdogConfig, patience: float) -> float:
    """How many seconds without a beat are a hang.

    The phase of the least advanced rank counts: the others are in theirs because they wait for it.
    """
    last = min(pulses, key=lambda pulse: pulse.progress)
    longest = slowest_step(pulses)
    if last.phase == "validation" and last.phase in last.longest:
        longest = max(longest, last.longest[last.phase])
    elif last.phase not in STEP_PHASES:
        return patience
    return min(_below_bound(config, longest), patience) if longest else patience


def slowest_step(pulses: Sequence[Pulse]) -> float:
    """Of the recent ones of all ranks, in seconds; 0 if none has ended."""
    return max((seconds for pulse in pulses for seconds in pulse.recent_steps), default=0.0)


def _below_bound(config: WatchdogConfig, step: float) -> float:
    """Below ``seconds`` and ``steps`` by what a hang takes besides: the other ranks go on for up to a step before they
    wait as well, and stacks are collected."""
    bound = max(config.seconds, config.steps * step)
    return max(bound - step - _MARGIN_SECONDS, bound / 2)


class Watchdog:
    """Of the ranks of one launcher. ``enter`` is called in a rank, everything else in the launcher."""

    def __init__(
        self, world: int, config: WatchdogConfig, patience: float, directory: Path, first_rank: int = 0
    ) -> None:
        self.config, self.patience, self.directory, self.first_rank = config, patience, directory, first_rank
        self.heartbeats = [Heartbeat() for _ in range(world)]
        self._stacks = [os.memfd_create(f"moefold-stacks-{rank}") for rank in range(world)]
        self._pids: list[int] = []
        self._beats: tuple[int, ...] = ()
        self._differ: bool | None = None
        self._quiet, self._polled = 0.0, time.monotonic()
        self.verdict: Verdict | None = None

    def close(self) -> None:
        for descriptor in self._stacks:
            os.close(descriptor)

    def enter(self, rank: int) -> Heartbeat:
        """In the rank: write stacks when asked to, and start to beat."""
        faulthandler.register(STACKS_SIGNAL, file=self._stacks[rank], all_threads=True, chain=False)
        self.heartbeats[rank].begin()
        return self.heartbeats[rank]

    def spawn(
        self,
        work: Callable[[int], int],
        world: int,
        *,
        seconds: float,
        collective_timeout: float,
        grace: float,
        deadline: Callable[[], float],
        in_rank: Callable[[], None],
        started: Callable[[list[int]], None],
        interface: Callable[[int], str] | None = None,
        join: Join | None = None,
    ) -> list[int]:
        """`spawn_ranks`, watched: a hang is a `RankError`, and one that comes of a mismatch names who is to blame."""

        def also(pids: list[int]) -> None:
            self._pids = pids
            started(pids)

        self._reset()
        try:
            return spawn_ranks(
                work,
                world,
                seconds=seconds,
                collective_timeout=collective_timeout,
                grace=grace,
                deadline=deadline,
                watch=self.check,
                in_rank=in_rank,
                started=also,
                interface=interface,
                join=join,
            )
        except RankError as error:
            explained = self.explain(error)
            explained.at_once = not slowest_step([heartbeat.pulse() for heartbeat in self.heartbeats])
            raise explained from None

    def _reset(self) -> None:
        for heartbeat, descriptor in zip(self.heartbeats, self._stacks, strict=True):
            heartbeat.reset()
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
        self._beats, self._differ, self.verdict = (), None, None
        self._quiet, self._polled = 0.0, time.monotonic()

    def check(self) -> RankError | None:
        """Called often; a `RankError` once the ranks hang."""
        if not self.config.seconds:
            return None
        now = time.monotonic()
        passed, self._polled = min(now - self._polled, _MAX_POLL_SECONDS), now
        pulses = [heartbeat.pulse() for heartbeat in self.heartbeats]
        beats = tuple(pulse.beats for pulse in pulses)
        if beats != self._beats:
            self._beats, self._quiet, self._differ = beats, 0.0, None
            return None
        self._quiet += passed
        limit = learned_limit(pulses, self.config, self.patience)
        if self._quiet >= (soon := _below_bound(self.config, slowest_step(pulses))) and self._is_certain():
            limit = min(limit, soon)
        return self._hang(self._quiet, limit) if self._quiet >= limit else None

    def _is_certain(self) -> bool:
        """Whether this is a hang in any phase: a rank is stopped, or has called another collective than its peers."""
        if any(map(is_stopped, self._pids)):
            return True
        if self._differ is None:
            # Records do not change while there is no beat.
            self._differ = mismatch(self._recorded()) is not None
        return self._differ

    def _recorded(self) -> list[RankEvidence]:
        return [RankEvidence(rank, beat.read()) for rank, beat in enumerate(self.heartbeats, self.first_rank)]

    def explain(self, error: RankError) -> RankError:
        """A failure that came of different collectives, with the rank that called another one than its peers.

        The first rank to fail is often not to blame: it received what it could not use.
        """
        if self.verdict is not None or error.mendable or error.exclude:
            return error
        ranks = self._recorded()
        if (verdict := mismatch(ranks)) is None:
            return error
        self.verdict = verdict
        left = self._write(ranks, verdict, str(error))
        return RankError(f"{verdict.sentence} ({left}); {error}", ranks=self._places(verdict))

    def _hang(self, quiet: float, limit: float) -> RankError:
        # The signal for stacks may wake a rank that sleeps in the kernel, so everything else is read before it.
        ranks = [
            rank._replace(state=state_of(pid), network=network_of(pid))
            for rank, pid in zip(self._recorded(), self._pids, strict=True)
        ]
        ranks = [rank._replace(stacks=text) for rank, text in zip(ranks, self._collect_stacks(), strict=True)]
        self.verdict = diagnose(ranks, linecache.getline)
        what = f"no rank progressed for {quiet:.1f} s (limit {limit:.1f} s)"
        left = self._write(ranks, self.verdict, what)
        return RankError(f"hang: {what}: {self.verdict.sentence} ({left})", ranks=self._places(self.verdict))

    def _places(self, verdict: Verdict) -> tuple[int, ...]:
        """Culprits as this launcher counts its ranks; those of other hosts are not its own to take out."""
        return tuple(rank - self.first_rank for rank in verdict.culprits if rank >= self.first_rank)

    def _collect_stacks(self) -> list[str]:
        """Of all ranks that answer in time. A stopped one does not: the signal waits until it continues."""
        asked = [
            descriptor
            for heartbeat, pid, descriptor in zip(self.heartbeats, self._pids, self._stacks, strict=True)
            if heartbeat.pulse().pid == pid and not is_stopped(pid) and _sent(pid)
        ]
        ends, sizes = time.monotonic() + _STACK_SECONDS, [-1]
        while time.monotonic() < ends:
            time.sleep(0.05)
            before, sizes = sizes, [os.fstat(descriptor).st_size for descriptor in asked]
            if all(sizes) and sizes == before:
                break
        return [os.pread(each, _MAX_STACK_BYTES, 0).decode(errors="replace").strip() for each in self._stacks]

    def _write(self, ranks: Sequence[RankEvidence], verdict: Verdict, what: str) -> str:
        """The report's path; a disk that takes no report does not keep the ranks from being restarted."""
        folder = self.directory / FOLDER
        report = {"what": what, **verdict._asdict(), "ranks": [_as_data(rank) for rank in ranks]}
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            taken = sorted(folder.glob("hang_*.json"))
            number = int(taken[-1].stem.removeprefix("hang_")) + 1 if taken else 1
            path = folder / f"hang_{number:04d}.json"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump(report, file, indent=1)
            for old in taken[: -MAX_REPORTS + 1]:
                old.unlink()
        except (OSError, ValueError) as error:
            return f"no report: {error}"
        return f"stacks and last collectives of all ranks: {path}"


def _sent(pid: int) -> bool:
    """Whether the rank was asked; only one that has registered its handler is, since the signal would end another."""
    try:
        os.kill(pid, STACKS_SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _as_data(rank: RankEvidence) -> dict[str, object]:
    record = rank.record
    return {
        "rank": rank.rank,
        **record.pulse._asdict(),
        "state": rank.state,
        "communicators": record.communicators,
        "collectives": record.counts,
        "last_entries": [entry._asdict() for entry in record.entries],
        "stacks": rank.stacks.splitlines(),
        "network": rank.network,
    }
