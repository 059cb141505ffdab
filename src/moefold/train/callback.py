"""Callbacks: the hooks of the training loop, what they are given, and what they may ask for.

The loop builds one `StepRecord` per step from numbers that are already the same on all ranks. Console lines,
`metrics.jsonl`, TensorBoard and Weights & Biases are callbacks too. Through `Control` a callback can
add metrics, ask for a checkpoint and ask to stop. Requests are agreed between the ranks after the step, so that all of
them save or stop together.

`before_step` and `after_backward` run on every rank, because gradients are sharded: a callback that needs a number of
the whole model must reduce it over the ranks, in the same order on all of them. Every other hook runs on rank 0 only,
and must not call a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.blueprint.param_counts import Counts
from moefold.config.run import RunConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from moefold.plan.elastic_layout import ElasticLayout


@dataclass(frozen=True)
class RunInfo:
    """What holds for the whole run. `resumed_from` is the last finished step of the checkpoint it continues from.

    >>> import moefold
    >>> class Describe(moefold.Callback):
    ...     def on_start(self, info):
    ...         assert isinstance(info, moefold.RunInfo)
    ...         print(info.run.name, info.world, info.directory.name, info.resumed_from)
    >>> run = moefold.load_run("debug_tiny", {"train.steps": 1, "train.directory": tmp})
    >>> _ = moefold.Trainer(run, callbacks=[Describe()], reporters=[]).fit()
    debug_tiny 1 debug_tiny None
    """

    run: RunConfig
    world: int
    directory: Path
    resumed_from: int | None
    parameters: Counts
    # cpu or cuda.
    device: str = "cpu"
    # The run and its ranks as they were asked for, where ranks are gone and `run` has another layout.
    asked: ElasticLayout | None = None


@dataclass(frozen=True)
class StepRecord:
    """One step of the whole run, all ranks together.

    `step` counts from 1 to `steps`. `balance` holds the balance losses that are on, by name, and `layer_balance` what
    each MoE layer adds to them, first layer first. `grad_norm` is the gradient norm before clipping. `seconds` says
    where the time went: "data" waiting for tokens, "step" computing, "save" blocked by a checkpoint, "total" from its
    beginning to its end, without validation. `counts` has a row of tokens per expert for every MoE layer, first layer
    first. `skipped` is the reason why the step changed nothing. `metrics` are those that callbacks added. `state_hash`
    is that of parameters and optimizer states of all ranks after the step, if it was computed
    (`train.corruption.every`).

    >>> import moefold
    >>> class PrintLoss(moefold.Callback):
    ...     def after_step(self, record, control):
    ...         assert isinstance(record, moefold.StepRecord)
    ...         print(record.step, "of", record.steps, record.tokens, "tokens")
    >>> run = moefold.load_run("debug_tiny", {"train.steps": 1, "train.directory": tmp})
    >>> _ = moefold.Trainer(run, callbacks=[PrintLoss()], reporters=[]).fit()
    1 of 1 512 tokens
    """

    step: int
    steps: int
    loss: float
    balance: dict[str, float]
    grad_norm: float
    lr: float
    tokens: int
    seconds: dict[str, float]
    counts: list[list[int]] | None
    dropped: int
    skipped: str | None
    memory_bytes: int
    world: int
    sample_ids_digest: str
    metrics: dict[str, float] = field(default_factory=dict)
    state_hash: str | None = None
    layer_balance: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """A validation after `step`: the mean loss per label, and the metrics that callbacks added.

    >>> import math, moefold
    >>> class Perplexity(moefold.Callback):
    ...     def on_evaluate(self, evaluation, control):
    ...         assert isinstance(evaluation, moefold.Evaluation)
    ...         control.log("perplexity", math.exp(evaluation.loss))
    ...         print("perplexity" in evaluation.metrics)
    >>> run = moefold.load_run("debug_tiny", {"train.steps": 1, "train.directory": tmp})
    >>> _ = moefold.Trainer(run, callbacks=[Perplexity()], reporters=[]).fit()
    True
    """

    step: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


class Control:
    """What a callback may look at and ask for.

    `model` and `optimizer` are this rank's: parameters may be shards. A callback that changes them changes the run, and
    says so (`model_changed`).

    >>> import moefold
    >>> class Watch(moefold.Callback):
    ...     def after_backward(self, gradients, control):
    ...         assert isinstance(control, moefold.Control)
    ...         control.log("router_grad", sum(g.abs().max() for n, g in gradients.items() if "router" in n))
    ...     def after_step(self, record, control):
    ...         print(record.metrics["router_grad"] > 0)
    ...         control.request_save()
    ...     def on_save(self, step, path):
    ...         print("saved", path.name)
    >>> run = moefold.load_run("debug_tiny", {"train.steps": 1, "train.directory": tmp})
    >>> _ = moefold.Trainer(run, callbacks=[Watch()], reporters=[]).fit()
    True
    saved step_00000001
    """

    def __init__(self, rank: int, world: int, model: nn.Module, optimizer: Optimizer) -> None:
        self.rank, self.world, self.model, self.optimizer = rank, world, model, optimizer
        self.save_requested = False
        self.stop_requested: str | None = None
        self.changed_model = False
        self.metrics: dict[str, float] = {}

    def log(self, name: str, value: float) -> None:
        """Add a metric to the record of this step, or of this evaluation. What rank 0 logs is kept.

        Until the end of `after_step` it belongs to the step. It appears in `metrics.jsonl`, on the console, in
        TensorBoard and in Weights & Biases.
        """
        if not name or name in _TAKEN or any(letter.isspace() or letter == "=" for letter in name):
            raise ValueError(
                f"a metric cannot be called {name!r}: use a name without blanks and '=' that is no field of StepRecord"
            )
        self.metrics[name] = float(value)

    def request_save(self) -> None:
        """Write a checkpoint after this step, on all ranks; may be asked on any rank."""
        self.save_requested = True

    def request_stop(self, reason: str = "a callback asked") -> None:
        """Stop after this step, on all ranks, with a checkpoint; may be asked on any rank."""
        self.stop_requested = reason

    def model_changed(self) -> None:
        """Say that the callback changed parameters or optimizer states, which between two updates nothing else may.

        What changes them unsaid is reported as silent corruption (`train.corruption`).
        """
        self.changed_model = True


_TAKEN = frozenset(field.name for field in fields(StepRecord))


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isfinite(value)}


class Callback:
    """Override the hooks you need; each does nothing by default. They run in the loop's own thread, in list order.

    Order of a step: `before_step`, forward and backward of all microbatches, `after_backward`, clipping and update,
    `after_step`; then checkpoint and validation where due. An exception in a hook ends the run like any other.

    >>> import moefold
    >>> class StopEarly(moefold.Callback):
    ...     def after_step(self, record, control):
    ...         control.log("loss_per_lr", record.loss / record.lr)
    ...         if record.step == 2:
    ...             control.request_stop("two steps are enough")
    >>> run = moefold.load_run("debug_tiny", {"train.steps": 100, "train.directory": tmp})
    >>> moefold.Trainer(run, callbacks=[StopEarly()], reporters=[]).fit()
    'stopped'
    """

    def on_start(self, info: RunInfo) -> None:
        """Before the first step. Rank 0."""

    def before_step(self, step: int, control: Control) -> None:
        """Before the data of step `step` is read. All ranks."""

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        """Gradients of the whole step by parameter name, reduced over data-parallel ranks, before clipping and before
        the update. Values are this rank's shards. All ranks."""

    def after_step(self, record: StepRecord, control: Control) -> None:
        """After the update of every step; a callback chooses its own interval. Rank 0."""

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        """After a validation. Rank 0."""

    def on_save(self, step: int, path: Path) -> None:
        """After a checkpoint was committed. Rank 0."""

    def on_save_failed(self, step: int, reason: str, retries_left: int) -> None:
        """When the checkpoint of `step` could not be written; it is tried again if `retries_left` is not 0. Rank 0."""

    def on_roll_back(self, step: int, reason: str) -> None:
        """When training continues from the checkpoint of an earlier step, as after silent corruption. Rank 0."""

    def on_straggler(self, step: int, rank: int, slow: bool, seconds: Mapping[str, float]) -> None:
        """When a rank is found to be slow, or, with `slow` False, no longer to be (`train.stragglers`). `seconds` per
        step: its "own" work, the median "peers_own" of those that do the same, and its "waited", "queued", "data" and
        "step". Rank 0."""

    def on_error(self, error: BaseException) -> None:
        """When the run fails, before `on_end`. Rank 0, if that is where the error is seen."""

    def on_end(self, reason: str) -> None:
        """Once, last: "finished", "interrupted" (a signal), "stopped: REASON" (a callback) or "failed". Rank 0."""


