"""A run that goes on from its uploads on another machine is, bit for bit, the run that was never moved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import moefold
from moefold.checkpoint.step_dirs import final_path, verify
from moefold.train.train_context import print_redacted


class StopAt(moefold.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
        if record.step == self.step:
            control.request_stop("moves to another machine")


def hashes(root: Path, step: int) -> list[str]:
    return [entry.data.sha256 for entry in verify(final_path(root, step)).files]


def trained(directory: Path, upload: Path | None, stop: int = 0, **settings: Any) -> Path:
    fixed = {"train.steps": 6, "train.directory": str(directory), "train.saving.every": 2, "data.validation": None}
    if upload is not None:
        fixed["train.saving.upload"] = upload.as_uri()
    run = moefold.load_run("debug_tiny", fixed | {"parallel.ep": 2} | settings)
    moefold.Trainer(run, callbacks=[StopAt(stop)], reporters=[], nproc=2).fit()
    return directory / "debug_tiny" / "checkpoints"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_moved_run_is_the_run_that_stayed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stayed = trained(tmp_path / "stayed", None)
    first = trained(tmp_path / "a", tmp_path / "far", stop=3)
    assert not (first.parent / "uploading").exists() or not list((first.parent / "uploading").iterdir())
    shutil.rmtree(tmp_path / "a")
    moved = trained(tmp_path / "b", tmp_path / "far")
    assert "fetched the checkpoint of step 3" in capfd.readouterr().err
    assert hashes(moved, 6) == hashes(stayed, 6)
    # The end was uploaded too: a third machine has nothing to train.
    shutil.rmtree(tmp_path / "b")
    assert hashes(trained(tmp_path / "c", tmp_path / "far"), 6) == hashes(stayed, 6)
    log = sorted((tmp_path / "far/debug_tiny/log").iterdir())
    writers = [json.loads(path.read_text())["incarnation"] for path in log]
    assert writers == sorted(writers) and set(writers) == {1, 2, 3}


def test_secrets_of_the_storage_are_not_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-the-storage")
    print_redacted("an upload is tried again: https://u:p@h/x?X-Amz-Signature=abc denied for canary-of-the-storage")
    said = capfd.readouterr().err
    assert "canary" not in said and "abc" not in said and "u:p" not in said and "tried again" in said


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:secret@bucket/prefix", "has a login"),
        ("s3://bucket/prefix?token=secret", "has a login, a query"),
        ("bucket/prefix", "is not a URL"),
        ("file://relative/path", "names no directory"),
        ("s3:///prefix", "is not a URL of a storage"),
    ],
)
def test_places_that_are_refused(url: str, message: str) -> None:
    (problem,) = moefold.check(moefold.load_run("debug_tiny", {"train.saving.upload": url}))
    assert problem.path == "train.saving.upload" and message in problem.message and "secret" not in str(problem)
