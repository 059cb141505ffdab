"""Places that are lost for good: spares take over, then the run goes on with fewer ranks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.loss_of_ranks import (
    BOUNDS,
    LAYOUTS,
    largest_difference,
    lines_of,
    measure,
    run_of,
    train_in_peace,
    train_with_losses,
)

from moefold.cli.main import main
from moefold.comm.spawn import spawn_ranks
from moefold.config.loading import load_run_file
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import ElasticConfig
from moefold.errors import ConfigError, ExclusionError, RankError, TrainingError
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.fault_tolerance.supervise import PLACE_VARIABLE, SmallerWorld, supervise
from moefold.train.trainer import Trainer


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
    # Ranks are ended soon after the first has died, so a start may show one of the two alone.
    assert "gone; going on with world 2" in said and work.starts in (3, 4)


def test_places_that_fail_in_turns_are_taken_out_one_by_one(tmp_path: Path) -> None:
    """Of several broken places, the first to raise is seen."""
    starts = iter([1, 3, 4, 3, 1, 1, 4, 4])

    def spawn(work: object, world: int, **words: object) -> list[int]:
        place = next(starts) if world > 2 else None
        if place is None:
            return [0]
        raise RankError("broken", ranks=[place])

    def shrink(left: int) -> SmallerWorld:
        return SmallerWorld(2, "dp2")

    assert supervise(lambda rank: 0, 8, tmp_path, 20.0, 2, spawn=spawn, shrink=shrink) == 0
    assert list(starts) == [1, 1, 4, 4]


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


# ---- real runs ----


def short_run(directory: Path, steps: int) -> RunConfig:
    run = run_of(directory, ParallelConfig(ep=4), "float64")
    return replace(run, train=replace(run.train, steps=steps, saving=replace(run.train.saving, keep=9)))


def fit(run: RunConfig, world: int, **words: Any) -> Trainer:
    trainer = Trainer(run, reporters=[JsonLines()], nproc=world, **words)
    assert trainer.fit() == "finished"
    return trainer


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """4 ranks, then 3, of which two can be used, then 4 again: the losses of 4 ranks all the way."""
    directory = tmp_path / "debug_tiny"
    with pytest.raises(ConfigError, match=r"parallel\.ep"):
        Trainer(short_run(tmp_path, 2), nproc=3)
    fit(short_run(tmp_path, 2), 4)
    fewer = fit(short_run(tmp_path, 4), 3)
    said = capfd.readouterr().err
    expected = "going on with world 2: ep2 dp2, 4 microbatches on each data-parallel rank; 1 rank stand by"
    assert f"3 ranks do not fold into ep4: {expected}" in said
    assert fewer.layout.world == 2
    # What was asked for stays the run's configuration; how a step was computed is in its record.
    assert load_run_file(directory / "config.yaml").parallel.ep == 4
    assert fit(short_run(tmp_path, 6), 4).layout.run.parallel.ep == 4
    run = short_run(tmp_path, 6)
    starts = [(line["world"], line["config"]["parallel"]["ep"], line.get("asked")) for line in lines_of(run, "start")]
    assert [start[:2] for start in starts] == [(4, 4), (2, 2), (4, 4)]
    assert starts[0][2] is starts[2][2] is None and starts[1][2]["world"] == 3
    assert main(["replay", str(directory), "--step", "4"]) == 0
    assert "replaying 2 steps from step 2 on 2 ranks" in capfd.readouterr().err
    shutil.rmtree(directory / "checkpoints" / "step_00000002")
    assert main(["replay", str(directory), "--step", "4"]) == 2
    assert "steps were taken in one layout and from step 2 on in another" in capfd.readouterr().err
    losses = [line["loss"] for line in lines_of(run, "step")]
    undisturbed = short_run(tmp_path / "undisturbed", 6)
    assert largest_difference(losses, train_in_peace(undisturbed, 4)) < 1e-9


def test_fewer_ranks_than_asked_for_at_least_end_the_run(tmp_path: Path) -> None:
    run = short_run(tmp_path, 2)
    trainer = Trainer(replace(run, train=replace(run.train, elastic=ElasticConfig(min_world=3))), nproc=4)
    with pytest.raises(TrainingError, match=r"of 4 places 2 are left, and train\.elastic\.min_world is 3"):
        trainer._shrink(2)
    trainer._shrink(3)
    assert trainer.layout.world == 3 and trainer.layout.run.parallel.pp == 3
    with pytest.raises(TrainingError, match="which means half of the ranks: 2"):
        Trainer(run, nproc=4)._shrink(1)
    with pytest.raises(ConfigError, match=r"train\.elastic\.min_world: is 3, and here are 2 ranks"):
        Trainer(replace(trainer.run, parallel=ParallelConfig(ep=2)), nproc=2)


def test_spares_belong_to_local_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no nproc"):
        Trainer(short_run(tmp_path, 2), spares=1)


@pytest.mark.slow
@pytest.mark.every_commit
def test_a_rank_of_eight_is_lost_for_good(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (row,) = measure("tp2 ep4", "float64", [1], tmp_path)
    assert row["world"] == 4 and row["difference"] < BOUNDS["float64"]
    assert "rank 3 is gone; going on with world 4" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spare_takes_over_bit_for_bit(layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = train_in_peace(run_of(tmp_path / "peace", LAYOUTS[layout], "float32"))
    found = train_with_losses(run_of(tmp_path / "lost", LAYOUTS[layout], "float32"), (3,), spares=1)
    assert found["world"] == 8 and found["losses"] == expected
    assert "spare place 8 takes over rank 3" in capfd.readouterr().err


@pytest.mark.slow
def test_ranks_of_torchrun_that_are_not_needed_stand_by(tmp_path: Path) -> None:
    fit(short_run(tmp_path, 2), 4)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_port()), "-m", "moefold.cli.main", "train", str(tmp_path / "debug_tiny")]
    command[-1] += "/config.yaml"
    done = subprocess.run([*command, "--train.steps", "4"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("3 ranks do not fold into ep4: going on with world 2") == 1
    assert [line["world"] for line in lines_of(short_run(tmp_path, 4), "step")] == [4, 4, 2, 2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
