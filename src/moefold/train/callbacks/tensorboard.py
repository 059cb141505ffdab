"""TensorBoard, when `train.tensorboard` is on: event files in the run's directory."""

from __future__ import annotations

from typing import Any

from moefold.errors import BackendError
from moefold.train.callbacks.scalars import scalars
from moefold.train.events import Callback, RunInfo, StepRecord
from moefold.train.metrics import Meter, device_name


class TensorBoard(Callback):
    """A resumed run hides what it is about to repeat."""

    def __init__(self, device: str | None = None) -> None:
        self._make = _writer_class()
        self._device = device
        self._writer: Any = None
        self._meter: Meter | None = None
        self._every = 1

    def on_start(self, info: RunInfo) -> None:
        again = None if info.resumed_from is None else info.resumed_from + 1
        self._writer = self._make(log_dir=str(info.directory / "tensorboard"), purge_step=again)
        self._meter = Meter(info, self._device or device_name())
        self._every = max(info.run.train.log_every, 1)

    def on_step(self, record: StepRecord) -> None:
        assert self._meter is not None, "on_start comes first"
        if record.step % self._every == 0 or record.step == record.steps or record.skipped is not None:
            for name, value in scalars(record, self._meter.speed([record])).items():
                self._writer.add_scalar(name, value, record.step)

    def on_validation(self, step: int, loss: float) -> None:
        self._writer.add_scalar("validation/loss", loss, step)

    def on_stop(self, reason: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BackendError(
            "train.tensorboard: true needs the package tensorboard, which is not installed; "
            "run `pip install tensorboard`, or set train.tensorboard to false: metrics.jsonl has the same numbers"
        ) from error
    return SummaryWriter
