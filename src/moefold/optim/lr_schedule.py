"""The learning rate as a function of the step: a rise, perhaps a plateau, and a way down.

Pure arithmetic on integers and floats, so a resumed run has the same rate to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

from moefold.config.optim import OptimConfig, RatesConfig


def rate_at(step: int, steps: int, optim: OptimConfig) -> float:
    """The rate of step ``step`` (the first is 1) of ``steps``."""
    rates = optim.rates
    if step <= rates.warmup:
        return optim.rate * step / rates.warmup
    share = SHAPES[rates.kind](step, steps, rates)
    return optim.rate * (rates.floor + (1.0 - rates.floor) * share)


def _progress(step: int, first: int, last: int) -> float:
    """0 at ``first``, 1 at ``last`` and after."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


def _constant(step: int, steps: int, rates: RatesConfig) -> float:
    return 1.0


def _linear(step: int, steps: int, rates: RatesConfig) -> float:
    return 1.0 - _progress(step, rates.warmup, steps)


def _cosine(step: int, steps: int, rates: RatesConfig) -> float:
    return 0.5 * (1.0 + cos(pi * _progress(step, rates.warmup, steps)))


def _wsd(step: int, steps: int, rates: RatesConfig) -> float:
    return 1.0 - _progress(step, steps - rates.decay, steps)


# What is left of the way between floor and peak, 1 at the peak.
SHAPES: dict[str, Callable[[int, int, RatesConfig], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}
