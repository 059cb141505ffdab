"""Fits the planner's constants to published runs, leaves runs out to measure the error, and writes the fitted module.

The logarithm of the predicted step is compared with that of the measured one, so that a run of minutes and one of
milliseconds count alike. Constants are fitted as logarithms too, each with a Gaussian prior of its own spread: a
constant that few runs depend on stays where microbenchmarks put it. Residuals beyond ten percent lose weight, so a run
that did something its record does not say cannot move a constant far; and a group of n related runs counts as sqrt(n).

**Leaving out.** For every group the constants are fitted again without it, by one more step of the same Gauss-Newton
iteration from the common optimum, and the group is predicted with those. The step uses the derivatives at the optimum;
what is left of the group's influence is of second order in how far the constants move.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moefold.plan.published.points import Point
from moefold.plan.timing.constants import MEANINGS, Constants
from moefold.plan.timing.step_time import step_time

Vector = NDArray[np.float64]
Progress = Callable[[str, int, int], None]

# How far a good prediction is off, which sets the weight of runs against priors, and where residuals lose weight.
_SCATTER = 0.08
_FAR = 0.10
_NUDGE = 0.03
# Errors are counted as predicted / measured. Where logarithms are centred, the mean of that ratio is above one by half
# the variance of the residuals, which are 0.16 wide; so logarithms are centred that much lower.
_SKEW = 0.16**2 / 2
_PRIOR: Vector = np.log([meaning.prior for meaning in MEANINGS])
_SPREAD: Vector = np.array([meaning.spread for meaning in MEANINGS])
_LOW: Vector = np.log([meaning.range[0] for meaning in MEANINGS])
_HIGH: Vector = np.log([meaning.range[1] for meaning in MEANINGS])


@dataclass(frozen=True)
class Fit:
    """Constants, and what a step from them needs: predictions (as logarithms) and their derivatives."""

    theta: Vector
    predicted: Vector
    slopes: NDArray[np.float64]

    @property
    def constants(self) -> Constants:
        return constants_of(self.theta)


def constants_of(theta: Vector) -> Constants:
    return Constants(tuple(float(value) for value in np.exp(theta)))


def log_seconds(points: Sequence[Point], theta: Vector) -> Vector:
    constants = constants_of(theta)
    return np.log([step_time(point.workload, constants).total for point in points])


def fit(points: Sequence[Point], progress: Progress, iterations: int = 6, start: Vector | None = None) -> Fit:
    """All points together."""
    theta = _PRIOR.copy() if start is None else start
    for iteration in range(iterations):
        here = _linearized(points, theta)
        step = _step(here, points, np.ones(len(points)))
        largest = float(np.abs(step).max())
        # Half an e-fold at most: slopes are not true farther away.
        theta = theta + step * min(1.0, 0.5 / max(largest, 1e-12))
        progress("fitting constants", iteration + 1, iterations)
        if largest < 0.02:
            break
    progress("fitting constants", iterations, iterations)
    return _linearized(points, theta)


def left_out(points: Sequence[Point], fitted: Fit, group_of: Callable[[Point], str], progress: Progress) -> Vector:
    """Each point's prediction (a logarithm) by constants that never saw its group."""
    groups = sorted({group_of(point) for point in points})
    predictions = fitted.predicted.copy()
    for number, group in enumerate(groups, 1):
        held = [index for index, point in enumerate(points) if group_of(point) == group]
        kept = np.ones(len(points))
        kept[held] = 0.0
        theta = fitted.theta + _step(fitted, points, kept)
        predictions[held] = log_seconds([points[index] for index in held], theta)
        progress("leaving groups out", number, len(groups))
    return predictions


def _linearized(points: Sequence[Point], theta: Vector) -> Fit:
    predicted = log_seconds(points, theta)
    slopes = np.empty((len(points), len(theta)))
    for index in range(len(theta)):
        nudged = theta.copy()
        nudged[index] += _NUDGE
        slopes[:, index] = (log_seconds(points, nudged) - predicted) / _NUDGE
    return Fit(theta, predicted, slopes)


def _step(here: Fit, points: Sequence[Point], kept: Vector) -> Vector:
    """Where the robust least squares of the linearized predictions and the priors has its minimum."""
    count = Counter(point.leak_group for point in points)
    weight = kept * np.array([1 / math.sqrt(count[point.leak_group]) for point in points]) / _SCATTER**2
    error = here.predicted + _SKEW - np.log([point.seconds for point in points])
    springs = np.diag(1 / _SPREAD**2)
    step = np.zeros_like(here.theta)
    for _ in range(8):
        residual = error + here.slopes @ step
        w = weight / np.sqrt(1 + (residual / _FAR) ** 2)
        left = here.slopes.T @ (w[:, None] * here.slopes) + springs
        right = -here.slopes.T @ (w * error) - (here.theta - _PRIOR) / _SPREAD**2
        step = inside(left, right, _LOW - here.theta, _HIGH - here.theta)
    return step


def inside(left: NDArray[np.float64], right: Vector, low: Vector, high: Vector) -> Vector:
    """The step, where constants that would leave their ranges stay at the end and the others make the best of it."""
    free = np.ones(len(right), dtype=bool)
    step = np.zeros_like(right)
    while free.any():
        step[free] = np.linalg.solve(left[np.ix_(free, free)], right[free] - left[np.ix_(free, ~free)] @ step[~free])
        outside = free & ((step < low - 1e-12) | (step > high + 1e-12))
        if not outside.any():
            break
        step[outside] = np.clip(step, low, high)[outside]
        free &= ~outside
    return step


_HEAD = '''"""Values that published runs gave the planner's constants, and how far runs lie from predictions.

Written by `moefold plan --score FOLDER --constants FILE`, never by hand.
"""

from __future__ import annotations
'''


def fitted_source(
    constants: Constants,
    intervals: Mapping[str, tuple[float, float]],
    anchors: Mapping[str, tuple[float, float]],
) -> str:
    """Python source with four digits of each value: more would be noise."""
    values = "".join(f'    "{meaning.name}": {value:.4g},\n' for meaning, value in zip(MEANINGS, constants.values))
    ranges = "".join(f'    "{kind}": ({low:.3f}, {high:.3f}),\n' for kind, (low, high) in intervals.items())
    variances = "".join(f'    "{name}": ({common:.4f}, {own:.4f}),\n' for name, (common, own) in anchors.items())
    return (
        f"{_HEAD}\nFITTED: dict[str, float] = {{\n{values}}}\n"
        "# Measured over predicted step times: percentiles that hold 80 % of the runs of a leak group left out.\n"
        f"INTERVALS: dict[str, tuple[float, float]] = {{\n{ranges}}}\n"
        "# Variances of log(measured / predicted), what two runs have in common and what each has of its own: by kind\n"
        "# of model, who measured the anchor, and how near it is (`timing/anchoring.py`).\n"
        f"ANCHORS: dict[str, tuple[float, float]] = {{\n{variances}}}\n"
    )
