"""The loss scale on ranks: exact in every layout, one rank's overflow is skipped by all, and runs resume under it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kill import digest
from tests.marks import slow_except

import moefold
import moefold.pipeline.step
import moefold.train.train_loop
from moefold.comm.spawn import spawn_ranks
from moefold.config.run import RunConfig
from moefold.parallel.param_shards import local_part
from moefold.precision.loss_scaling import LossScale
from moefold.train import skipped_steps
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.skipped_steps import NotFinite
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train

SETTINGS: dict[str, object] = {
    "model.num_layers": 2,
    "model.num_mtp": 1,
    "model.moe.balance.sequence": 0.1,
    "model.moe.balance.z": 0.1,
    "data.seq_len": 16,
    "data.global_batch": 4,
    "data.micro_batch": 1,
    "data.validation": None,
    "optim.lr_schedule.warmup": 0,
    "train.steps": 3,
    "train.log_every": 1,
    "train.saving.every": 0,
}
LAYOUTS: dict[str, dict[str, object]] = {
    "fsdp, ep": {"parallel.ep": 2},
    "flat": {"parallel.sharding": "flat"},
    "replicas": {"parallel.dp_replicate": 2, "parallel.edp_replicate": 2},
    "tensor": {"parallel.tp": 2, "parallel.etp": 2},
    "context": {"parallel.cp": 2},
    "deferred weight gradients": {"parallel.pp": 2, "parallel.schedule": "zb_h1"},
    "overlapped": {"parallel.pp": 2, "parallel.schedule": "1f1b_overlapped"},
    "recomputed": {"parallel.ep": 2, "memory.recompute": ["experts", "attention"]},
}
Line = dict[str, Any]


def lines(folder: Path, changes: dict[str, object], nproc: int) -> list[Line]:
    """Of every step."""
    run = moefold.load_run("debug_tiny", SETTINGS | {"train.directory": str(folder)} | changes)
    assert moefold.Trainer(run, reporters=[JsonLines()], nproc=nproc).fit() == "finished"
    found = map(json.loads, (folder / run.name / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == "step"]


def numbers(found: list[Line]) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in found]


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "deferred weight gradients"))
def test_a_scale_changes_no_bit_of_a_layout(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where powers of two are exact: three steps with MTP and balance losses on two ranks."""
    wanted = numbers(lines(tmp_path / "plain", LAYOUTS[layout], 2))
    monkeypatch.setattr(moefold.train.train_loop, "factor_of", lambda state: 2.0**30)
    assert numbers(lines(tmp_path / "scaled", LAYOUTS[layout], 2)) == wanted and len(wanted) == 3


FLOAT16: dict[str, object] = {
    "precision.compute": "float16",
    "precision.loss_scale.initial": 1024.0,
    "precision.loss_scale.hysteresis": 1,
    "precision.loss_scale.window": 2,
}


@pytest.mark.parametrize(
    "layout", slow_except([name for name in LAYOUTS if name not in ("fsdp, ep", "replicas")], "recomputed")
)
def test_layouts_in_float16_follow_one_process(layout: str, tmp_path: Path) -> None:
    """Within the rounding of float16; losses of bfloat16 are eight times as far apart."""
    wanted, found = lines(tmp_path / "one", FLOAT16, 1), lines(tmp_path / "two", FLOAT16 | LAYOUTS[layout], 2)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(numbers(found), numbers(wanted), strict=True):
        assert loss == pytest.approx(wanted_loss, rel=2e-4) and norm == pytest.approx(wanted_norm, rel=1e-2)
    assert [line["metrics"]["loss_scale"] for line in found] == [1024.0, 1024.0, 2048.0]


# ---- an overflow on one rank ----


def overflowing(run: RunConfig, world: int, at: tuple[int, ...]) -> list[list[Any]]:
    """Before the norm of these steps, one entry of rank 1's gradients becomes infinite. Every rank's digest of its
    weights and moments, and its loss scale, after every step."""

    def work(rank: int) -> list[Any]:
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 30.0)
        run_schedule, after_step = moefold.pipeline.step.run_schedule, moefold.train.train_loop.loss_scale_after
        number, seen = [state.step], []

        def poisoned(local_model: Any, *args: Any) -> Any:
            sums = run_schedule(local_model, *args)
            number[0] += 1
            if rank == world - 1 and number[0] in at:
                gradient = next(p.grad for name, p in context.local_model.model.named_parameters() if "experts" in name)
                local_part(gradient).view(-1)[:1].fill_(torch.inf)
            return sums

        def noted(scale: LossScale, *args: Any) -> LossScale:
            after = after_step(scale, *args)
            seen.append([digest(context), scale.scale, after.scale])
            return after

        moefold.pipeline.step.run_schedule, moefold.train.train_loop.loss_scale_after = poisoned, noted
        train(context, state, [JsonLines()] if rank == 0 else [])
        return seen

    return spawn_ranks(work, world, seconds=300)


