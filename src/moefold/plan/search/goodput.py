"""How much of the time a long run really trains: failures, the best checkpoint interval, days for a token budget.

Failures come at random, each GPU on average once per `mtbf`, so a run of N GPUs fails at rate N / mtbf. Every failure
costs the restart and the work since the last checkpoint that is whole on disk. Saving more often loses less work and
costs more saves. The model is exact for failures without memory (exponential gaps), which may also hit a save or a
restart:

    work w between saves, save stops training for s, writing goes on behind it for b, restart r, failure rate q
    a period lasts p = w + s; a new checkpoint counts b later

From one whole checkpoint to the next it takes p while nothing fails. After a failure the run begins anew from the older
one and needs p + b until the next is whole, with a restart before every try:

    E(anew)   = exp(q r) (exp(q (p + b)) - 1) / q
    E(period) = (1 - exp(-q p)) (1/q + (exp(q r) - 1)/q + E(anew))

With b = 0 this is Daly's formula, exp(q r) (exp(q p) - 1) / q; Young's w = sqrt(2 s / q) is its limit for rare
failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from moefold.errors import ConfigError, Problem

# One of 16,384 GPUs failed about every 3 hours (419 unexpected interruptions in 54 days: Llama 3, 2024).
USUAL_MTBF_HOURS = 50_000.0
USUAL_RESTART_SECONDS = 600.0
_GOLDEN = (sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and what it costs. All in seconds but the rate, which is per second and for the whole run."""

    rate: float
    # Training stands still for so long at every save.
    save: float
    # And so long after that the checkpoint is whole on disk.
    write: float = 0.0
    # From a failure until training goes on.
    restart: float = USUAL_RESTART_SECONDS


@dataclass(frozen=True)
class Goodput:
    """What is left of a run's time at its best checkpoint interval."""

    # Seconds of training between saves: the best, and Young's estimate of it.
    interval: float
    young: float
    # Training seconds over all seconds; 1 minus the three losses below.
    effective: float
    lost_to_saves: float
    lost_to_restarts: float
    lost_to_repeats: float
    failures_per_day: float


def faults_of(
    num_gpus: int, mtbf_hours: float, save: float, write: float = 0.0, restart: float = USUAL_RESTART_SECONDS
) -> Faults:
    problems = [
        Problem(name, f"is {value:g}", "use a positive number")
        for name, value in (("mtbf-hours", mtbf_hours), ("gpus", num_gpus))
        if not 0 < value < inf
    ]
    problems += [
        Problem(name, f"is {value:g} seconds", "use 0 or more")
        for name, value in (("save-seconds", save), ("write-seconds", write), ("restart-seconds", restart))
        if not 0 <= value < inf
    ]
    if problems:
        raise ConfigError(*problems)
    return Faults(num_gpus / (mtbf_hours * 3600), save, write, restart)


def expected_period(work: float, faults: Faults) -> float:
    """Seconds from one whole checkpoint to the next, with all that fails on the way."""
    rate, period = faults.rate, work + faults.save
    if rate == 0:
        return period
    anew = _grow(rate * faults.restart) * _expm1(rate * (period + faults.write)) / rate
    failed = -expm1(-rate * period)
    return failed * (_grow(rate * faults.restart) / rate + anew)


def effective_share(work: float, faults: Faults) -> float:
    """Training seconds over all seconds when saving every ``work`` seconds of training."""
    return work / expected_period(work, faults)


def young(faults: Faults) -> float:
    return sqrt(2 * faults.save / faults.rate) if faults.rate else inf


def best_interval(faults: Faults) -> float:
    """By golden section: the share rises to one peak and falls."""
    # A checkpoint is not begun before the one before it is whole.
    low = max(faults.write, 1e-3)
    high = max(low * 2, 8 * young(faults), 8 / faults.rate if faults.save == 0 else 0.0)
    for _ in range(200):
        near, far = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if effective_share(near, faults) >= effective_share(far, faults):
            high = far
        else:
            low = near
    return (low + high) / 2


def goodput(faults: Faults) -> Goodput:
    """At the best interval. Losses are shares of all time."""
    work = best_interval(faults)
    total = expected_period(work, faults)
    # Every failure begins one downtime, and a restart that fails begins another: expm1(q r) / q in the mean.
    failures = faults.rate * total
    down = expm1(faults.rate * faults.restart) / faults.rate if faults.rate else 0.0
    outside = failures / (1 + faults.rate * down)
    restarts = outside * down / total
    effective, saves = work / total, faults.save / total
    repeats = max(0.0, 1 - effective - saves - restarts)
    return Goodput(work, young(faults), effective, saves, restarts, repeats, 86400 * faults.rate)


def days_for(tokens: float, tokens_per_second: float, effective: float = 1.0) -> float:
    return tokens / tokens_per_second / effective / 86400


def _grow(exponent: float) -> float:
    """exp, but infinite instead of an error: a run that fails faster than it restarts never ends."""
    return exp(exponent) if exponent < 700 else inf


def _expm1(exponent: float) -> float:
    return expm1(exponent) if exponent < 700 else inf
