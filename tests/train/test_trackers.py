"""Trackers, each run for real and without a network: what they stored is read back by their own readers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.run_records import CONTROL, info_of, record_of

from moefold.train.callback import Callback, Evaluation
from moefold.train.callbacks.registry import services


def two_visits(tmp_path: Path, **train: object) -> list[Callback]:
    """Steps 1 to 10, then a resumed run that does steps 11 to 20."""
    visits = []
    for first, resumed in ((1, None), (11, 10)):
        info = info_of(tmp_path, resumed_from=resumed, **train) if resumed else info_of(tmp_path, **train)
        (service,) = services(info.run.train)
        service.on_start(info)
        for step in range(first, first + 10):
            service.after_step(record_of(step), CONTROL)
        service.on_evaluate(Evaluation(first + 9, 2.5), CONTROL)
        service.on_end("finished")
        visits.append(service)
    return visits


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_visits(tmp_path, tensorboard=True)
    (folder,) = tmp_path.rglob("tensorboard")
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [5, 10, 15, 20]
    assert found.Scalars("train/loss")[0].value == pytest.approx(record_of(5).loss)
    assert [event.step for event in found.Scalars("validation/loss")] == [10, 20]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    two_visits(tmp_path, mlflow="experiments of a student")
    (folder,) = tmp_path.rglob("mlflow")
    client = mlflow.MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("experiments of a student")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [5, 10, 15, 20]
    assert run.data.metrics["validation/loss"] == 2.5 and run.data.tags["stopped"] == "finished"
    assert run.info.status == "FINISHED" and int(run.data.params["world"]) >= 1
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml"]


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_CONSOLE", "off")):
        monkeypatch.setenv(name, value)
    two_visits(tmp_path, wandb="project")
    logs = sorted(tmp_path.rglob("run-*.wandb"))
    assert len(logs) == 2 and len({log.name for log in logs}) == 1, "both visits have one id"
    for log in logs:
        assert eventually(partial(has_losses, log)), log.read_bytes()[:200]


def has_losses(log: Path) -> bool:
    stored = log.read_bytes()
    return stored.count(b"train/loss") >= 2 and b"validation/loss" in stored


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """A process of its own writes the file, and may be late where others keep the cores busy."""
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True
