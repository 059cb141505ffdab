"""A bar on a terminal, under the lines."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from moefold.train.callback import Callback, RunInfo, StepRecord
from moefold.train.metrics import Meter, device_name
from moefold.units import format_count, format_seconds


class ProgressBar(Callback):
    """On standard error. Lines printed meanwhile appear above it; output sent to a file still goes there."""

    def __init__(self, console: Console | None = None, device: str | None = None) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),
        )
        self._device = device
        self._meter: Meter | None = None
        self._task: TaskID | None = None

    def on_start(self, info: RunInfo) -> None:
        self._meter = Meter(info, self._device or device_name())
        done, total = info.resumed_from or 0, info.run.train.steps
        self._task = self._progress.add_task(info.run.name, completed=done, total=total, now="")
        self._progress.start()

    def on_step(self, record: StepRecord) -> None:
        assert self._meter is not None and self._task is not None, "on_start comes first"
        left, speed = self._meter.eta(record), self._meter.speed([record])
        now = f"loss {record.loss:.3f}  {format_count(speed.tokens_per_s)} tokens/s  {format_seconds(left)} left"
        self._progress.update(self._task, completed=record.step, now=now)

    def on_stop(self, reason: str) -> None:
        self._progress.stop()