def float16_run(folder: Path, changes: dict[str, object]) -> RunConfig:
    run: RunConfig = moefold.load_run("debug_tiny", SETTINGS | FLOAT16 | {"train.directory": str(folder)} | changes)
    assert moefold.check(run, 2) == []
    return run


SKIPS: dict[str, object] = {"parallel.ep": 2, "train.steps": 6, "precision.loss_scale.window": 3}


def reasons(run: RunConfig) -> list[str | None]:
    found = map(json.loads, (run_directory(run) / "metrics.jsonl").read_text().splitlines())
    return [line["skipped"] for line in found if line["kind"] == "step"]


def test_an_overflow_on_one_rank_is_skipped_by_all_and_halves_the_scale(tmp_path: Path) -> None:
    """More overflows than `train.health.max_consecutive_skips` allows: a lower scale is still to be tried."""
    run = float16_run(tmp_path, SKIPS)
    run = replace(run, train=replace(run.train, health=replace(run.train.health, max_consecutive_skips=2)))
    ranks = overflowing(run, 2, at=(2, 3))
    for seen in ranks:
        digests = [each[0] for each in seen]
        assert digests[0] == digests[1] == digests[2] and len(set(digests[2:])) == 4
    before, after = [[each[1:] for each in seen] for seen in ranks]
    assert before == after
    assert [scale for scale, _ in before] == [1024.0, 1024.0, 512.0, 256.0, 256.0, 256.0] and before[-1][1] == 512.0
    skipped = reasons(run)
    assert [reason is not None for reason in skipped] == [False, True, True, False, False, False]
    assert skipped[1] == "gradient norm is inf at loss scale 1024, the next step has 512"


def test_a_rank_that_keeps_its_scale_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = skipped_steps.count_not_finite

    def one_rank(loss: float, balance: Any, grad_norm: float, world: Any) -> NotFinite:
        found = count(loss, balance, grad_norm, world)
        return found if world.index == 0 else NotFinite(0, 0)

    monkeypatch.setattr(moefold.train.train_loop, "count_not_finite", one_rank)
    run = float16_run(tmp_path, {"parallel.ep": 2, "train.steps": 2})
    first, second = ([each[1:] for each in seen] for seen in overflowing(run, 2, at=(1,)))
    assert first != second


# ---- resuming ----


def test_a_run_resumes_under_its_scale_bit_for_bit(tmp_path: Path) -> None:
    whole = float16_run(tmp_path / "whole", SKIPS)
    wanted = overflowing(whole, 2, at=(2, 3))
    part = float16_run(tmp_path / "part", SKIPS)
    halfway = replace(part, train=replace(part.train, steps=4))
    first = overflowing(halfway, 2, at=(2, 3))
    second = overflowing(part, 2, at=())
    for rank in range(2):
        assert first[rank] + second[rank] == wanted[rank]


def test_a_checkpoint_goes_on_in_another_format_and_back(tmp_path: Path) -> None:
    lines(tmp_path, FLOAT16 | {"train.steps": 2}, 1)
    lines(tmp_path, {"precision.compute": "bfloat16", "train.steps": 3}, 1)
    found = lines(tmp_path, FLOAT16 | {"train.steps": 5}, 1)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    # A run in another format has no scale to hand on.
    assert [line.get("metrics", {}).get("loss_scale") for line in found] == [1024.0, 1024.0, None, 1024.0, 1024.0]


def test_an_overflow_at_the_smallest_scale_ends_the_run(tmp_path: Path) -> None:
    """As it does in other formats, with the place."""
    fixed = {"precision.loss_scale.min": 1024.0, "train.health.max_consecutive_skips": 2, "parallel.ep": 2}
    with pytest.raises(moefold.errors.RankError, match=r"2 steps in a row were skipped.*at loss scale 1024.*experts"):
        overflowing(float16_run(tmp_path, fixed), 2, at=(1, 2, 3))
