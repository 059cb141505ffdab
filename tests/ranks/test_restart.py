"""A restart is a fork: ranks import nothing and repeat nothing that their launcher could have done before."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from moefold.comm import spawn
from moefold.comm.shared_memory import in_order, open_shared_memory
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control, StepRecord
from moefold.train.fault_tolerance import warm_up
from moefold.train.fault_tolerance.supervise import supervise
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

    def work(rank: int) -> None:
        if rank in (1, 2):
            os.kill(os.getpid(), 9)
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(spawn.RankError) as caught:
        spawn.spawn_ranks(work, 4, grace=60.0)
    assert time.monotonic() - began < 30 and set(caught.value.ranks) <= {1, 2}


@pytest.mark.parametrize("how", ["killed, and a thread waits for a disk", "stopped"])
def test_ranks_restart_when_a_peer_of_their_exchange_is_lost(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its peer says so first, and nothing is left to the user, so that is no reason to give the run up."""
    starts = tmp_path / "starts"
    starts.mkdir()

    def work(rank: int) -> int:
        assert dist.group.WORLD is not None
        memory = open_shared_memory(dist.group.WORLD, rank, 2, "ep", 2.0)
        assert memory is not None
        first = not any(starts.iterdir())
        dist.barrier()
        (starts / f"{os.getpid()}").touch()
        if rank == 1 and first and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank == 1 and first:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            ctypes.CDLL(None).syscall(60, 0)
        rows = torch.full((2, 1), float(rank))
        received = torch.empty(2, 1)
        memory.all_to_all(received, rows, in_order([1, 1]), in_order([1, 1]))
        return int(received.sum()) - 1

    assert supervise(work, 2, tmp_path / "checkpoints", 20.0, max_fruitless=2) == 0
    assert len(list(starts.iterdir())) == 4
    said = capfd.readouterr().err
    assert ("rank 1 was ended by SIGKILL" if how != "stopped" else "rank 1 is absent for 2 s") in said
