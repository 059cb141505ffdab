"""How far predictions are from measurements, in the figures that a planner is judged by.

macro     mean over leak groups of the mean absolute error: no sweep outweighs the rest
bias      mean signed error; positive is predicted too slow
spearman  whether layouts of the same model, cluster and batch are ranked right
regret    what picking the predicted best of them loses against the measured best
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SetScore:
    name: str
    points: int
    macro: float
    median: float
    bias: float


def set_score(name: str, errors: Mapping[str, float], groups: Mapping[str, str], ids: Iterable[str]) -> SetScore | None:
    """Errors are predicted / measured - 1, by id."""
    known = [each for each in ids if each in errors]
    if not known:
        return None
    by_group: dict[str, list[float]] = defaultdict(list)
    for each in known:
        by_group[groups[each]].append(abs(errors[each]))
    return SetScore(
        name,
        len(known),
        statistics.fmean(statistics.fmean(group) for group in by_group.values()),
        statistics.median(abs(errors[each]) for each in known),
        statistics.fmean(errors[each] for each in known),
    )


@dataclass(frozen=True)
class RankScore:
    name: str
    layouts: int
    spearman: float
    regret: float


def rank_score(name: str, measured: Sequence[float], predicted: Sequence[float]) -> RankScore:
    """Rates (more is better) of layouts of one workload, measured and predicted."""
    # Predictions that differ in the sixth digit are the same prediction.
    guesses = [float(f"{value:.5g}") for value in predicted]
    pick = max(range(len(guesses)), key=guesses.__getitem__)
    return RankScore(name, len(guesses), spearman(measured, guesses), 1 - measured[pick] / max(measured))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of their ranks."""
    x, y = _ranks(first), _ranks(second)
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    bottom = (sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)) ** 0.5
    return top / bottom if bottom else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    # A value's ranks run from the first place where it stands to the last.
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]
