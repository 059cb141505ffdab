"""Ranks that hang are noticed in bound, the one to blame is named, and all are started again.

The fast tests hang four ranks that do nothing but beat and communicate; the slow ones hang real runs, and the nightly
one cuts the cable between two hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests import hang_draws
from tests.hang_draws import DEAD_NIC, KINDS, LAYOUTS, STEPS_PER_HANG, Hang, Measured, run_with_hangs, small_run
from tests.two_hosts import move_to, possible, two_hosts

from moefold.comm.collectives import all_reduce_ints
from moefold.comm.process_groups import Groups, Ledger
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.train import WatchdogConfig
from moefold.errors import RankError, TrainingError
from moefold.topology.folded_layout import fold
from moefold.train.fault_tolerance.supervise import supervise
from moefold.train.fault_tolerance.watchdog import Watchdog, slowest_step

WORLD, STEPS, SECONDS = 4, 6, 1.0
Step = Callable[[Groups, int], None]


def _sum(groups: Groups, numbers: int = 3) -> None:
    all_reduce_ints([1] * numbers, groups["world"])


def _sleeping_loader() -> None:
    loader = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
    loader.start()
    loader.join()


def _instead_of_nothing(do: Callable[[], object]) -> Step:
    def step(groups: Groups, rank: int) -> None:
        do()
        _sum(groups)

    return step


def _two_sums(groups: Groups, rank: int) -> None:
    _sum(groups)
    _sum(groups, 5)


def _one_of_them(groups: Groups, rank: int) -> None:
    _sum(groups, 5)


def _wider(groups: Groups, rank: int) -> None:
    _sum(groups, 7)
    _sum(groups, 5)


# What the culprit does in its step instead of `_two_sums`, and the evidence that names it.
TOY_KINDS: dict[str, tuple[Step, str]] = {
    "SIGSTOP": (_instead_of_nothing(lambda: os.kill(os.getpid(), signal.SIGSTOP)), "stopped"),
    "left-out collective": (_one_of_them, "mismatch"),
    "mismatched shape": (_wider, "mismatch"),
    "sleeping data loader": (_instead_of_nothing(_sleeping_loader), "behind"),
    "deadlocked thread": (_instead_of_nothing(hang_draws._lock_twice), "behind"),
    "GIL held": (_instead_of_nothing(hang_draws._hold_the_gil), "behind"),
    "endless loop": (_instead_of_nothing(hang_draws._loop_forever), "behind"),
    "blocked read": (_instead_of_nothing(lambda: os.read(os.pipe()[0], 1)), "behind"),
}


def _toy_work(watchdog: Watchdog, directory: Path, culprit: int, hang: Step | None) -> Callable[[int], int]:
    """A rank that steps and hangs in its fourth step, once."""

    def work(rank: int) -> int:
        heartbeat = watchdog.enter(rank)
        groups = Groups(fold(ParallelConfig(), WORLD), rank, Ledger(), timedelta(seconds=60))
        heartbeat.attach(groups.communicators())
        groups["world"].ledger.on_record = heartbeat.collective
        again = (directory / "began").exists()
        for number in range(1, STEPS + 1):
            heartbeat.enter("data", number)
            heartbeat.enter("step", number)
            if hang is not None and number == 4 and rank == culprit and not again:
                (directory / "began").write_text(repr(time.monotonic()))
                hang(groups, rank)
            else:
                _two_sums(groups, rank)
            heartbeat.enter("after step", number)
        return 0

    return work


@pytest.mark.parametrize("kind", TOY_KINDS)
def test_a_rank_that_hangs_is_named_and_all_are_started_again(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hang, evidence = TOY_KINDS[kind]
    culprit, noticed = 1 + len(kind) % 3, list[tuple[float, float]]()
    with closing(Watchdog(WORLD, WatchdogConfig(seconds=SECONDS), 60.0, tmp_path)) as watchdog:

        def spawn(*args: Any, **words: Any) -> list[int]:
            try:
                return watchdog.spawn(*args, **words)
            except RankError:
                slowest = slowest_step([heartbeat.pulse() for heartbeat in watchdog.heartbeats])
                noticed.append((time.monotonic() - float((tmp_path / "began").read_text()), max(SECONDS, 5 * slowest)))
                assert watchdog.verdict is not None
                assert (watchdog.verdict.kind, watchdog.verdict.culprits) == (evidence, (culprit,))
                raise

        work = _toy_work(watchdog, tmp_path, culprit, hang)
        assert supervise(work, WORLD, tmp_path / "checkpoints", 60.0, spawn=spawn) == 0
    ((seconds, bound),) = noticed
    # The seconds more are for a machine that does something else.
    assert seconds < 1.5 * bound + 5
    said = capfd.readouterr().err
    assert f"rank {culprit} " in said and "restarting from the beginning" in said
    (path,) = (tmp_path / "hangs").iterdir()
    report = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    assert [rank["rank"] for rank in report["ranks"]] == list(range(WORLD))
    for rank in report["ranks"]:
        assert rank["step"] == 4 and rank["last_entries"][-1]["group"] == "world"
    if evidence == "behind":
        assert all("File" in "".join(rank["stacks"]) for rank in report["ranks"])
    if kind == "SIGSTOP":
        assert report["ranks"][culprit]["state"] == "T" and not report["ranks"][culprit]["stacks"]


def test_the_same_hang_every_time_ends_the_run_by_the_policy_of_restarts(tmp_path: Path) -> None:
    with closing(Watchdog(WORLD, WatchdogConfig(seconds=0.5), 60.0, tmp_path)) as watchdog:
        inner = _toy_work(watchdog, tmp_path, 2, TOY_KINDS["deadlocked thread"][0])

        def work(rank: int) -> int:
            (tmp_path / "began").unlink(missing_ok=True)
            return inner(rank)

        with pytest.raises(TrainingError, match=r"2 starts without a new checkpoint.*hang: .*rank 2"):
            supervise(work, WORLD, tmp_path / "checkpoints", 60.0, max_fruitless=2, spawn=watchdog.spawn)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_jump_of_the_wall_clock_is_no_hang(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, began = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() + (jump if time.monotonic() - began > 0.2 else 0.0))
    with closing(Watchdog(WORLD, WatchdogConfig(seconds=0.5), 60.0, tmp_path)) as watchdog:
        slow = _toy_work(watchdog, tmp_path, 0, None)

        def work(rank: int) -> int:
            code = slow(rank)
            time.sleep(0.2)
            return code

        assert supervise(work, WORLD, tmp_path / "checkpoints", 60.0, spawn=watchdog.spawn) == 0
    assert not (tmp_path / "hangs").exists()


def test_without_seconds_nothing_is_watched(tmp_path: Path) -> None:
    with closing(Watchdog(2, WatchdogConfig(seconds=0.0), 60.0, tmp_path)) as watchdog:
        assert spawn_ranks(lambda rank: time.sleep(0.5), 2, watch=watchdog.check) == [None, None]
        assert watchdog.check() is None


# ---- real runs ----


def assert_measured(found: list[Measured]) -> None:
    wrong = [one for one in found if not one.named or one.noticed > 1.5 * one.bound]
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_run_that_hangs_goes_on_as_if_it_had_not(kind: str, tmp_path: Path) -> None:
    if kind == DEAD_NIC and not possible():
        pytest.skip("needs the right to make network namespaces")
    layout = list(LAYOUTS)[len(kind) % len(LAYOUTS)]
    steps, hang = 2 * STEPS_PER_HANG, Hang(kind, len(kind) % 4, 3, 1)
    measured, losses = run_with_hangs(small_run(tmp_path / "hung", layout, steps, 2.0), 4, [hang])
    assert_measured(measured)
    assert losses == run_with_hangs(small_run(tmp_path / "whole", layout, steps, 2.0), 4, [])[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_an_undisturbed_run_call_the_same_collectives(layout: str, tmp_path: Path) -> None:
    """No layout has members of a communicator that differ, so that a difference is always a fault."""
    from moefold.train.fault_tolerance.hang_diagnosis import RankEvidence, mismatch

    run, found = small_run(tmp_path, layout, 3, 0.0), []
    supervise_spawn = hang_draws.Watchdog.spawn

    def spawn(self: Watchdog, *args: Any, **words: Any) -> list[int]:
        codes = supervise_spawn(self, *args, **words)
        found.extend(RankEvidence(rank, beat.read()) for rank, beat in enumerate(self.heartbeats))
        return codes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hang_draws.Watchdog, "spawn", spawn)
        run_with_hangs(run, 4, [])
    assert len(found) == 4 and all(len(each.record.entries) > 20 for each in found)
    assert mismatch(found) is None


# ---- two hosts ----


@pytest.fixture
def hosts() -> Iterator[None]:
    if not possible():
        pytest.skip("needs the right to make network namespaces")
    with two_hosts("100mbit"):
        yield


@pytest.mark.nightly
def test_a_dead_network_interface_is_named(hosts: None, tmp_path: Path) -> None:
    def cut(groups: Groups, rank: int) -> None:
        subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
        _two_sums(groups, rank)

    def interface(rank: int) -> str:
        name = move_to(rank // 2)
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        return name

    verdicts = []
    with closing(Watchdog(WORLD, WatchdogConfig(seconds=3.0), 60.0, tmp_path)) as watchdog:
        work = _toy_work(watchdog, tmp_path, 2, cut)

        def spawn(*args: Any, **words: Any) -> list[int]:
            try:
                return watchdog.spawn(*args, **words, interface=interface)
            except RankError:
                verdicts.append(watchdog.verdict)
                raise

        assert supervise(work, WORLD, tmp_path / "checkpoints", 60.0, spawn=spawn) == 0
    (verdict,) = verdicts
    assert verdict is not None and verdict.kind == "network" and verdict.culprits == (2, 3)
