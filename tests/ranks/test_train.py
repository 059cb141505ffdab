"""The loop on real ranks: layouts agree, faults leave no trace, and asking to stop saves first."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import pytest
import torch
from tests.kill import Diary, digest
from tests.marks import slow_except

import moefold.moe.router
import moefold.pipeline.step
import moefold.train.train_loop
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.config.train import HealthConfig, SavingConfig
from moefold.data.samples import Samples
from moefold.errors import RankError, TrainingError
from moefold.moe.experts import Experts
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import local_part
from moefold.recipes.catalog import RECIPES
from moefold.train.fault_tolerance.supervise import supervise
from moefold.train.state import Outcome, TrainState
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train


def tiny(directory: Path, steps: int = 6, parallel: ParallelConfig | None = None, **health: Any) -> RunConfig:
    base = RECIPES["debug_mla"]()
    settings = replace(base.train, steps=steps, directory=str(directory), saving=SavingConfig(every=0))
    settings = replace(settings, health=HealthConfig(**health))
    data = replace(base.data, seq_len=16, global_batch=8, micro_batch=1, validation=None)
    return replace(base, data=data, train=settings, parallel=parallel or ParallelConfig())


def on_world(run: RunConfig, world: int, before: Any = lambda rank, context: None) -> list[list[Any]]:
    """Train on ``world`` ranks; returns every rank's [exit code, digest] and writes the diary."""

    def work(rank: int) -> list[Any]:
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 30.0)
        before(rank, context)
        code = train(context, state, [Diary(run_directory(run) / "diary.jsonl")])
        return [code, digest(context)]

    return spawn_ranks(work, world, seconds=300)


def steps_of(run: RunConfig) -> list[dict[str, Any]]:
    lines = (run_directory(run) / "diary.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]


@pytest.mark.slow
def test_layouts_follow_one_curve(tmp_path: Path) -> None:
    curves = []
    layouts = (
        (1, ParallelConfig()),
        (4, ParallelConfig(ep=4)),
        (4, ParallelConfig(tp=2, ep=2, etp=2)),
        (4, ParallelConfig(pp=2, cp=2, ep=2)),
        (4, ParallelConfig(pp=2, vpp=2, schedule="interleaved_overlapped", ep=2)),
    )
    for number, (world, parallel) in enumerate(layouts):
        run = tiny(tmp_path / str(number), parallel=parallel)
        on_world(run, world)
        curves.append([float.fromhex(entry["loss"]) for entry in steps_of(run)])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)


class Poison(NamedTuple):
    """What is poisoned, on which rank (None: on all), with what; a spike's value is its height in sigmas."""

    where: str
    victim: int | None
    value: float


VICTIMS = ((None, nan), (0, inf), (1, -inf))
GRADIENTS = ("final_norm", "experts.down", "router.weight")
# "balance" poisons its gradient as well; "balance value" leaves every gradient sound.
POISONS = [
    Poison(where, victim, value)
    for where in ("loss", "balance", "balance value", *GRADIENTS)
    for victim, value in VICTIMS
]
POISONS += [Poison(where, victim, 15.0) for where in ("loss spike", "norm spike") for victim, _ in VICTIMS]
OVERFLOWS = [Poison("overflow", victim, torch.finfo(torch.float32).max) for victim, _ in VICTIMS]

LAYOUTS = pytest.mark.parametrize(
    "parallel",
    slow_except([ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2)], ParallelConfig(ep=2)),
    ids=["ep", "folded"],
)


@pytest.mark.slow
@LAYOUTS
def test_a_poisoned_step_changes_nothing_on_any_rank(parallel: ParallelConfig, tmp_path: Path) -> None:
    # A spike needs sixteen accepted steps to be measured against.
    assert_poisons_leave_no_trace(tiny(tmp_path, parallel=parallel, spike_sigma=10.0), POISONS, good=16)


@LAYOUTS
def test_an_overflow_in_bfloat16_changes_nothing_on_any_rank(parallel: ParallelConfig, tmp_path: Path) -> None:
    run = replace(tiny(tmp_path, parallel=parallel), precision=PrecisionConfig(compute="bfloat16"))
    assert_poisons_leave_no_trace(run, OVERFLOWS, good=1)


