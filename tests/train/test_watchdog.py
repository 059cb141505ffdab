"""The parts of the watchdog without ranks: what a heartbeat keeps, what is learned, and whom evidence names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from moefold.comm.heartbeat import ENTRIES, PHASES, RECENT_STEPS, STEP_PHASES, Entry, Heartbeat, Pulse, RankRecord
from moefold.comm.process_groups import Ledger
from moefold.comm.process_probe import is_stopped, network_of, state_of
from moefold.config.train import WatchdogConfig
from moefold.errors import RankError
from moefold.train.fault_tolerance import watchdog as watchdog_file
from moefold.train.fault_tolerance.hang_diagnosis import RankEvidence, Verdict, diagnose, mismatch, waits, where
from moefold.train.fault_tolerance.watchdog import MAX_REPORTS, Watchdog, learned_limit

COMMUNICATORS = {"world": "0", "dp": "0", "ep": "7"}


def test_a_forked_process_is_read_while_it_is_stopped() -> None:
    beat = Heartbeat()
    child = os.fork()
    if not child:
        beat.begin()
        beat.attach(COMMUNICATORS)
        ledger = Ledger(on_record=beat.collective)
        beat.enter("data", 5)
        beat.enter("step", 5)
        for number in range(ENTRIES + 50):
            ledger.record("all_reduce", "dp" if number % 2 else "world", torch.zeros(2, 3))
        ledger.record("all_to_all", "ep", torch.zeros(4, dtype=torch.int64))
        ledger.record("send", "pp", torch.zeros(9))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        deadline = time.monotonic() + 30
        while not is_stopped(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        record = beat.read()
        assert state_of(child) == "T" and record.pulse.pid == child
        assert (record.pulse.step, record.pulse.phase) == (5, "step")
        # Two names of one communicator are counted together; sends are not counted.
        assert record.counts == {"0": ENTRIES + 50, "7": 1} and record.communicators == COMMUNICATORS
        assert len(record.entries) == ENTRIES and record.entries[0].number == 53
        assert str(record.entries[-2]) == "all_to_all #1 over ep, int64[4]"
        assert record.entries[-1].operation == "send" and record.entries[-1].shape == (9,)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    beat.reset()
    assert beat.pulse().beats == 0 and beat.read().entries == ()


def test_two_threads_lose_no_entry() -> None:
    beat = Heartbeat()
    beat.attach(COMMUNICATORS)
    tensor = torch.zeros(1)
    work = [
        threading.Thread(target=lambda: [beat.collective("all_reduce", "ep", tensor) for _ in range(2000)])
        for _ in range(2)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert beat.read().counts["7"] == 4000
    assert [entry.number for entry in beat.read().entries] == list(range(4001 - ENTRIES, 4001))


def test_step_times_are_without_the_first_step_and_without_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("moefold.comm.heartbeat.time.monotonic", lambda: now[0])
    beat = Heartbeat()
    for step in range(1, 30):
        for phase in PHASES[1:]:
            beat.enter(phase, step)
            now[0] += (60.0 if step == 1 else 2.0) if phase == "step" else 0.5
    pulse = beat.pulse()
    others = 0.5 * (len(STEP_PHASES) - 1)
    assert pulse.recent_steps == pytest.approx([2.0 + others] * RECENT_STEPS)
    assert pulse.longest["step"] == 60.0


# ---- patience ----


def pulse(phase: str = "step", step: int = 9, recent: tuple[float, ...] = (0.1,), **longest: float) -> Pulse:
    return Pulse(1, 1, phase, step, longest, recent)


DEFAULT = WatchdogConfig()


@pytest.mark.parametrize(
    ("pulses", "least", "most"),
    [
        # Within max(10 s, 5 steps), and never much earlier.
        ([pulse()] * 2, 9, 10),
        ([pulse(recent=(0.1, 60.0)), pulse()], 230, 300),
        # Nothing to learn from: the patience.
        ([pulse(recent=())] * 2, 600, 600),
        ([pulse("set-up", 0, ())] * 2, 600, 600),
        # A callback or a disk takes its time, and those who wait for it are patient.
        ([pulse("after step"), pulse("agreement")], 600, 600),
        ([pulse("checkpoint"), pulse("commit")], 600, 600),
        # One that is behind in a step is hung, wherever the others wait for it.
        ([pulse("update"), pulse("checkpoint")], 9, 10),
        # Validation: its own length, once it is known.
        ([pulse("validation")] * 2, 600, 600),
        ([pulse("validation", validation=20.0)] * 2, 75, 100),
    ],
)
def test_patience_is_learned(pulses: list[Pulse], least: float, most: float) -> None:
    assert least <= learned_limit(pulses, DEFAULT, 600.0) <= most


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog_file, "time", clock)
    return clock


def hung(path: Path) -> Watchdog:
    """One rank that has done two steps and is silent since."""
    found = Watchdog(1, WatchdogConfig(seconds=2.0), 600.0, path)
    # No process has this number.
    found._pids = [1 << 30]
    for step in (1, 2, 3):
        found.heartbeats[0].enter("data", step)
        found.heartbeats[0].enter("step", step)
    found.check()
    return found


def polls_until_alarm(watched: Watchdog, clock: Clock) -> tuple[float, RankError]:
    began = clock.now
    for _ in range(10_000):
        clock.now += 0.2
        if (error := watched.check()) is not None:
            return clock.now - began, error
    raise AssertionError("no alarm")


def test_a_pause_of_the_whole_machine_is_no_hang(tmp_path: Path, clock: Clock) -> None:
    with closing(hung(tmp_path)) as watched:
        clock.now += 3600
        assert watched.check() is None
        seconds, error = polls_until_alarm(watched, clock)
        assert seconds < 2.0 and "no rank progressed" in str(error)


def test_a_beat_is_progress(tmp_path: Path, clock: Clock) -> None:
    with closing(hung(tmp_path)) as watched:
        for _ in range(100):
            clock.now += 0.2
            watched.heartbeats[0].enter("update", 3)
            assert watched.check() is None


def test_reports_are_few_and_a_disk_that_takes_none_is_told(tmp_path: Path, clock: Clock) -> None:
    for _ in range(MAX_REPORTS + 3):
        with closing(hung(tmp_path)) as watched:
            polls_until_alarm(watched, clock)
    names = sorted(path.name for path in (tmp_path / "hangs").iterdir())
    assert len(names) == MAX_REPORTS and names[-1] == f"hang_{MAX_REPORTS + 3:04d}.json"
    blocked = tmp_path / "file"
    blocked.write_text("")
    with closing(hung(blocked)) as watched:
        _, error = polls_until_alarm(watched, clock)
    assert "no report: " in str(error)


# ---- whom evidence names ----

HEADER = "Current thread 0x1 (most recent call first):\n"
WAITS = HEADER + '  File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n'
BUSY = 'Thread 0x2 (most recent call first):\n  File "/x/a.py", line 1 in f\n\nThread 0x1 (most recent call first):\n'
BUSY += '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n  File "/x/user/loader.py", line 5 in read\n'
HANDLE = HEADER + '  File "/x/moefold/parallel/flat.py", line 3 in finish\n'


def source(path: str, line: int) -> str:
    return "    work.wait()\n" if path.endswith("flat.py") else "    compute()\n"


def test_stacks_tell_who_waits() -> None:
    assert waits(WAITS, source) and waits(HANDLE, source) and not waits(BUSY, source)
    assert where(BUSY) == "read (user/loader.py:5)"


def call(number: int, shape: tuple[int, ...] = (3,), operation: str = "all_reduce", group: str = "world") -> Entry:
    return Entry(number, 4, float(number), operation, group, "float32", shape)


def rank(
    number: int, *entries: Entry, stacks: str = WAITS, state: str = "S", step: int = 4, **more: int
) -> RankEvidence:
    counts = {"0": sum(entry.group != "ep" for entry in entries), **more}
    return RankEvidence(number, RankRecord(pulse(step=step), dict(COMMUNICATORS), counts, entries), state, stacks)


ALL, SOME = [call(1), call(2), call(3)], [call(1), call(2)]
CASES = {
    "stopped": ([rank(0, *ALL), rank(1, *SOME, stacks="", state="T"), rank(2, *ALL)], (1,)),
    "behind": ([rank(0, *ALL), rank(1, *ALL), rank(2, *SOME, stacks=BUSY)], (2,)),
    # Rank 1 waits for rank 0, which waits in a collective that the ledger does not have for rank 2.
    "busy": ([rank(0, *ALL, p=1), rank(1, *ALL, p=2), rank(2, *ALL, stacks=BUSY)], (2,)),
    # A circle: three wait for rank 1, which waits for rank 0.
    "circle": ([rank(0, *ALL, p=1), rank(1, *SOME, p=2), rank(2, *ALL), rank(3, *ALL)], (1,)),
    "mismatch": ([rank(0, *ALL), rank(1, call(1), call(2, (4,))), rank(2, *ALL)], (1,)),
    "operation": ([rank(0, *ALL), rank(1, *ALL), rank(2, call(1), call(2, operation="all_gather"))], (2,)),
    "nobody": ([rank(0, *ALL), rank(1, *ALL)], ()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_culprit_is_named(case: str) -> None:
    ranks, culprits = CASES[case]
    verdict = diagnose(ranks, source)
    assert verdict.culprits == culprits
    assert all(f"rank {number} " in verdict.sentence for number in culprits)


def test_exchanges_of_uneven_rows_are_no_mismatch() -> None:
    sent = [rank(n, call(1, (n, 8), "all_to_all"), call(1, (n,), "send", "pp")) for n in range(3)]
    assert mismatch(sent) is None


def test_two_of_two_minds_are_decided_by_their_neighbours_or_both_are_named() -> None:
    def pair(number: int, communicator: str, shape: tuple[int, ...]) -> RankEvidence:
        return RankEvidence(
            number,
            RankRecord(pulse(), {"ep": communicator}, {communicator: 1}, (call(1, shape, group="ep"),)),
            "S",
            WAITS,
        )

    alone = [pair(0, "a", (3,)), pair(1, "a", (4,))]
    verdict = mismatch(alone)
    assert verdict is not None and verdict.culprits == (0, 1)
    verdict = mismatch([*alone, pair(2, "b", (3,)), pair(3, "b", (3,))])
    assert verdict is not None and verdict.culprits == (1,)
    assert "where rank 0 called all_reduce #1 over ep, float32[3]" in verdict.sentence


def test_a_route_that_is_gone_names_the_ranks_behind_it() -> None:
    cut = "no route to 10.0.0.1: its interface is down"
    ranks = [rank(0, *ALL), rank(1, *ALL)._replace(network=(cut,))]
    assert diagnose(ranks, source)[:2] == ("network", (1,))
    # Behind is who did not receive the last message, on either side.
    late = [rank(0, *ALL[:-1]), rank(1, *ALL)._replace(network=(cut,))]
    assert diagnose(late, source)[:2] == ("network", (1,))
    slow = [rank(0, *ALL[:-1]), rank(1, *ALL)._replace(network=("7 bytes to 10.0.0.1 without an answer",))]
    assert diagnose(slow, source)[:2] == ("behind", (0,))
    assert isinstance(diagnose(ranks, source), Verdict)


def test_processes_are_probed_from_outside() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            assert state_of(child.pid) in ("R", "S", "D") and network_of(child.pid) == ()
        finally:
            child.kill()
    assert state_of(child.pid) == "" and network_of(child.pid) == ()


def test_a_launcher_of_a_later_host_blames_its_own_ranks_by_their_places(tmp_path: Path) -> None:
    """Messages have the numbers of all hosts' ranks, places those of this host; supervising reads the latter."""
    with closing(Watchdog(2, WatchdogConfig(seconds=2.0), 600.0, tmp_path, first_rank=2)) as watchdog:
        assert watchdog._places(Verdict("behind", (3,), "rank 3 is behind")) == (1,)
        assert watchdog._places(Verdict("mismatch", (0, 2), "ranks differ")) == (0,)
