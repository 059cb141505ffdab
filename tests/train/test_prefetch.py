"""Batches that were read ahead are those that a step would have read itself, and are no part of a run's state."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.train.test_packed import CPU, alone, opened, run_of
from tests.train.test_trainer import tiny

import moefold
from moefold.batching.document_packing import plan_for
from moefold.batching.wave_packing import StepPlan
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch, tensors_of
from moefold.topology.folded_layout import FoldedLayout
from moefold.train.batches import LocalStep, StepData, read_step, step_batches
from moefold.train.prefetch import Prefetcher


def equal(one: Batch, other: Batch) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))
    return same and one.step_labels == other.step_labels and one.step_labels_ahead == other.step_labels_ahead


@pytest.mark.parametrize("packing", ["concat_masked", "padded", "bin_packed"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_are_those_of_step_batches(packing: str, depth: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, packing, global_batch=4)
    groups, samples = alone(run), opened(run)
    with Prefetcher(lambda first: read_step(samples, first, run, groups), groups, CPU) as prefetcher:
        for first in range(0, 20, 4):
            found = prefetcher.take(first, range(first + 4, first + 4 + 4 * depth, 4))
            expected = step_batches(samples, first, run, groups, CPU)
            assert found[1:] == expected[1:]
            assert all(map(equal, found.batches, expected.batches))


def recorded(calls: list[tuple[int, bool]]) -> Callable[[int], LocalStep]:
    main = threading.current_thread()

    def read(first: int) -> LocalStep:
        calls.append((first, threading.current_thread() is main))
        if first == 13:
            raise OSError("no such file")
        return LocalStep(StepData([], str(first), 0), None)

    return read


def test_each_step_is_read_once_and_ahead_on_a_thread(tmp_path: Path) -> None:
    calls: list[tuple[int, bool]] = []
    with Prefetcher(recorded(calls), alone(run_of(tmp_path, "concat")), CPU) as prefetcher:
        assert prefetcher.take(0, (1, 2)).ids == "0"
        assert prefetcher.take(1, (2, 3)).ids == "1"
        assert prefetcher.take(2, (3,)).ids == "2"
        assert prefetcher.take(3).ids == "3"
        # Another step than the one that was read ahead.
        assert prefetcher.take(7).ids == "7"
    assert calls == [(0, True), (1, False), (2, False), (3, False), (7, True)]


def test_steps_ahead_are_planned_on_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for context sizes and microbatches, which takes time, is part of reading a step."""
    run = run_of(tmp_path, "bin_packed", ParallelConfig(dynamic_cp=True), global_batch=4)
    groups, samples = alone(run), opened(run)
    planned: list[str] = []

    def recorded_plan(run: RunConfig, sizes: list[int], layout: FoldedLayout) -> StepPlan:
        planned.append(threading.current_thread().name)
        return plan_for(run, sizes, layout)

    monkeypatch.setattr("moefold.train.batches.plan_for", recorded_plan)
    with Prefetcher(lambda first: read_step(samples, first, run, groups), groups, CPU) as prefetcher:
        prefetcher.take(0, (4, 8))
        prefetcher.take(4, (8,))
        prefetcher.take(8)
    assert planned[0] == threading.current_thread().name
    assert len(planned) == 3 and all(name.startswith("prefetch") for name in planned[1:])


def test_an_error_comes_with_the_step_that_it_is_about(tmp_path: Path) -> None:
    with Prefetcher(recorded([]), alone(run_of(tmp_path, "concat")), CPU) as prefetcher:
        prefetcher.take(12, (13,))
        with pytest.raises(OSError, match="no such file"):
            prefetcher.take(13)


class StopAfter(moefold.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
        if record.step == self.step:
            control.request_stop("enough")


def test_a_run_that_was_stopped_trains_on_the_samples_that_it_had_only_read_ahead(tmp_path: Path) -> None:
    records = {}
    for name, depth, stop in (("whole", 0, 0), ("stopped", 3, 2)):
        run = tiny(tmp_path / name, 5, **{"data.prefetch": depth})
        if stop:
            assert moefold.Trainer(run, [StopAfter(stop)]).fit() == "stopped"
        assert moefold.Trainer(run).fit() == "finished"
        lines = (tmp_path / name / run.name / "metrics.jsonl").read_text().splitlines()
        steps = [each for each in map(json.loads, lines) if "grad_norm" in each]
        records[name] = [(each["step"], each["loss"], each["grad_norm"]) for each in steps]
    assert records["whole"] == records["stopped"] and len(records["whole"]) >= 5