def assert_poisons_leave_no_trace(run: RunConfig, poisons: list[Poison], good: int) -> None:
    """After ``good`` steps every second one is poisoned: it changes no bit on any rank, and the next one is taken."""
    data, settings = replace(run.data, global_batch=4), replace(run.train, steps=good + 2 * len(poisons))
    run = replace(run, data=data, train=settings)

    def before(rank: int, context: Any) -> None:
        lab = Laboratory(rank, context.local_model.model)
        run_schedule, number, at_start = moefold.pipeline.step.run_schedule, [0], [""]

        def watched(local_model: LocalModel, batches: Any, *told: Any) -> Any:
            step = number[0] - good
            now = digest(context) if step >= 0 else ""
            if step > 0:
                assert (now == at_start[0]) == (step % 2 == 1), f"{poisons[(step - 1) // 2]}, step {number[0]}"
            number[0], at_start[0] = number[0] + 1, now
            lab.due = poisons[step // 2] if step >= 0 and step % 2 == 0 else None
            return lab.after_backward(run_schedule(local_model, batches, *told))

        moefold.pipeline.step.run_schedule = watched

    on_world(run, 2, before)
    steps = steps_of(run)
    assert [entry["skipped"] is not None for entry in steps] == [False] * good + [True, False] * len(poisons)
    for entry, poison in zip(steps[good::2], poisons, strict=True):
        assert re.search(REASONS[poison.where], entry["skipped"]), (poison, entry["skipped"])
        assert re.search(NAMED.get(poison.where, ""), entry["skipped"]), (poison, entry["skipped"])
    assert [entry["sample_ids_digest"] for entry in steps] == ids_seen_by_rank_0(run, len(steps))


# Where tensor-parallel ranks hold the loss in common, one of them may object alone.
REASONS = {name: "^gradient norm is (nan|inf)" for name in GRADIENTS} | {
    "loss": r"^loss is (nan|-?inf)|1 other rank\(s\) objected",
    "balance": "^balance loss sequence is (nan|-?inf)",
    "balance value": "^balance loss sequence is (nan|-?inf)",
    "loss spike": r"^loss .* is more than 10 sigma above|1 other rank\(s\) objected",
    "norm spike": "^gradient norm .* is more than 10 sigma above",
    "overflow": "^(loss|balance loss sequence) is nan",
}


# The tensor and its rank, and where the forward pass goes wrong when it is run again.
NAMED = {
    name: rf"the gradient of \S*{name}\S* is not finite \(.* on ranks? [01].*run again is finite everywhere"
    for name in GRADIENTS
} | {
    "overflow": r"run again, layers\.\d is the first that is not finite, on ranks? [01]",
    "balance value": r"all gradients are finite, .*run again, layers\.1 is the first .* on ranks? [01]",
}


def ids_seen_by_rank_0(run: RunConfig, steps: int) -> list[str]:
    samples, batch = Samples(run.data, run.model.vocab_size, run.seed, "train"), run.data.global_batch
    stride = 2 // run.parallel.tp
    ids = [[samples.sample(step * batch + i).id for i in range(0, batch, stride)] for step in range(steps)]
    return [hashlib.sha256("\n".join(names).encode()).hexdigest() for names in ids]


class Laboratory:
    """Puts the poison that is ``due`` into one rank's step, wherever it belongs."""

    def __init__(self, rank: int, model: torch.nn.Module) -> None:
        self.rank, self.model, self.due, self.state = rank, model, None, TrainState()
        losses_of, after_step = moefold.moe.router.balance_losses, moefold.train.train_loop.after_step

        def balance_losses(*args: Any) -> Any:
            losses, counted_E = losses_of(*args)
            if value := self.value_for("balance"):
                losses = losses._replace(sequence=losses.sequence * value)
            elif value := self.value_for("balance value"):
                losses = losses._replace(sequence=losses.sequence + value)
            return losses, counted_E

        def remember(*args: Any) -> TrainState:
            self.state = after_step(*args)
            return self.state

        moefold.moe.router.balance_losses = balance_losses
        moefold.train.train_loop.after_step = remember
        for module in model.modules():
            if isinstance(module, Experts):
                module.register_forward_hook(self.overflow)

    def value_for(self, where: str) -> float | None:
        due = self.due
        return due.value if due is not None and due.where == where and due.victim in (None, self.rank) else None

    def overflow(self, module: torch.nn.Module, inputs: Any, rows_RL: torch.Tensor) -> torch.Tensor:
        """The largest float32 is finite, and has no bfloat16 beside it but infinity."""
        value = self.value_for("overflow")
        if value is None:
            return rows_RL
        assert rows_RL.dtype == torch.bfloat16 and isfinite(value)
        return (rows_RL.float() + value).to(rows_RL.dtype)

    def after_backward(self, sums: Any) -> Any:
        if value := self.value_for("loss"):
            return sums._replace(loss=sums.loss * value)
        if sigmas := self.value_for("loss spike"):
            return sums._replace(loss=sums.loss + sigmas * pstdev(self.state.losses))
        if sigmas := self.value_for("norm spike"):
            self.fill_last("final_norm", fmean(self.state.norms) + sigmas * pstdev(self.state.norms))
        for name in GRADIENTS:
            if value := self.value_for(name):
                self.fill_last(name, value)
        return sums

    def fill_last(self, where: str, value: float) -> None:
        """One element of one gradient: of this rank's part, if it has one."""
        gradient = next(p.grad for name, p in self.model.named_parameters() if where in name)
        local_part(gradient).view(-1)[-1:].fill_(value)


def test_skipping_for_ever_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    run = tiny(tmp_path, steps=9, max_consecutive_skips=3)

    def before(rank: int, context: Any) -> None:
        context.optimizer.param_groups[0]["params"][0].data.fill_(float("nan"))

    with pytest.raises(RankError, match=r"3 steps in a row were skipped.*gradient of .*run again, .* on rank 0"):
        on_world(run, 1, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_after_a_save_and_the_rest_follows_exactly(number: int, tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole", steps=8, parallel=ParallelConfig(ep=2))
    expected = on_world(whole, 2)

    def before(rank: int, context: Any) -> None:
        if rank == 1:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()
            judge = moefold.train.train_loop.skip_reason

            def slowly(*args: Any) -> Any:
                time.sleep(0.1)
                return judge(*args)

            moefold.train.train_loop.skip_reason = slowly

    broken = tiny(tmp_path / "broken", steps=8, parallel=ParallelConfig(ep=2))
    first = on_world(broken, 2, before)
    assert [code for code, _ in first] == [Outcome.INTERRUPTED] * 2
    second = on_world(broken, 2)
    assert [code for code, _ in second] == [Outcome.FINISHED] * 2
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
