"""The loop on real ranks: layouts agree, faults leave no trace, and asking to stop saves first."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kill import Diary, digest

import moefold.parallel.step
from moefold.comm.launch import fork_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import HealthConfig, SavingConfig
from moefold.errors import RankError, TrainingError
from moefold.recipes.catalog import RECIPES
from moefold.train.setup import run_directory, set_up
from moefold.train.supervise import supervise
from moefold.train.trainer import FINISHED, INTERRUPTED, train


def tiny(directory: Path, steps: int = 6, parallel: ParallelConfig | None = None, **health: Any) -> RunConfig:
    base = RECIPES["debug_mla"]()
    settings = replace(base.train, steps=steps, directory=str(directory), saving=SavingConfig(every=0))
    settings = replace(settings, health=HealthConfig(**health))
    data = replace(base.data, seq_len=16, global_batch=8, micro_batch=1, validation=None)
    return replace(base, data=data, train=settings, parallel=parallel or ParallelConfig())


def on_world(run: RunConfig, world: int, before: Any = lambda rank, workshop: None) -> list[list[Any]]:
    """Train on ``world`` ranks; returns every rank's [exit code, digest] and writes the diary."""

    def work(rank: int) -> list[Any]:
        workshop, state = set_up(run, rank, world, torch.device("cpu"), 30.0)
        before(rank, workshop)
        code = train(workshop, state, [Diary(run_directory(run) / "diary.jsonl")])
        return [code, digest(workshop)]

    return fork_ranks(work, world, seconds=100)


def steps_of(run: RunConfig) -> list[dict[str, Any]]:
    lines = (run_directory(run) / "diary.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]


def test_layouts_follow_one_curve(tmp_path: Path) -> None:
    curves = []
    layouts = ((1, ParallelConfig()), (4, ParallelConfig(ep=4)), (4, ParallelConfig(tp=2, ep=2, etp=2)))
    for number, (world, parallel) in enumerate(layouts):
        run = tiny(tmp_path / str(number), parallel=parallel)
        on_world(run, world)
        curves.append([float.fromhex(entry["loss"]) for entry in steps_of(run)])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)


# What is poisoned: the loss, or part of a gradient, on all ranks or on one.
POISONS = [
    (where, rank, value)
    for where in ("loss", "final_norm", "experts.down", "router.weight")
    for rank, value in ((None, float("nan")), (0, float("inf")), (1, float("-inf")))
]


@pytest.mark.parametrize("parallel", [ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2)], ids=["ep", "folded"])
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(parallel: ParallelConfig, tmp_path: Path) -> None:
    """Every second step is poisoned; afterwards everything is what it was, and the next step is taken."""
    run = tiny(tmp_path, steps=2 * len(POISONS), parallel=parallel)

    def before(rank: int, workshop: Any) -> None:
        accumulate, calls, at_start = moefold.parallel.step.accumulate, [0], [""]

        def poisoned(model: torch.nn.Module, batches: Any) -> Any:
            number, after_poison = calls[0], calls[0] % 2 == 0 and calls[0] > 0
            if after_poison:
                assert digest(workshop) == at_start[0], f"{POISONS[number // 2 - 1]} left a trace"
            if number % 2 == 1:
                at_start[0] = digest(workshop)
            calls[0] += 1
            sums = accumulate(model, batches)
            return poison(sums, model, *POISONS[number // 2], rank) if number % 2 == 1 else sums

        moefold.parallel.step.accumulate = poisoned

    on_world(run, 2, before)
    taken = steps_of(run)
    assert [entry["skipped"] is not None for entry in taken] == [False, True] * len(POISONS)


def poison(sums: Any, model: torch.nn.Module, where: str, victim: int | None, value: float, rank: int) -> Any:
    if victim is not None and victim != rank:
        return sums
    if where == "loss":
        return sums._replace(loss=sums.loss * value)
    name = next(name for name, _ in model.named_parameters() if where in name)
    gradient = dict(model.named_parameters())[name].grad
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.numel():
        local.view(-1)[-1:].fill_(value)
    return sums


def test_skipping_for_ever_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=9, most_skips=3)

    def before(rank: int, workshop: Any) -> None:
        workshop.optimizer.param_groups[0]["params"][0].data.fill_(float("nan"))

    with pytest.raises(RankError, match="3 steps in a row were skipped"):
        on_world(run, 1, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_after_a_save_and_the_rest_follows_exactly(number: int, tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", steps=8, parallel=ParallelConfig(ep=2))
    expected = on_world(whole, 2)

    def before(rank: int, workshop: Any) -> None:
        if rank == 1:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()
            judge = moefold.train.trainer.objection

            def slowly(*args: Any) -> Any:
                time.sleep(0.1)
                return judge(*args)

            moefold.train.trainer.objection = slowly

    broken = tiny(tmp_path / "broken", steps=8, parallel=ParallelConfig(ep=2))
    first = on_world(broken, 2, before)
    assert [code for code, _ in first] == [INTERRUPTED, INTERRUPTED]
    second = on_world(broken, 2)
    assert [code for code, _ in second] == [FINISHED, FINISHED]
    assert [found for _, found in second] == [found for _, found in expected]
    assert steps_of(broken) == steps_of(whole)


def test_a_fault_that_comes_back_each_time_ends_the_supervision(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with pytest.raises(TrainingError, match="3 starts without a new checkpoint"):
        supervise(work, 2, tmp_path, 10.0)


def test_other_data_is_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=2)
    on_world(run, 1)
    other = replace(run, data=replace(run.data, seq_len=12), train=replace(run.train, steps=3))
    with pytest.raises(RankError, match="other data"):
        on_world(other, 1)
