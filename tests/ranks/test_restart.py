"""A restart is a fork: ranks import nothing and repeat nothing that their launcher could have done before."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import debug

from moefold.comm import spawn
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control, StepRecord
from moefold.train.fault_tolerance import warm_up
from moefold.train.trainer import Trainer


class FirstSteps(Callback):
    """Notes the losses, and the modules that this rank has and its launcher had not when it forked."""

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, set[str]()

    def after_step(self, record: StepRecord, control: Control) -> None:
        new = sorted(set(sys.modules) - self.before)
        with self.path.open("a") as file:
            file.write(json.dumps([record.loss.hex(), new]) + "\n")


def _run(directory: Path) -> RunConfig:
    run = RECIPES["debug_tiny"]()
    saving = SavingConfig(every=1, keep=2, background=True)
    train = replace(run.train, steps=2, directory=str(directory), saving=saving)
    return replace(run, parallel=ParallelConfig(ep=2), train=train)


def _trained(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    fork, notes = spawn._fork, FirstSteps(directory / "notes")
    directory.mkdir()

    def noted(*args: Any) -> Any:
        notes.before = set(sys.modules)
        return fork(*args)

    monkeypatch.setattr(spawn, "_fork", noted)
    assert Trainer(_run(directory), [notes], nproc=2).fit() == "finished"
    return [json.loads(line) for line in notes.path.read_text().splitlines()]


def test_ranks_import_nothing_and_compute_what_unprepared_ranks_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = _trained(tmp_path / "warm", monkeypatch)
    assert [new for _, new in warm] == [[]] * 2
    monkeypatch.setattr(warm_up, "warm_up", lambda run, world: 0.0)
    cold = _trained(tmp_path / "cold", monkeypatch)
    assert [loss for loss, _ in cold] == [loss for loss, _ in warm]


def test_a_rehearsal_leaves_nothing_of_its_world(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threads = len(os.listdir("/proc/self/task"))
    warm_up.warm_up(_run(tmp_path), 2)
    assert capfd.readouterr().err == ""
    assert not dist.is_initialized() and len(os.listdir("/proc/self/task")) <= threads
    assert debug._get_python_sharding_prop_cache_info().currsize == 0
    assert not any(tmp_path.iterdir())


def test_a_rank_that_died_is_replaced_without_waiting_for_its_peers() -> None:
    """They would wait for it for ``grace`` seconds; two that die together are both named."""
    import time

    def work(rank: int) -> None:
        if rank in (1, 2):
            os.kill(os.getpid(), 9)
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(spawn.RankError) as caught:
        spawn.spawn_ranks(work, 4, grace=60.0)
    assert time.monotonic() - began < 30 and set(caught.value.ranks) <= {1, 2}
