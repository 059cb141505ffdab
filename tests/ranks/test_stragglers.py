"""A slow rank is named, and only it; slow and corrupt ranks are excluded, and the run goes on without them."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.straggler_draws import Draw, SlowRank, measure
from torch import Tensor

from benchmarks.bit_flips import flip
from moefold.checkpoint import save
from moefold.checks.run_all import problems
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import CorruptionConfig, SavingConfig, StragglersConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.fault_tolerance.corruption import read_findings
from moefold.train.fault_tolerance.stragglers import Pace, Streaks, slow_ranks
from moefold.train.fault_tolerance.supervise import PLACE_VARIABLE, supervise
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train

EVERYBODY = [range(4)] * 4


def paces(*own: float, tokens: tuple[float, ...] = (8, 8, 8, 8)) -> list[Pace]:
    return [Pace(1.0, seconds, 0.0, 0.0, count) for seconds, count in zip(own, tokens, strict=False)]


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    assert slow_ranks(paces(1, 1, 1, 1.3), EVERYBODY, 0.75, 0.0) == {}
    assert slow_ranks(paces(1, 1, 1, 1.4), EVERYBODY, 0.75, 0.0) == {3: 1.0}
    # Of two ranks, the slower: a median of both would hide it.
    assert slow_ranks(paces(1, 2), [range(2)] * 2, 0.75, 0.0) == {1: 1.0}
    assert slow_ranks(paces(1), [range(1)], 0.75, 0.0) == {}
    # A fast rank makes nobody slow.
    assert slow_ranks(paces(0.1, 1, 1, 1), EVERYBODY, 0.75, 0.0) == {}


def test_time_blocked_by_data_is_own_work_and_time_without_a_processor_is_not() -> None:
    usual = Pace(1.0, 0.3, 0.0, 0.0, 8)
    assert slow_ranks([usual, usual, usual._replace(data=0.2)], [range(3)] * 3, 0.75, 0.0) == {2: 0.3}
    busy_host = usual._replace(queued=0.5)
    assert slow_ranks([usual, usual, busy_host], [range(3)] * 3, 0.75, 0.0) == {}
    assert busy_host.waited == pytest.approx(0.2)


def test_stages_and_experts_that_have_more_to_do_are_not_slow() -> None:
    stages = [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert slow_ranks(paces(1, 1, 3, 3), stages, 0.75, 0.0) == {}
    assert slow_ranks(paces(1, 2, 3, 3), stages, 0.75, 0.0) == {1: 1.0}
    # Three times the tokens in half of the work: twice as long is as it should be, four times is not.
    uneven = (8, 8, 8, 24)
    assert slow_ranks(paces(1, 1, 1, 2, tokens=uneven), EVERYBODY, 0.75, 0.5) == {}
    assert slow_ranks(paces(1, 1, 1, 4, tokens=uneven), EVERYBODY, 0.75, 0.5) == {3: 1.0}
    # Fewer tokens accuse nobody.
    assert slow_ranks(paces(1, 1, 1, 1, tokens=(8, 8, 8, 0)), EVERYBODY, 0.75, 1.0) == {}


def test_a_change_takes_windows_in_a_row_and_is_said_once() -> None:
    streaks, slow, fine = Streaks(3), {2: 1.0}, dict[int, float]()
    assert [streaks.changes(found) for found in (slow, slow, fine, slow, slow)] == [[]] * 5
    assert streaks.changes(slow) == [2] and streaks.slow == {2}
    assert [streaks.changes(found) for found in (slow, fine, fine, slow, fine, fine)] == [[]] * 6
    assert streaks.changes(fine) == [2] and streaks.slow == set()
    assert streaks.changes(fine) == []


def test_settings_that_cannot_work_are_refused() -> None:
    base = RECIPES["debug_tiny"]()

    def paths(stragglers: StragglersConfig, corruption: CorruptionConfig | None = None) -> list[str]:
        settings = replace(base.train, stragglers=stragglers, corruption=corruption or CorruptionConfig())
        return [found.path for found in problems(replace(base, train=settings))]

    assert paths(StragglersConfig(window=0)) == paths(StragglersConfig(on_found="exclude")) == []
    assert paths(StragglersConfig(ratio=1.0)) == paths(StragglersConfig(ratio=0.0)) == ["train.stragglers.ratio"]
    assert paths(StragglersConfig(window=-1)) == ["train.stragglers.window"]
    assert paths(StragglersConfig(windows=0)) == ["train.stragglers.windows"]
    assert paths(StragglersConfig(window=0, on_found="exclude")) == ["train.stragglers.on_found"]
    never = CorruptionConfig(every=0, on_mismatch="exclude")
    assert paths(StragglersConfig(), never) == ["train.corruption.on_mismatch"]


def test_a_rank_with_a_busy_loop_is_named_and_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    found = measure(Draw("pp2 ep2", 2, 2.0), StragglersConfig(window=5))
    assert found["windows_until_named"] == 3 and found["ended"] and not found["others_named"], found
    said = [line for line in capfd.readouterr().err.splitlines() if "slow" in line]
    assert len(said) == 2 and "rank 2 is slow: " in said[0] and "rank 2 is no longer slow: " in said[1]
    assert "ms of own work per step, median of its 1 peer(s)" in said[0]


# ---- exclusion ----


class AtPlace(Callback):
    """Another callback, at one place only: a fault of a machine, which a rank that runs elsewhere does not have."""

    def __init__(self, place: int, fault: Callback) -> None:
        self.place, self.fault = str(place), fault

    def before_step(self, step: int, control: Control) -> None:
        if os.environ.get(PLACE_VARIABLE) == self.place:
            self.fault.before_step(step, control)

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        if os.environ.get(PLACE_VARIABLE) == self.place:
            self.fault.after_backward(gradients, control)


class Flips(Callback):
    """A bit of a weight in every step from the fifth on."""

    def __init__(self) -> None:
        self.step = 0

    def before_step(self, step: int, control: Control) -> None:
        self.step = step

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        if self.step >= 5:
            flip(dict(control.model.named_parameters())["final_norm.weight"], 0, 20)


def supervised(directory: Path, world: int, fault: Callback | None, steps: int, **settings: Any) -> RunConfig:
    """A run with one spare place, to its end."""
    base = RECIPES["debug_tiny"]()
    saving = SavingConfig(every=4, background=False)
    train_config = replace(base.train, steps=steps, directory=str(directory), saving=saving, **settings)
    data = replace(base.data, seq_len=16, global_batch=4, micro_batch=1, validation=None)
    parallel = ParallelConfig(dp_replicate=world, edp_replicate=world)
    run = replace(base, data=data, parallel=parallel, train=train_config)

    def work(rank: int) -> int:
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 60.0)
        return int(train(context, state, [*([] if fault is None else [fault]), JsonLines()]))

    assert supervise(work, world, run_directory(run) / "checkpoints", 60.0, spares=1) == 0
    return run


def losses(run: RunConfig) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (run_directory(run) / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"]


@pytest.mark.slow
def test_a_rank_whose_memory_flips_bits_is_excluded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"corruption": CorruptionConfig(every=3, on_mismatch="exclude")}
    clean = supervised(tmp_path / "clean", 2, None, 8, **settings)
    run = supervised(tmp_path / "flips", 2, AtPlace(1, Flips()), 8, **settings)
    assert losses(run) == losses(clean) and len(losses(run)) == 8
    (finding,) = read_findings(run_directory(run))
    assert finding.culprits == (1,) and finding.step == 5
    said = capfd.readouterr().err
    assert "rank 1 is gone (lost place 1): spare place 2 takes over rank 1" in said and "from step_00000004" in said


def assert_excluding_changes_no_loss(folder: Path, slow: Callback) -> None:
    """The slow rank is named after two windows; a busy machine can hide it in one, so there is time for more."""
    settings = {"stragglers": StragglersConfig(window=4, windows=2, on_found="exclude")}
    clean = supervised(folder / "clean", 2, None, 24, **settings)
    run = supervised(folder / "slow", 2, AtPlace(1, slow), 24, **settings)
    assert losses(run) == losses(clean) and len(losses(run)) == 24


def step_named(said: str) -> int:
    (step,) = re.findall(r"step (\d+): rank 1 is slow: ", said)
    return int(step)


@pytest.mark.slow
def test_a_slow_rank_is_excluded_after_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_excluding_changes_no_loss(tmp_path, SlowRank(1, 3.0, 2, 99))
    said = capfd.readouterr().err
    # The others go on from that very step.
    assert f"no spare is left; going on from step_{step_named(said):08d}" in said
    assert "spare place 2 takes over rank 1" in said


class SlowOnAFullDisk(SlowRank):
    """From the ninth step on, the rank writes no checkpoint either."""

    def before_step(self, step: int, control: Control) -> None:
        super().before_step(step, control)
        if step == 9:

            def full(*args: Any) -> Any:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            # In this process, which ends when its rank is excluded.
            save.write_shard = full


@pytest.mark.slow
def test_ranks_are_excluded_though_the_step_cannot_be_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_excluding_changes_no_loss(tmp_path, SlowOnAFullDisk(1, 3.0, 2, 99))
    said = capfd.readouterr().err
    unsaved = f"before ranks are excluded, step {step_named(said)} could not be saved: rank 1: "
    assert unsaved in said and "No space left" in said
    assert "spare place 2 takes over rank 1; no spare is left; going on from step_00000008" in said
