"""The lr as a function of the step: linear warmup, then constant, linear, cosine or WSD decay, or phases.

Pure arithmetic on integers and floats, so a resumed run has the same lr to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

from moefold.config.optim import LRScheduleConfig, OptimConfig


def lr_at(step: int, steps: int, optim: OptimConfig) -> float:
    """The lr of step ``step`` (the first is 1) of ``steps``."""
    schedule = optim.lr_schedule
    if step <= schedule.warmup:
        return optim.lr * step / schedule.warmup
    decay = DECAYS[schedule.kind](step, steps, schedule)
    return optim.lr * (schedule.floor + (1.0 - schedule.floor) * decay)


def _progress(step: int, first: int, last: int) -> float:
    """0 at ``first``, 1 at ``last`` and after."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


def _constant(step: int, steps: int, schedule: LRScheduleConfig) -> float:
    return 1.0


def _linear(step: int, steps: int, schedule: LRScheduleConfig) -> float:
    return 1.0 - _progress(step, schedule.warmup, steps)


def _cosine(step: int, steps: int, schedule: LRScheduleConfig) -> float:
    return 0.5 * (1.0 + cos(pi * _progress(step, schedule.warmup, steps)))


def _wsd(step: int, steps: int, schedule: LRScheduleConfig) -> float:
    return 1.0 - _progress(step, steps - schedule.decay, steps)


def _phases(step: int, steps: int, schedule: LRScheduleConfig) -> float:
    """Each phase starts where the one before ended; the first one after the warmup."""
    begin, start, share = schedule.warmup, 1.0, 0.0
    for phase in schedule.phases:
        share += phase.share
        end = round(share * steps)
        if step <= end:
            break
        begin, start = end, phase.to
    way = SHAPES[phase.shape](_progress(step, begin, end))
    return start + (phase.to - start) * way


# How far a phase is on its way, by its progress.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - cos(pi * progress)),
}
# The position between floor (0) and peak (1).
DECAYS: dict[str, Callable[[int, int, LRScheduleConfig], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "phases": _phases,
}
