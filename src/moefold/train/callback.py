"""What the training loop says about itself, and who may listen.

The loop builds one `StepRecord` per step, from numbers that are already the same on all ranks, and hands it to its
callbacks on rank 0. A callback never touches the run: it prints, writes or draws. So watching more can not change
what is computed, and a run without callbacks computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moefold.blueprint.param_counts import Counts
from moefold.config.run import RunConfig


@dataclass(frozen=True)
class RunInfo:
    """What holds for the whole run. `resumed_from` is the last finished step of the checkpoint it goes on from."""

    run: RunConfig
    world: int
    directory: Path
    resumed_from: int | None
    parameters: Counts


@dataclass(frozen=True)
class StepRecord:
    """One step of the whole run, all ranks together.

    `step` counts from 1 to `steps`. `balance` holds the balance losses that are on, by name. `grad_norm` is the
    gradient's norm before the clip. `seconds` says where the time went: "data" waiting for tokens, "step" computing,
    "save" held up by a checkpoint, "total" from its beginning to its end, without validation. `counts` has a row of
    tokens per expert for every mixture-of-experts layer, first layer first. `skipped` is the reason why the step
    changed nothing.
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


class Callback:
    """Override what you want to hear. Called on rank 0 only, between steps, in the loop's own thread."""

    def on_start(self, info: RunInfo) -> None:
        """Before the first step."""

    def on_step(self, record: StepRecord) -> None:
        """After every step; a callback chooses its own interval."""

    def on_validation(self, step: int, loss: float) -> None:
        """After a validation, with its mean loss per token."""

    def on_save(self, step: int, path: Path) -> None:
        """After a checkpoint was committed."""

    def on_stop(self, reason: str) -> None:
        """Once, last: finished, interrupted or failed."""


class Callbacks(Callback):
    """Several callbacks as one, told in order."""

    def __init__(self, members: Iterable[Callback]) -> None:
        self.members = tuple(members)

    def on_start(self, info: RunInfo) -> None:
        for member in self.members:
            member.on_start(info)

    def on_step(self, record: StepRecord) -> None:
        for member in self.members:
            member.on_step(record)

    def on_validation(self, step: int, loss: float) -> None:
        for member in self.members:
            member.on_validation(step, loss)

    def on_save(self, step: int, path: Path) -> None:
        for member in self.members:
            member.on_save(step, path)

    def on_stop(self, reason: str) -> None:
        for member in self.members:
            member.on_stop(reason)
