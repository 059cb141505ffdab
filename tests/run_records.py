"""Made-up runs for tests of what a run shows: every number is a simple function of the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from moefold.blueprint.param_counts import count_parameters
from moefold.config.moe import BalanceConfig
from moefold.config.run import RunConfig
from moefold.train.callback import Callback, Control, Evaluation, RunInfo, StepRecord

# For callbacks that only report.
CONTROL = Control(0, 4, nn.Module(), None)  # type: ignore[arg-type]


def info_of(directory: Path, *, steps: int = 20, resumed_from: int | None = None, **train: Any) -> RunInfo:
    run = RunConfig(name="made_up")
    assert run.model.moe is not None
    moe = replace(run.model.moe, balance=BalanceConfig(sequence=1e-3))
    train = {"steps": steps, "log_every": 5, **train}
    run = replace(run, model=replace(run.model, moe=moe), train=replace(run.train, **train))
    return RunInfo(run, 4, directory, resumed_from, count_parameters(run.model))


def record_of(step: int, *, steps: int = 20, **changes: Any) -> StepRecord:
    record = StepRecord(
        step=step,
        steps=steps,
        loss=5.0 / step,
        balance={"sequence": 0.01},
        grad_norm=1.0 + 1.0 / step,
        lr=3e-4,
        tokens=512,
        seconds={"data": 0.01, "step": 0.08, "save": 0.0, "total": 0.1},
        counts=[[128, 128, 128, 128, 128, 128, 128, 128], [512, 256, 128, 64, 32, 16, 16, 0]],
        dropped=0,
        skipped=None,
        memory_bytes=3 * 2**30,
        world=4,
        sample_ids_digest="d1ge57",
    )
    return replace(record, **changes)


def tell(callback: Callback, directory: Path, *, steps: int = 20, **changes: Any) -> None:
    """A whole run: all steps, a validation and a checkpoint in the middle, a good end."""
    callback.on_start(info_of(directory, steps=steps))
    for step in range(1, steps + 1):
        callback.after_step(record_of(step, steps=steps, **changes), CONTROL)
        if step == steps // 2:
            callback.on_evaluate(Evaluation(step, 2.5), CONTROL)
            callback.on_save(step, directory / "checkpoints" / f"step_{step:08d}")
    callback.on_end("finished")
