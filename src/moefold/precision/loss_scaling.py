"""A loss scale from step to step: float16 without underflow. `pipeline/step.py` divides gradients by it.

The rule of a dynamic scale is Megatron's ``DynamicGradScaler``:

- a step with a gradient that is not finite, on any rank, is skipped by all. It restarts the count of finite steps and
  takes one of ``hysteresis``; when none is left, the scale is halved, down to ``min``.
- ``window`` finite steps in a row double the scale, and ``hysteresis`` is whole again.

With hysteresis 1 this is torch.amp.GradScaler. A step that is skipped for another reason counts as neither. The state
is a few numbers that are equal on all ranks, because what they follow from is; it goes into checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite

from moefold.config.precision import LossScaleConfig

GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5
# Of float32.
_LARGEST = 2.0**128 - 2.0**104


@dataclass(frozen=True)
class LossScale:
    """Of the next step; trackers are Megatron's."""

    scale: float
    # Finite steps since the last change or overflow, and overflows that the scale still outlasts.
    growth_tracker: int
    hysteresis_tracker: int


def loss_scale_to_json(state: LossScale | None) -> dict[str, object]:
    """An entry of a checkpoint's state; none without a scale."""
    return {} if state is None else {"loss_scale": asdict(state)}


def loss_scale_from_json(saved: Mapping[str, float] | None) -> LossScale | None:
    """Of that entry's value."""
    if saved is None:
        return None
    return LossScale(float(saved["scale"]), int(saved["growth_tracker"]), int(saved["hysteresis_tracker"]))


def first_loss_scale(config: LossScaleConfig) -> LossScale:
    return LossScale(config.initial if config.scale == "dynamic" else config.scale, 0, config.hysteresis)


def resumed_loss_scale(config: LossScaleConfig | None, saved: LossScale | None) -> LossScale | None:
    """Of a run whose checkpoint may have been written under another compute format, or under another kind of scale."""
    if config is None:
        return None
    first = first_loss_scale(config)
    return first if saved is None else saved if config.scale == "dynamic" else replace(saved, scale=first.scale)


def next_loss_scale(state: LossScale, config: LossScaleConfig, found_inf: bool) -> LossScale:
    """After a step with a gradient that was not finite, or after one that was taken."""
    if config.scale != "dynamic":
        return state
    if found_inf:
        hysteresis = state.hysteresis_tracker - 1
        backed_off = max(state.scale * BACKOFF_FACTOR, config.min)
        return LossScale(backed_off if hysteresis <= 0 else state.scale, 0, hysteresis)
    if state.growth_tracker + 1 < config.window:
        return replace(state, growth_tracker=state.growth_tracker + 1)
    grown = state.scale * GROWTH_FACTOR
    # As torch.amp.GradScaler: no further than float32 goes.
    return LossScale(grown if grown <= _LARGEST else state.scale, 0, config.hysteresis)


def loss_scale_after_norm(
    state: LossScale | None, config: LossScaleConfig | None, grad_norm: float
) -> LossScale | None:
    """After a step that is skipped where its grad norm is not finite, and only there."""
    return None if state is None or config is None else next_loss_scale(state, config, not isfinite(grad_norm))


def factor_of(state: LossScale | None) -> float:
    """What the loss is multiplied by."""
    return 1.0 if state is None else state.scale


def can_back_off(state: LossScale, config: LossScaleConfig) -> bool:
    """Whether a lower scale is still to be tried after an overflow."""
    return config.scale == "dynamic" and state.scale > config.min
