"""TensorBoard, when `train.tensorboard` is on; Weights & Biases and MLflow, when `train.wandb` names a project and
`train.mlflow` an experiment.

All draw one chart per name: `scalars` turns a step into named numbers.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moefold.config.loading import dump_run, plain_data
from moefold.errors import BackendError
from moefold.ops.engines import load_engine
from moefold.private_files import OWN_MODE, replace_file
from moefold.train.callback import Callback, Control, Evaluation, RunInfo, StepRecord, finite_metrics
from moefold.train.metrics import Meter, Speed, device_name, router_stats


class TensorBoard(Callback):
    """Event files in the run's directory. A resumed run purges the steps that it is about to repeat."""

    def __init__(self, device: str | None = None) -> None:
        self._make = _package("tensorboard", "false").SummaryWriter
        self._device = device
        self._writer: Any = None
        self._meter: Meter | None = None
        self._every = 1

    def on_start(self, info: RunInfo) -> None:
        purge_step = None if info.resumed_from is None else info.resumed_from + 1
        self._writer = self._make(log_dir=str(info.directory / "tensorboard"), purge_step=purge_step)
        self._meter = Meter(info, self._device or device_name())
        self._every = max(info.run.train.log_every, 1)

    def after_step(self, record: StepRecord, control: Control) -> None:
        assert self._meter is not None, "on_start comes first"
        if record.step % self._every == 0 or record.step == record.steps or record.skipped is not None:
            for name, value in scalars(record, self._meter.speed([record])).items():
                self._writer.add_scalar(name, value, record.step)

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        for name, value in evaluation_scalars(evaluation).items():
            self._writer.add_scalar(name, value, evaluation.step)

    def on_end(self, reason: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _package(name: str, otherwise: str) -> Any:
    try:
        return load_engine(name)
    except BackendError as error:
        raise BackendError(
            f"train.{error}; or set train.{name} to {otherwise}: metrics.jsonl has the same numbers"
        ) from error


ID_FILE, MLFLOW_ID_FILE = "wandb_id", "mlflow_id"


class WeightsAndBiases(Callback):
    """A resumed run continues the same page: its id is kept in the run's directory."""

    def __init__(self, project: str, device: str | None = None) -> None:
        self._wandb = _package("wandb", "null")
        self._project = project
        self._device = device
        self._run: Any = None
        self._meter: Meter | None = None
        self._every = 1

    def on_start(self, info: RunInfo) -> None:
        self._run = self._wandb.init(
            project=self._project,
            name=info.run.name,
            id=_kept(info.directory / ID_FILE, info, lambda: secrets.token_hex(8)),
            resume="allow",
            dir=str(info.directory),
            config=plain_data(info.run) | {"world": info.world, "parameters": info.parameters.total},
        )
        # An own step axis: the service refuses to log a step twice, and a resumed run repeats some.
        self._run.define_metric("*", step_metric="step")
        self._meter = Meter(info, self._device or device_name())
        self._every = max(info.run.train.log_every, 1)

    def after_step(self, record: StepRecord, control: Control) -> None:
        assert self._meter is not None, "on_start comes first"
        if record.step % self._every == 0 or record.step == record.steps or record.skipped is not None:
            self._run.log({"step": record.step, **scalars(record, self._meter.speed([record]))})

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        self._run.log({"step": evaluation.step, **evaluation_scalars(evaluation)})

    def on_end(self, reason: str) -> None:
        if self._run is not None:
            self._run.summary["stopped"] = reason
            self._run.finish()
            self._run = None


class MLflow(Callback):
    """Where MLFLOW_TRACKING_URI says, or in files in the run's directory; a resumed run continues the same one."""

    def __init__(self, experiment: str, device: str | None = None) -> None:
        self._mlflow = _package("mlflow", "null")
        self._experiment = experiment
        self._device = device
        self._client: Any = None
        self._id = ""
        self._meter: Meter | None = None
        self._every = 1

    def on_start(self, info: RunInfo) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if where is None:
            where = (info.directory / "mlflow").absolute().as_uri()
            # MLflow asks for this before it writes files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = self._mlflow.MlflowClient(tracking_uri=where)
        self._id = _kept(info.directory / MLFLOW_ID_FILE, info, lambda: self._create(info))
        self._meter = Meter(info, self._device or device_name())
        self._every = max(info.run.train.log_every, 1)

    def _create(self, info: RunInfo) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        run_id = str(self._client.create_run(experiment, run_name=info.run.name).info.run_id)
        self._client.log_param(run_id, "world", info.world)
        self._client.log_param(run_id, "parameters", info.parameters.total)
        self._client.log_text(run_id, dump_run(info.run), "config.yaml")
        return run_id

    def after_step(self, record: StepRecord, control: Control) -> None:
        assert self._meter is not None, "on_start comes first"
        if record.step % self._every == 0 or record.step == record.steps or record.skipped is not None:
            self._log(scalars(record, self._meter.speed([record])), record.step)

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        self._log(evaluation_scalars(evaluation), evaluation.step)

    def on_end(self, reason: str) -> None:
        if self._client is not None:
            self._client.set_tag(self._id, "stopped", reason)
            self._client.set_terminated(self._id, "FINISHED" if reason == "finished" else "KILLED")
            self._client = None

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)


def _kept(path: Path, info: RunInfo, make: Callable[[], str]) -> str:
    """An id that a resumed run finds again in its directory."""
    if info.resumed_from is not None and path.exists():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, made := make(), OWN_MODE)
    return made


def scalars(record: StepRecord, speed: Speed) -> dict[str, float]:
    """Only finite numbers; names are grouped by what stands before the slash. Those of layers end with the number among
    the MoE layers."""
    found = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/skipped": float(record.skipped is not None),
        **{f"balance/{name}": value for name, value in record.balance.items()},
        "speed/tokens_per_s": speed.tokens_per_s,
        "speed/tflops_per_rank": speed.tflops,
        **({} if speed.mfu is None else {"speed/mfu": speed.mfu}),
        "speed/step_seconds": speed.step_seconds,
        "speed/data_wait": speed.data_wait,
        "speed/memory_bytes": float(record.memory_bytes),
        "router/dropped": float(record.dropped),
    }
    if record.counts:
        stats = router_stats(record.counts)
        found |= {"router/max_load": stats.max_load, "router/entropy": stats.entropy, "router/dead": float(stats.dead)}
        for number, layer in enumerate(stats.layers):
            found |= {f"max_load/{number}": layer.max_load, f"entropy/{number}": layer.entropy}
    for name, values in record.layer_balance.items():
        found |= {f"balance_{name}/{number}": value for number, value in enumerate(values)}
    found |= {_chart(name, "metrics"): value for name, value in record.metrics.items()}
    return finite_metrics(found)


def evaluation_scalars(evaluation: Evaluation) -> dict[str, float]:
    added = {_chart(name, "validation"): value for name, value in evaluation.metrics.items()}
    return {"validation/loss": evaluation.loss} | finite_metrics(added)


def _chart(name: str, group: str) -> str:
    """A metric's own group, if its name has one, or the given one."""
    return name if "/" in name else f"{group}/{name}"
