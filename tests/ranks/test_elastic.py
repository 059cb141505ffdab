"""Places that are lost for good: spares take over, then the run goes on with fewer ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moefold.comm.spawn import spawn_ranks
from moefold.errors import ExclusionError, TrainingError
from moefold.train.fault_tolerance.supervise import PLACE_VARIABLE, SmallerWorld, supervise


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("this place is broken")


class Toy:
    """Work in which broken places break at once, and the others end by themselves; counts the starts."""

    def __init__(self, broken: set[int], how: Callable[[], None]) -> None:
        self.broken, self.how, self.starts = broken, how, 0

    def __call__(self, rank: int) -> int:
        if int(os.environ[PLACE_VARIABLE]) in self.broken:
            self.how()
        return 0

    def spawn(self, *args: Any, **words: Any) -> list[int]:
        self.starts += 1
        return spawn_ranks(*args, **words)


def half(left: int) -> SmallerWorld:
    if left < 2:
        raise TrainingError(f"only {left}")
    return SmallerWorld(left - left % 2, "dp2")


@pytest.mark.parametrize("how", [die, fail])
def test_a_place_that_fails_every_start_is_taken_out(
    how: Callable[[], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    work = Toy({2}, how)
    assert supervise(work, 4, tmp_path, 20.0, 2, spawn=work.spawn, shrink=half) == 0
    assert work.starts == 3
    said = capfd.readouterr().err.splitlines()
    assert "rank 2" in said[0] and said[0].endswith("restarting from the beginning")
    assert said[-1].endswith("rank 2 is gone; going on with world 2: dp2 from the beginning")


def test_places_that_die_together_are_taken_out_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = Toy({1, 3}, die)
    assert supervise(work, 4, tmp_path, 20.0, 2, spawn=work.spawn, shrink=half) == 0
    said = capfd.readouterr().err.splitlines()[-1]
    # A loaded machine may let the second die after the first was noticed; it is a spare then.
    assert "gone; going on with world 2" in said and work.starts == 3


def test_spares_take_over_first_and_keep_the_layout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = Toy({1}, die)
    assert supervise(work, 3, tmp_path, 20.0, 2, spawn=work.spawn, spares=2) == 0
    said = capfd.readouterr().err.splitlines()[-1]
    assert "rank 1 is gone (lost place 1): spare place 4 takes over rank 1; 1 spare left; going on from" in said


def test_a_rank_that_is_excluded_is_not_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def exclude() -> None:
        raise ExclusionError("rank 3 is slow", (3,))

    work = Toy({0, 1, 2, 3}, exclude)

    def shrink(left: int) -> SmallerWorld:
        assert left == 3
        work.broken = set()
        return half(left)

    assert supervise(work, 4, tmp_path, 20.0, spawn=work.spawn, shrink=shrink) == 0
    assert work.starts == 2
    assert "rank 3 is slow; rank 3 is gone; going on with world 2" in capfd.readouterr().err


def test_a_fault_that_follows_its_rank_ends_the_run(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        if rank == 1:
            die()
        return 0

    with pytest.raises(TrainingError, match="given up after 2 starts"):
        supervise(work, 2, tmp_path, 20.0, max_fruitless=2, spares=3)


def test_a_fault_of_every_place_ends_the_run(tmp_path: Path) -> None:
    work = Toy({0, 1}, die)
    with pytest.raises(TrainingError, match="given up after 2 starts"):
        supervise(work, 2, tmp_path, 20.0, 2, spawn=work.spawn, shrink=half)


def test_too_few_places_end_the_run_and_say_why(tmp_path: Path) -> None:
    work = Toy({1}, die)
    with pytest.raises(TrainingError, match="rank 1 is gone, and the run cannot go on: only 1"):
        supervise(work, 2, tmp_path, 20.0, 2, spawn=work.spawn, shrink=half)
