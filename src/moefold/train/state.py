"""The state of the loop, a few numbers in every checkpoint's manifest; and the rule that skips a bad step.

Whether a step is skipped is decided from numbers that are the same on every rank, so all ranks decide alike. A skipped
step leaves parameters, moments and biases as they were, bit for bit: the update is branched around, not multiplied by
zero (zero times NaN is NaN). A number that is not finite never enters the statistics either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from math import isfinite
from statistics import fmean, pstdev
from typing import Any

from moefold.config.train import HealthConfig
from moefold.errors import CheckpointError, TrainingError
from moefold.precision.loss_scaling import LossScale, loss_scale_from_json
from moefold.train.fault_tolerance.signals import INTERRUPTED as EXIT_INTERRUPTED


class Outcome(IntEnum):
    """How a run that did not fail ended; more than one rank's outcome is the largest of them."""

    FINISHED = 0
    # A callback asked to stop.
    STOPPED = 1
    # A signal asked to stop.
    INTERRUPTED = EXIT_INTERRUPTED


@dataclass(frozen=True)
class TrainState:
    """``samples`` is the whole position in the data: the order of samples is a function of the seed alone."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0
    # Recent losses and norms of accepted steps, which a spike is measured against.
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    # Of the next step, with `precision.compute: float16`.
    loss_scale: LossScale | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainState:
        try:
            return cls(
                step=int(data["step"]),
                samples=int(data["samples"]),
                tokens=int(data["tokens"]),
                skips_in_a_row=int(data["skips_in_a_row"]),
                losses=tuple(map(float, data["losses"])),
                norms=tuple(map(float, data["norms"])),
                loss_scale=loss_scale_from_json(data.get("loss_scale")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the trainer's state is not what this version writes: {error}") from None


# Below this many accepted steps a standard deviation says little.
_FEWEST = 16


def skip_reason(
    state: TrainState, loss: float, balance: Mapping[str, float], grad_norm: float, config: HealthConfig
) -> str | None:
    """Why this step must be skipped; None if it need not.

    ``balance`` holds the balance losses by name: one may overflow while its gradient, and so the norm, is still finite.
    """
    for name, value in balance.items():
        if not isfinite(value):
            return f"balance loss {name} is {value}"
    for name, value, recent in (("loss", loss, state.losses), ("gradient norm", grad_norm, state.norms)):
        if not isfinite(value):
            return f"{name} is {value}"
        if config.spike_sigma and len(recent) >= _FEWEST:
            mean, spread = fmean(recent), pstdev(recent)
            if value > mean + config.spike_sigma * spread:
                return f"{name} {value:.4g} is more than {config.spike_sigma:g} sigma above its mean {mean:.4g}"
    return None


def after_step(
    state: TrainState, loss: float, grad_norm: float, skipped: str | None, config: HealthConfig, searching: bool = False
) -> TrainState:
    """The statistics with this step in them; too many skips in a row end the run.

    ``searching``: a lower loss scale is tried next, so that this skip is none of them.
    """
    if skipped is None:
        window = config.spike_window
        return replace(
            state, skips_in_a_row=0, losses=(*state.losses, loss)[-window:], norms=(*state.norms, grad_norm)[-window:]
        )
    if searching:
        return state
    skips = state.skips_in_a_row + 1
    if skips >= config.max_consecutive_skips:
        raise TrainingError(
            f"step {state.step + 1}: {skips} steps in a row were skipped, the last because {skipped}; "
            "lower the lr, look at the data, or raise train.health.max_consecutive_skips above "
            f"{config.max_consecutive_skips}"
        )
    return replace(state, skips_in_a_row=skips)
