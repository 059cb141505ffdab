"""The planner's own error: every published run predicted by constants that never saw it.

One call does everything that the page of errors shows: the fit, the predictions with each leak group left out, the same
with each GPU and each family of models left out, memory against what was measured, and whether runs that fit are said
to fit. The figures that a planner is judged by:

macro     mean over leak groups of the mean absolute error: no sweep outweighs the rest
bias      mean signed error; positive is predicted too slow
spearman  whether layouts of the same model, cluster and batch are ranked right
regret    what picking the predicted best of them loses against the measured best
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.plan.memory.peak import predict_memory
from moefold.plan.published.anchor_error import AnchorScore, anchor_scores, anchor_shares, pairs_of, sweep_scores
from moefold.plan.published.fit import Fit, Progress, fit, left_out
from moefold.plan.published.points import Point, points_of, published_workload, read_records
from moefold.plan.published.predict_records import measured_bytes
from moefold.plan.published.records import Record
from moefold.plan.timing.anchoring import Shares
from moefold.plan.timing.constants import CURRENT
from moefold.plan.timing.step_time import interval_kinds

GIB = 2**30
# Of a framework's runs of one kind, so that they have an interval of their own.
FEWEST_RUNS, FEWEST_GROUPS = 20, 8
_MEASURED = (
    ("peak_allocated_gib", GIB),
    ("peak_gib", GIB),
    ("peak_reserved_gib", GIB),
    ("peak_allocated_gb", 1e9),
    ("peak_gb", 1e9),
    ("total_gb", 1e9),
)


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
    x, y = _mean_ranks(first), _mean_ranks(second)
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    bottom = (sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)) ** 0.5
    return top / bottom if bottom else 0.0


def _mean_ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    # A value's ranks run from the first place where it stands to the last.
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


# ---- an assessment ----


@dataclass(frozen=True)
class Assessment:
    """Errors are predicted / measured - 1, by record."""

    records: Mapping[str, Record]
    points: tuple[Point, ...]
    fitted: Fit
    # Step time, with the leak group, the GPU, or the family left out.
    errors: Mapping[str, float]
    gpu_errors: Mapping[str, float]
    family_errors: Mapping[str, float]
    memory_errors: Mapping[str, float]
    sets: tuple[SetScore, ...]
    ranks: tuple[RankScore, ...]
    # Measured over predicted step times, between which 80 % of runs of other leak groups lie: by kind of model, and
    # where enough runs of a framework were published by framework and kind (`interval_kinds`).
    intervals: Mapping[str, tuple[float, float]]
    # Whether a run is inside of the interval that runs of other leak groups give.
    inside: Mapping[str, bool]
    # What runs near each other have of their errors in common, and what a measured run is worth, by nearness and sweep.
    shares: Mapping[str, Shares]
    anchored: tuple[AnchorScore, ...]
    anchored_sweeps: tuple[AnchorScore, ...]
    fits: Mapping[str, bool]
    false_fits: tuple[str, ...]
    false_oom: tuple[str, ...]

    @property
    def held(self) -> float:
        """The share of runs inside of their interval."""
        return sum(self.inside.values()) / len(self.inside)


def assess(folder: Path, progress: Progress) -> Assessment:
    """Everything, for a folder in the layout of published collections."""
    records = read_records(folder)
    facts = _lines(folder / "feasibility.jsonl")
    points = points_of(records)
    fitted = fit(points, progress, start=np.log(CURRENT.values))
    errors = _errors(points, fitted, lambda point: point.leak_group, progress)
    by_id = {record["id"]: record for record in records}
    memory = _memory_errors(records)
    groups = {record["id"]: record["leak_group"] for record in records}
    sets = [
        set_score(name, memory if name.startswith("memory") else errors, groups, chosen["ids"])
        for name, chosen in _read(folder / "score_sets.json").items()
    ]
    intervals, inside = _intervals(points, errors)
    pairs = pairs_of(points, by_id, errors)
    sweeps = {chosen["series"]: chosen["ids"] for chosen in _read(folder / "rank_sets.json")}
    fits = {point.id: predict_memory(point.workload).fits for point in points}
    # A fact without the number of GPUs or the length of sequences says nothing that could be held against it.
    facts = [fact for fact in facts if fact.get("num_gpus") and fact.get("seq_len")]
    fits |= {fact["id"]: predict_memory(published_workload(fact)).fits for fact in facts}
    return Assessment(
        records=by_id,
        points=tuple(points),
        fitted=fitted,
        errors=errors,
        gpu_errors=_errors(points, fitted, lambda point: point.gpu, progress),
        family_errors=_errors(points, fitted, lambda point: point.family, progress),
        memory_errors=memory,
        sets=tuple(each for each in sets if each is not None),
        ranks=_ranks(folder, by_id, errors),
        intervals=intervals,
        inside=inside,
        shares=anchor_shares(pairs),
        anchored=anchor_scores(pairs, intervals),
        anchored_sweeps=sweep_scores(pairs, points, sweeps, intervals),
        fits=fits,
        false_fits=tuple(fact["id"] for fact in facts if not fact["fits"] and fits[fact["id"]]),
        false_oom=tuple(point.id for point in points if not fits[point.id]),
    )


def prediction_lines(result: Assessment) -> list[dict[str, Any]]:
    """What the scorer of a published collection reads: each run as predicted without its leak group."""
    lines = []
    seconds = {point.id: point for point in result.points}
    for id, record in result.records.items():
        line: dict[str, Any] = {"id": id}
        if id in seconds:
            point = seconds[id]
            step = point.seconds * (1 + result.errors[id])
            low, high = interval_in(result.intervals, point)
            line |= {"step_time_s": step, "interval": [step * low, step * high], "fits": result.fits[id]}
        if id in result.memory_errors:
            line["memory_gib"] = (1 + result.memory_errors[id]) * measured_memory(record) / GIB
        if len(line) > 1:
            lines.append(line)
    return lines + [{"id": id, "fits": fits} for id, fits in result.fits.items() if id not in result.records]


def measured_memory(record: Record) -> float:
    """In bytes; 0 where nothing was measured."""
    memory = record.get("memory") or {}
    return next((memory[key] * unit for key, unit in _MEASURED if isinstance(memory.get(key), int | float)), 0.0)


def _errors(points: list[Point], fitted: Fit, group_of: Callable[[Point], str], progress: Progress) -> dict[str, float]:
    predicted = left_out(points, fitted, group_of, progress)
    return {point.id: math.exp(value) / point.seconds - 1 for point, value in zip(points, predicted)}


def _memory_errors(records: list[Record]) -> dict[str, float]:
    known = [record for record in records if (record.get("use") or {}).get("memory") and measured_memory(record)]
    return {
        record["id"]: measured_bytes(record, published_workload(record)) / measured_memory(record) - 1
        for record in known
    }


def _ranks(folder: Path, records: Mapping[str, Record], errors: Mapping[str, float]) -> tuple[RankScore, ...]:
    found = []
    for chosen in _read(folder / "rank_sets.json"):
        ids = [id for id in chosen["ids"] if id in errors]
        if len(ids) >= 3:
            rates = [records[id]["target"]["tokens_per_s_per_gpu"] for id in ids]
            predicted = [rate / (1 + errors[id]) for rate, id in zip(rates, ids)]
            found.append(rank_score(chosen["series"], rates, predicted))
    return tuple(found)


def interval_in(intervals: Mapping[str, tuple[float, float]], point: Point) -> tuple[float, float]:
    return next(intervals[name] for name in interval_kinds(point.workload) if name in intervals)


def _intervals(
    points: list[Point], errors: Mapping[str, float]
) -> tuple[dict[str, tuple[float, float]], dict[str, bool]]:
    members: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        for name in interval_kinds(point.workload):
            members[name].append(point)
    kinds, own = ({interval_kinds(point.workload)[which] for point in points} for which in (2, 1))
    found, inside = dict[str, tuple[float, float]](), dict[str, bool]()
    # The widest first: what is inside of a nearer interval replaces what is inside of a wider one's.
    for name in sorted(members, key=lambda name: (name not in kinds, name not in own, name)):
        those = members[name]
        groups = {point.leak_group for point in those}
        if name in kinds or (len(those) >= FEWEST_RUNS and len(groups) >= FEWEST_GROUPS):
            found[name], held = calibrated([(point.leak_group, 1 / (1 + errors[point.id])) for point in those])
            inside |= {point.id: kept for point, kept in zip(those, held, strict=True)}
    return found, inside


def calibrated(ratios: Sequence[tuple[str, float]]) -> tuple[tuple[float, float], list[bool]]:
    """An interval that holds 80 % of runs which it has not seen, and whether it holds each.

    The tenth and ninetieth percentile of other leak groups hold fewer of a group's runs than 80 %. So percentiles are
    moved outwards until they do, and the interval has those of all runs.
    """
    for percent in range(10, 0, -1):
        held = []
        for group, ratio in ratios:
            low, high = _percentiles([other for name, other in ratios if name != group] or [ratio], percent)
            held.append(low <= ratio <= high)
        if sum(held) >= 0.8 * len(held):
            break
    return _percentiles([ratio for _, ratio in ratios], percent), held


def _percentiles(ratios: Sequence[float], percent: int) -> tuple[float, float]:
    low, high = np.percentile(ratios, (percent, 100 - percent))
    return float(low), float(high)


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _lines(path: Path) -> list[Record]:
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.strip()]
