"""Runs on a file system that is really full: a small tmpfs, mounted where no other process sees it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moefold
from moefold import Callback, Control, StepRecord, Trainer, load_run
from moefold.checkpoint.files import free_bytes
from moefold.checkpoint.run_lock import read_incarnation
from moefold.checkpoint.step_dirs import committed_steps
from moefold.config.run import RunConfig
from moefold.errors import CheckpointError
from moefold.train.callbacks.jsonl import JsonLines

STEPS, FILLED, EMPTIED = 12, 4, 9


def small(directory: Path, free_space: float) -> RunConfig:
    settings = {
        "data.seq_len": 16,
        "data.global_batch": 2,
        "data.micro_batch": 2,
        "data.validation": None,
        "train.steps": STEPS,
        "train.directory": str(directory),
        "train.saving.every": 2,
        "train.saving.retries": 0,
        "train.saving.max_failures": 0,
        "train.saving.free_space": free_space,
    }
    return load_run("debug_tiny", settings)


def fill(path: Path) -> None:
    """Until not one byte more can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        for block in (1 << 16, 1):
            try:
                while file.write(bytes(block)):
                    pass
            except OSError as error:
                assert "No space" in str(error)
    assert free_bytes(path.parent) == 0


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, record: StepRecord, control: Control) -> None:
        if record.step == self.step:
            control.request_stop("enough")


class RemoveAt(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def before_step(self, step: int, control: Control) -> None:
        if step == self.step:
            assert free_bytes(self.path.parent) == 0
            self.path.unlink()


def lines(run_dir: Path, kind: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def losses(run_dir: Path) -> list[object]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(run_dir, "step")]


def start_on_a_full_disk(disk: Path, calm: Path) -> None:
    """The second start finds no byte of room, and gets some in step 9."""
    run, run_dir = small(disk, free_space=0.0), disk / "debug_tiny"
    assert Trainer(run, callbacks=[StopAt(FILLED)], reporters=[JsonLines()]).fit() == "stopped"
    fill(disk / "ballast")
    callbacks = [RemoveAt(disk / "ballast", EMPTIED)]
    changed = moefold.load_run(str(run_dir / "config.yaml"), {"train.log_every": 3})
    assert Trainer(changed, callbacks=callbacks, reporters=[JsonLines()]).fit() == "finished"
    number = read_incarnation(run_dir)
    assert number is not None and number.number == 2
    assert not list(run_dir.glob("*.tmp")) and "log_every: 3" not in (run_dir / "config.yaml").read_text()
    assert committed_steps(run_dir / "checkpoints")[-1] == STEPS
    failed = lines(run_dir, "save_failed")
    # That of step 8 is written in the background, and may find the room of step 9.
    assert [line["step"] for line in failed] in ([6], [6, 8])
    assert all("No space left on device" in str(line["reason"]) for line in failed)
    assert Trainer(small(calm, 0.0), reporters=[JsonLines()]).fit() == "finished"
    assert losses(run_dir) == losses(calm / "debug_tiny")


def start_frees_what_a_dead_writer_left(disk: Path, calm: Path) -> None:
    """The disk is full of a checkpoint that was never committed; a start removes it, so saves work again."""
    run, run_dir = small(disk, free_space=1.0), disk / "debug_tiny"
    assert Trainer(run, callbacks=[StopAt(FILLED)], reporters=[JsonLines()]).fit() == "stopped"
    fill(run_dir / "checkpoints" / "step_00000006.1.tmp" / "rank_00000.shard")
    assert Trainer(run, reporters=[JsonLines()]).fit() == "finished"
    assert not lines(run_dir, "save_failed") and committed_steps(run_dir / "checkpoints")[-1] == STEPS


def first_start_says_what_it_needs(disk: Path, calm: Path) -> None:
    fill(disk / "ballast")
    wanted = r"No space left on device: a start needs 12,288 bytes, and the disk of .*/debug_tiny has 0 free; remove"
    with pytest.raises(CheckpointError, match=wanted):
        Trainer(small(disk, 1.0), reporters=[]).fit()


CASES = (start_on_a_full_disk, start_frees_what_a_dead_writer_left, first_start_says_what_it_needs)


def can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=20)
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_disk_that_is_really_full(case: object, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("mounting a tmpfs needs root and unshare")
    disk, calm = tmp_path / "disk", tmp_path / "calm"
    disk.mkdir()
    calm.mkdir()
    name = getattr(case, "__name__", "")
    module = f"tests.train.{Path(__file__).stem}"
    code = f"import sys; from pathlib import Path; from {module} import {name}; {name}(*map(Path, sys.argv[1:]))"
    command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=6m,mode=700 tmpfs "$0" && exec "$@"', str(disk)]
    command += [sys.executable, "-c", code, str(disk), str(calm)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
