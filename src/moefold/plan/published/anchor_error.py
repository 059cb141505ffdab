"""How much of the planner's error two runs have in common, and what a measured run is worth: from published runs.

Errors are those of predictions by constants that never saw a run's leak group (`fit.left_out`). All pairs of different
layouts are looked at, a target and an anchor, by how near they are (`timing/anchoring.py`). "Own" pairs are of one
source and release: the same people on the same machine, as an anchor of one's own is. The mean product of the two
errors is the variance in common, the mean square that of both parts. A leak group of n targets counts as sqrt(n), as
in the fit; a target's anchors share its weight.

The constants that predict a target have seen the anchor's group where it is another. So errors of such pairs have less
in common than those of two runs that nobody published, and weights are on the careful side.

**What it is worth** is measured with weights that never saw the targets: all runs of a model on a GPU with a framework
are left out of the variances, then each of them is predicted with each of its anchors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from moefold.plan.published.points import Point
from moefold.plan.published.records import Record
from moefold.plan.search.candidates import choice_of_workload
from moefold.plan.timing.anchoring import Nearness, Owner, Shares, same_model

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

KINDS = ("moe", "dense")
# Variances of fewer leak groups say nothing.
_FEWEST_GROUPS = 8


@dataclass(frozen=True)
class AnchorScore:
    """Errors of targets without an anchor and with one, by weights that never saw them; means over what is left out
    together. Intervals are measured over predicted; `held` is the share of targets in them."""

    name: str
    targets: int
    groups: int
    weight: float
    error: float
    anchored_error: float
    interval: tuple[float, float]
    anchored_interval: tuple[float, float]
    held: float
    anchored_held: float


@dataclass(frozen=True)
class AnchorPairs:
    """Targets are rows, anchors columns. `errors` are log(measured / predicted)."""

    errors: Vector
    weights: Vector
    # Runs of one model on one GPU with one framework have the same number.
    cells: NDArray[np.int64]
    groups: tuple[str, ...]
    moe: Mask
    masks: Mapping[tuple[Owner, Nearness], Mask]

    def mask(self, kind: str, owner: Owner, near: Nearness) -> Mask:
        of_kind: Mask = self.moe == (kind == "moe")
        mask: Mask = self.masks[owner, near] & of_kind[:, None] & of_kind[None, :]
        return mask

    def shares(self, mask: Mask) -> Shares | None:
        """None where too few groups have such pairs."""
        targets = np.flatnonzero(mask.any(axis=1))
        if len({self.groups[index] for index in targets}) < _FEWEST_GROUPS:
            return None
        each = np.where(mask, self.weights[None, :], 0.0)
        each *= (self.weights / np.maximum(each.sum(axis=1), 1e-12))[:, None]
        # A pair is a target and an anchor both ways.
        both = each.sum(axis=1) + each.sum(axis=0)
        total = float(both @ self.errors**2 / both.sum())
        common = float(self.errors @ each @ self.errors / each.sum())
        return Shares(max(0.0, common), total - max(0.0, common))


def pairs_of(points: Sequence[Point], records: Mapping[str, Record], errors: Mapping[str, float]) -> AnchorPairs:
    """``errors`` are predicted / measured - 1, by id."""
    number = Counter(point.leak_group for point in points)
    sources = np.array([_source(records[point.id]) for point in points])
    layouts = [choice_of_workload(point.workload) for point in points]
    gpus = np.array([point.workload.cluster.gpu.name for point in points])
    frameworks = np.array([point.workload.framework.name for point in points])
    cells = _cells(points)
    known: dict[object, int] = {}
    layout = np.array([known.setdefault(each, len(known)) for each in layouts])

    def same(values: NDArray[np.generic]) -> Mask:
        found: Mask = values[:, None] == values[None, :]
        return found

    gpu, framework, cell = same(gpus), same(frameworks), same(cells)
    other = ~same(layout)
    near: dict[Nearness, Mask] = {
        "model": cell,
        "framework": gpu & framework & ~cell,
        "gpu": gpu & ~framework,
        "none": ~gpu,
    }
    owners: dict[Owner, Mask] = {"own": same(sources), "published": ~same(sources)}
    return AnchorPairs(
        errors=-np.log1p(np.array([errors[point.id] for point in points])),
        weights=np.array([1 / sqrt(number[point.leak_group]) for point in points]),
        cells=cells,
        groups=tuple(point.leak_group for point in points),
        moe=np.array([point.workload.model.is_moe for point in points]),
        masks={(owner, each): mask & owned & other for owner, owned in owners.items() for each, mask in near.items()},
    )


def anchor_shares(pairs: AnchorPairs) -> dict[str, Shares]:
    """By kind of model, owner and nearness, where enough was published."""
    found = {f"{kind} {owner} {near}": pairs.shares(pairs.mask(kind, owner, near)) for kind, owner, near in _each()}
    return {name: shares for name, shares in found.items() if shares is not None}


def anchor_scores(pairs: AnchorPairs, intervals: Mapping[str, tuple[float, float]]) -> tuple[AnchorScore, ...]:
    """One per kind, owner and nearness of which enough was published to leave targets out."""
    found = [
        anchor_score(f"{kind} {owner} {near}", pairs, pairs.mask(kind, owner, near), intervals[kind])
        for kind, owner, near in _each()
        if pairs.shares(pairs.mask(kind, owner, near)) is not None
    ]
    return tuple(each for each in found if each is not None)


def sweep_scores(
    pairs: AnchorPairs,
    points: Sequence[Point],
    sweeps: Mapping[str, Sequence[str]],
    intervals: Mapping[str, tuple[float, float]],
) -> tuple[AnchorScore, ...]:
    """Of each sweep: every layout predicted with every other layout of the sweep as the anchor."""
    found = []
    for name, ids in sweeps.items():
        inside = np.array([point.id in ids for point in points])
        if not inside.any():
            continue
        kind = "moe" if pairs.moe[inside][0] else "dense"
        near = pairs.mask(kind, "own", "model")
        found.append(anchor_score(name, pairs, near, intervals[kind], inside))
    return tuple(each for each in found if each is not None)


def anchor_score(
    name: str, pairs: AnchorPairs, mask: Mask, interval: tuple[float, float], inside: Mask | None = None
) -> AnchorScore | None:
    """``inside``: only these are targets and anchors, but variances are of all others."""
    rows = mask if inside is None else mask & inside[:, None] & inside[None, :]
    low, high = np.log(interval)
    sums, groups = [], 0
    for cell in np.unique(pairs.cells[rows.any(axis=1)]):
        here = pairs.cells == cell
        shares = pairs.shares(mask & ~here[:, None] & ~here[None, :])
        if shares is None:
            continue
        groups += 1
        chosen = rows & here[:, None]
        targets, anchors = np.nonzero(chosen)
        before = pairs.errors[targets]
        after = before - shares.weight * pairs.errors[anchors]
        # Each target counts as its weight, its anchors together.
        weight = (pairs.weights / np.maximum(chosen.sum(axis=1), 1))[targets]
        narrow = low * shares.shrink, high * shares.shrink
        sums.append(
            (
                *(np.average(np.abs(np.exp(-each) - 1), weights=weight) for each in (before, after)),
                np.average((low <= before) & (before <= high), weights=weight),
                np.average((narrow[0] <= after) & (after <= narrow[1]), weights=weight),
                shares.weight,
                shares.shrink,
            )
        )
    if not sums:
        return None
    error, anchored, held, anchored_held, mean_weight, shrink = (float(each) for each in np.mean(sums, axis=0))
    return AnchorScore(
        name,
        int(rows.any(axis=1).sum()),
        groups,
        mean_weight,
        error,
        anchored,
        interval,
        (float(np.exp(low * shrink)), float(np.exp(high * shrink))),
        held,
        anchored_held,
    )


def _each() -> Iterator[tuple[str, Owner, Nearness]]:
    for kind in KINDS:
        for owner in get_args(Owner):
            for near in get_args(Nearness):
                yield kind, owner, near


def _cells(points: Sequence[Point]) -> NDArray[np.int64]:
    """A number for each model on a GPU with a framework."""
    first: list[Point] = []
    found = []
    for point in points:
        workload = point.workload
        for index, other in enumerate(first):
            known = other.workload
            alike = (known.cluster.gpu.name, known.framework.name) == (
                workload.cluster.gpu.name,
                workload.framework.name,
            )
            if alike and same_model(known.model, workload.model):
                found.append(index)
                break
        else:
            found.append(len(first))
            first.append(point)
    return np.array(found)


def _source(record: Record) -> str:
    """Who measured with which release."""
    source = record.get("source")
    named = source if isinstance(source, Mapping) else {"name": source}
    return f"{named.get('name')} {named.get('version')} {record.get('date')}"
