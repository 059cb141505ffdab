"""The callbacks of a run by default: JSONL and console lines, a progress bar on a terminal, and the services that its
configuration names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

from moefold.config.train import TrainConfig
from moefold.train.callback import Callback, Callbacks, Control, Evaluation, RunInfo, StepRecord
from moefold.train.callbacks.console import ConsoleLines, ProgressBar, print_unless_closed
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.callbacks.services import MLflow, TensorBoard, WeightsAndBiases
from moefold.train.fault_tolerance.signals import print_stderr
from moefold.train.metrics import finite


def default_callbacks(as_json: bool = False) -> list[Callback]:
    """With `as_json` standard output holds one JSON object, the last step's record; lines go to standard error."""
    chosen: list[Callback] = [JsonLines()]
    if sys.stderr.isatty():
        # Before the lines: it redirects the streams so that lines appear above the bar.
        chosen.append(ProgressBar())
    chosen += [ConsoleLines(to_stderr=as_json), Services()]
    return chosen + [LastRecord()] if as_json else chosen


def services(train: TrainConfig) -> list[Callback]:
    """The callbacks of `train.tensorboard`, `train.wandb` and `train.mlflow`; a missing package is an error.

    `Trainer` calls this before it starts anything, so that the error comes early.
    """
    chosen: list[Callback] = [TensorBoard()] if train.tensorboard else []
    chosen += [] if train.wandb is None else [WeightsAndBiases(train.wandb)]
    return chosen if train.mlflow is None else chosen + [MLflow(train.mlflow)]


class Guarded(Callback):
    """A service whose failure ends its own reports and not the run: a disk that is full, a server that is gone.

    At the first start of a run its failure is an error, which the user can mend at once.
    """

    def __init__(self, member: Callback) -> None:
        self._member, self._failed = member, False

    def on_start(self, info: RunInfo) -> None:
        if info.resumed_from is None:
            self._member.on_start(info)
        else:
            self._try(self._member.on_start, info)

    def after_step(self, record: StepRecord, control: Control) -> None:
        self._try(self._member.after_step, record, control)

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        self._try(self._member.on_evaluate, evaluation, control)

    def on_end(self, reason: str) -> None:
        self._try(self._member.on_end, reason)

    def _try(self, hook: Callable[..., None], *given: object) -> None:
        if self._failed:
            return
        try:
            hook(*given)
        except Exception as error:
            self._failed = True
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            print_stderr(
                f"warning: {type(self._member).__name__} failed ({said}) and gets nothing more from this start; "
                "metrics.jsonl has the same numbers"
            )


class Services(Callbacks):
    """The services of the run, which is known when it starts."""

    def __init__(self) -> None:
        super().__init__(())

    def on_start(self, info: RunInfo) -> None:
        self.members = tuple(map(Guarded, services(info.run.train)))
        super().on_start(info)


class LastRecord(Callback):
    """Prints the last step's record as JSON when the run stops."""

    def __init__(self) -> None:
        self._last: StepRecord | None = None

    def after_step(self, record: StepRecord, control: Control) -> None:
        self._last = record

    def on_end(self, reason: str) -> None:
        record = None if self._last is None else finite(asdict(self._last))
        print_unless_closed(json.dumps({"reason": reason, "record": record}, allow_nan=False), sys.stdout)