class Callbacks(Callback):
    """Several callbacks as one, called in order."""

    def __init__(self, members: Iterable[Callback]) -> None:
        self.members = tuple(members)

    def on_start(self, info: RunInfo) -> None:
        for member in self.members:
            member.on_start(info)

    def before_step(self, step: int, control: Control) -> None:
        for member in self.members:
            member.before_step(step, control)

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        for member in self.members:
            member.after_backward(gradients, control)

    def after_step(self, record: StepRecord, control: Control) -> None:
        for member in self.members:
            member.after_step(record, control)

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        for member in self.members:
            member.on_evaluate(evaluation, control)

    def on_save(self, step: int, path: Path) -> None:
        for member in self.members:
            member.on_save(step, path)

    def on_save_failed(self, step: int, reason: str, retries_left: int) -> None:
        for member in self.members:
            member.on_save_failed(step, reason, retries_left)

    def on_roll_back(self, step: int, reason: str) -> None:
        for member in self.members:
            member.on_roll_back(step, reason)

    def on_straggler(self, step: int, rank: int, slow: bool, seconds: Mapping[str, float]) -> None:
        for member in self.members:
            member.on_straggler(step, rank, slow, seconds)

    def on_error(self, error: BaseException) -> None:
        for member in self.members:
            member.on_error(error)

    def on_end(self, reason: str) -> None:
        for member in self.members:
            member.on_end(reason)
