"""The page of the docs that states the planner's error, made from an assessment and from nothing else."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import exp

from moefold.plan.published.assess import Assessment
from moefold.plan.published.known_misses import reason_for
from moefold.plan.published.points import Point
from moefold.plan.timing.constants import MEANINGS
from moefold.tables import markdown_table

_INTRODUCTION = """# The planner's error

Every figure on this page is of **predictions by constants that never saw the run**: each published run is left out
together with its leak group (the same model, layout and GPU in any release, or its whole sweep), the constants are
fitted again, and the run is predicted. This page is written by one command from a folder of published measurements:

    moefold plan --score FOLDER --page docs/planner-error.md

Errors are predicted / measured - 1 of the step time. *Macro* is the mean over leak groups of their mean absolute error,
*bias* the mean signed error (positive: predicted too slow). None of these runs was made by moefold or on a machine of
ours; the same configuration in several releases of one framework differs by 3.9 % (median), so no planner can be much
better than that.

What was **not** left out: the formulas, the priors, and what is assumed where a source does not print something
(`plan/published/`) were chosen by people who had seen all of these runs, and memory has no refitted constants.
Expect new runs to be predicted somewhat worse than this page says.
"""


def error_page(result: Assessment) -> str:
    """Markdown."""
    return (
        "\n\n".join(
            part.strip()
            for part in (
                _INTRODUCTION,
                f"{len(result.points)} runs with a step time, {len(result.memory_errors)} with a memory figure.",
                markdown_table(("set", "runs", "macro", "median", "bias"), _sets(result)),
                _ranks(result),
                _feasibility(result),
                "## A GPU or a family of models that was never seen",
                "All runs of one GPU, or of one family of models, left out at once. Macro errors:",
                markdown_table(("left out", "MoE models", "dense models"), _never_seen(result)),
                "## The worst ten",
                markdown_table(
                    ("run", "error", "what the record does not say, or the planner does not know"), _worst(result)
                ),
                "## The constants",
                "Each is held to its prior, which microbenchmarks and data sheets suggest, by a spring of the given "
                "spread (of its logarithm), and moved by the runs that speak about it.",
                markdown_table(("constant", "value", "prior", "spread", "meaning"), _constants(result)),
            )
        )
        + "\n"
    )


def summary(result: Assessment) -> list[tuple[str, ...]]:
    """The sets, for a terminal."""
    return _sets(result)


def _sets(result: Assessment) -> list[tuple[str, ...]]:
    return [
        (each.name, str(each.points), _percent(each.macro), _percent(each.median), f"{100 * each.bias:+.1f} %")
        for each in result.sets
    ]


def _ranks(result: Assessment) -> str:
    rows = [(each.name, str(each.layouts), f"{each.spearman:+.2f}", _percent(each.regret)) for each in result.ranks]
    mean = statistics.fmean(each.spearman for each in result.ranks)
    regret = statistics.fmean(each.regret for each in result.ranks)
    words = (
        "## Ranking layouts\n\nLayouts of the same model, cluster and batch. *Regret* is what picking the predicted "
        f"best loses against the measured best. Mean Spearman {mean:+.2f}, mean regret {_percent(regret)}."
    )
    return words + "\n\n" + markdown_table(("sweep", "layouts", "Spearman", "regret"), rows)


def _feasibility(result: Assessment) -> str:
    intervals = ", ".join(
        f"{low:.2f} to {high:.2f} times the prediction for {kind} models"
        for kind, (low, high) in result.intervals.items()
    )
    return (
        "## Fitting, and the interval\n\n"
        f"Runs known to run out of memory that are said to fit: {len(result.false_fits)}. Runs that ran but are said "
        f"not to fit: {len(result.false_oom)} of {len(result.points)}. The 80 % interval is {intervals}; it holds "
        f"{100 * result.covered:.0f} % of the runs."
    )


def _never_seen(result: Assessment) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("one GPU", *_macros(result.points, result.gpu_errors)),
        ("one family", *_macros(result.points, result.family_errors)),
    ]
    for gpu in sorted({point.gpu for point in result.points}):
        points = [point for point in result.points if point.gpu == gpu]
        rows.append((f"only {gpu}", *_macros(points, result.gpu_errors)))
    return rows


def _macros(points: Iterable[Point], errors: Mapping[str, float]) -> tuple[str, str]:
    groups: dict[bool, dict[str, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}
    for point in points:
        groups[point.workload.model.is_moe][point.leak_group].append(abs(errors[point.id]))
    mixtures, dense = (
        _percent(statistics.fmean(statistics.fmean(group) for group in groups[kind].values())) if groups[kind] else "-"
        for kind in (True, False)
    )
    return mixtures, dense


def _worst(result: Assessment) -> list[tuple[str, str, str]]:
    canonical = [point.id for point in result.points if result.records[point.id].get("canonical", True)]
    worst = sorted(canonical, key=lambda id: -abs(result.errors[id]))[:10]
    return [(id, f"{100 * result.errors[id]:+.0f} %", reason_for(id)) for id in worst]


def _constants(result: Assessment) -> list[tuple[str, ...]]:
    return [
        (meaning.name, f"{exp(value):.3g}", f"{meaning.prior:.3g}", f"{meaning.spread:.2g}", meaning.text)
        for meaning, value in zip(MEANINGS, result.fitted.theta)
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
