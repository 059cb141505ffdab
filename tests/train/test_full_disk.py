"""A disk that is full, damaged or read-only does not stop training by way of a reporter."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moefold import Callback, Control, StepRecord, Trainer, load_run
from moefold.config.run import RunConfig
from moefold.errors import CheckpointError
from moefold.train.callbacks import jsonl
from moefold.train.callbacks.jsonl import JsonLines, LineFile
from moefold.train.callbacks.registry import Guarded


class Disk:
    """Takes so many bytes, and no more."""

    def __init__(self, patch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
        self.room: int | None = None
        self.code, self._write = code, os.write
        patch.setattr(jsonl.os, "write", self.write)

    def write(self, descriptor: int, data: Any) -> int:
        if descriptor == 2 or self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        written = self._write(descriptor, bytes(data)[: self.room])
        self.room -= written
        return written


def line(step: int, kind: str = "step") -> bytes:
    return json.dumps({"kind": kind, "step": step}).encode() + b"\n"


def steps_in(path: Path) -> list[int]:
    return [json.loads(each)["step"] for each in path.read_text().splitlines()]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_lines_wait_in_memory_and_no_half_line_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    disk, path = Disk(monkeypatch, code), tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.add(line(1))
    disk.room = 10
    for step in (2, 3, 4):
        file.add(line(step))
        assert path.read_bytes() == line(1)
    disk.room = None
    file.add(line(5))
    file.close()
    assert steps_in(path) == [1, 2, 3, 4, 5]
    said = capfd.readouterr().err
    assert said.count("warning:") == 1 and os.strerror(code) in said and "is written again" in said


def test_memory_is_bounded_and_losses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jsonl, "MAX_PENDING_BYTES", 4 * len(line(1)))
    disk, path = Disk(monkeypatch), tmp_path / "metrics.jsonl"
    file = LineFile(path)
    disk.room = 0
    for step in range(1, 8):
        file.add(line(step))
    disk.room = None
    file.add(line(8))
    assert steps_in(path) == [5, 6, 7, 8] and "4 lines are lost" in capfd.readouterr().err
    disk.room = 0
    file.add(line(9))
    file.close()
    assert "5 lines of" in capfd.readouterr().err


def test_a_start_repairs_a_torn_line_and_works_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3) + line(2, "save") + line(3)[:7])
    path.chmod(0o600)
    disk.room = 0
    file = LineFile(path)
    file.forget_after(2)
    assert path.read_bytes() == line(1) + line(2)
    disk.room = None
    file.add(line(3))
    file.close()
    assert path.read_bytes() == line(1) + line(2) + line(2, "save") + line(3)


def test_lines_in_memory_of_repeated_steps_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.add(line(1))
    disk.room = 0
    for step in (2, 3, 4):
        file.add(line(step))
    file.forget_after(2)
    disk.room = None
    file.add(line(3))
    file.close()
    assert steps_in(path) == [1, 2, 3]


def test_a_path_that_cannot_be_a_file_is_still_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        LineFile(tmp_path / "metrics.jsonl").add(line(1))


def small(directory: Path) -> RunConfig:
    settings = {"data.seq_len": 16, "data.global_batch": 2, "data.micro_batch": 2, "data.validation": None}
    return load_run("debug_tiny", settings | {"train.steps": 4, "train.directory": str(directory)})


class FullAt(Callback):
    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def before_step(self, step: int, control: Control) -> None:
        self.disk.room = {2: 30, 4: None}.get(step, self.disk.room)


def test_a_run_trains_through_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = [FullAt(Disk(monkeypatch))]
    assert Trainer(small(tmp_path), callbacks=callbacks, reporters=[JsonLines()]).fit() == "finished"
    lines = [json.loads(each) for each in (tmp_path / "debug_tiny/metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines if each["kind"] == "step"] == [1, 2, 3, 4]


class Broken(Callback):
    calls = 0

    def after_step(self, record: StepRecord, control: Control) -> None:
        self.calls += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_service_that_fails_reports_nothing_more_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    assert Trainer(small(tmp_path), reporters=[Guarded(broken)]).fit() == "finished"
    assert broken.calls == 1 and "warning: Broken failed (OSError: [Errno 28]" in capfd.readouterr().err
