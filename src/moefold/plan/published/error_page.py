"""The page of the docs that states the planner's error, made from an assessment and from nothing else.

Runs with a large prediction error are listed with what their records do not say or the planner does not model. Reasons
are by prefix of the id, so that one line covers a sweep; they are text and change no prediction.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from types import MappingProxyType
from typing import cast

from moefold.plan.published.anchor_error import AnchorScore
from moefold.plan.published.assess import FEWEST_RUNS, Assessment, SetScore, set_score
from moefold.plan.published.points import Point
from moefold.plan.published.records import Record
from moefold.plan.timing.anchoring import NEARNESS, Nearness
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

Records that print a layout and nothing else of how a run was made are read with the preset of their release, where its
source is public (`plan/published/release_presets.py`), and notes of a record may name a variant of its GPU, such as one
with fewer watts. One row prints the layout of the release before; it is read with its preset's.
"""


def error_page(result: Assessment) -> str:
    """Markdown."""
    return (
        "\n\n".join(
            part.strip()
            for part in (
                _INTRODUCTION,
                f"{len(result.points)} runs with a step time, {len(result.memory_errors)} with a memory figure.",
                worst_words(result),
                markdown_table(("set", "runs", "macro", "median", "bias"), _sets(result)),
                class_section(result),
                _ranks(result),
                _feasibility(result),
                anchor_section(result.anchored, result.anchored_sweeps),
                "## A GPU or a family of models that was never seen",
                "All runs of one GPU, or of one family of models, left out at once. Macro errors:",
                markdown_table(("left out", "MoE models", "dense models"), _never_seen(result)),
                "## The worst ten",
                markdown_table(
                    ("run", "error", "what the record does not say, or the planner does not know"), _worst(result)
                ),
                "## The constants",
                "Each is held to its prior, which microbenchmarks and data sheets suggest, by a spring of the given "
                "spread (of its logarithm), and moved by the runs that speak about it, inside of a range beyond which "
                "it would stand for something else. One at an end of its range absorbs what no formula has.",
                markdown_table(("constant", "value", "prior", "spread", "range", "meaning"), _constants(result)),
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


def worst_words(result: Assessment) -> str:
    """What the page begins with: the worst set, the worst class of at least `FEWEST_RUNS` runs, and the worst run."""
    sets = [each for each in result.sets if not each.name.startswith("memory")]
    worst_set = max(sets, key=lambda each: each.macro)
    run = max(result.errors, key=lambda id: abs(result.errors[id]))
    words = [f"the set {worst_set.name} at {_percent(worst_set.macro)}", f"the run {run} at {_signed(run, result)}"]
    if found := classes(result):
        worst = max(found, key=lambda each: each.score.macro)
        words.insert(1, f"runs of {worst.kind} {worst.score.name} at {_percent(worst.score.macro)}")
    return f"**The worst of what follows:** {', '.join(words)}."


@dataclass(frozen=True)
class ClassScore:
    """Runs that have something in common; ``held``: the share inside of the 80 % interval."""

    kind: str
    score: SetScore
    held: float


def classes(result: Assessment) -> list[ClassScore]:
    """By kind of class, the worst first."""
    found = []
    for kind, value_of in _CLASSES.items():
        members: dict[str, list[Point]] = defaultdict(list)
        for point in result.points:
            members[value_of(result.records[point.id], point)].append(point)
        found += [_class(result, kind, name, points) for name, points in members.items() if len(points) >= FEWEST_RUNS]
    order = list(_CLASSES)
    return sorted(found, key=lambda each: (order.index(each.kind), -each.score.macro))


def _class(result: Assessment, kind: str, name: str, points: Sequence[Point]) -> ClassScore:
    groups = {point.id: point.leak_group for point in points}
    score = set_score(name, result.errors, groups, groups)
    assert score is not None
    return ClassScore(kind, score, sum(result.inside[point.id] for point in points) / len(points))


def source_of(record: Record) -> str:
    """Who published it: the name of a project, without the file that it was read from."""
    name = str((record.get("source") or {}).get("name", "")).partition(" (")[0]
    words = [word for word in name.split() if "/" not in word]
    return " ".join(words[:3]) or name or "not stated"


# What runs may have in common.
_CLASSES: Mapping[str, Callable[[Record, Point], str]] = MappingProxyType(
    {
        "source": lambda record, _: source_of(record),
        "year": lambda record, _: str(record.get("date") or "not stated")[:4],
        "GPU": lambda _, point: point.gpu,
        "family": lambda _, point: point.family,
        "framework": lambda _, point: point.workload.framework.name,
        "format": lambda _, point: point.workload.format,
        "size": lambda _, point: _size_words(point.workload.cluster.num_gpus),
    }
)


def _size_words(gpus: int) -> str:
    return "up to 64 GPUs" if gpus <= 64 else "65 to 512 GPUs" if gpus <= 512 else "more than 512 GPUs"


def class_section(result: Assessment) -> str:
    found = classes(result)
    kept = [each for each in found if 0.74 <= each.held <= 0.86]
    rows = [
        (each.kind, each.score.name, str(each.score.points), _percent(each.score.macro), _percent(each.score.median))
        + (f"{100 * each.score.bias:+.1f} %", f"{100 * each.held:.0f} %")
        for each in found
    ]
    return (
        f"## By source, year, GPU, family, framework, format and size\n\nClasses of at least {FEWEST_RUNS} runs, the "
        "worst first. *Inside* is the share of runs within the 80 % interval that runs of other leak groups give: it "
        f"is between 74 and 86 % in {len(kept)} of {len(found)} classes.\n\n"
        + markdown_table(("class", "", "runs", "macro", "median", "bias", "inside"), rows)
    )


def _signed(id: str, result: Assessment) -> str:
    return f"{100 * result.errors[id]:+.0f} %"


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
    intervals = ", ".join(f"{low:.2f} to {high:.2f} ({kind})" for kind, (low, high) in result.intervals.items())
    return (
        "## Fitting, and the interval\n\n"
        f"Runs known to run out of memory that are said to fit: {len(result.false_fits)}. Runs that ran but are said "
        f"not to fit: {len(result.false_oom)} of {len(result.points)}. Measured over predicted, the 80 % interval is "
        f"{intervals}: that of its framework, kind of model and GPU architecture where enough was published, else of "
        "the first two, else of its kind. Runs of other leak groups give intervals that hold "
        f"{_percent(result.held)} of the runs."
    )


def anchor_section(near: Iterable[AnchorScore], sweeps: Sequence[AnchorScore]) -> str:
    better = sum(each.anchored_error < each.error for each in sweeps)
    head = ("anchor", "runs", "weight", "error", "with an anchor", "interval", "with an anchor", "holds")
    return (
        "## One measured run as an anchor\n\n"
        "`moefold plan --anchor` multiplies predictions by the anchor's own error to the power of a *weight*: the part "
        "of the variance of log(measured / predicted) that two runs have in common. It is measured on pairs of "
        "different layouts, by whose the anchor is (measured by the same people with the same release, or by others) "
        "and how near. Here every run is predicted with each anchor of that kind, by weights from which all runs of "
        "its model, GPU and framework were left out; errors are means over those. What has fewer than eight leak "
        "groups is not in the table and has weight 0.\n\n"
        + markdown_table(head, [_anchor_row(each, _near_words(each.name)) for each in near])
        + "\n\nOf the sweeps above, with every other layout of the sweep as the anchor. It makes predictions better in "
        f"{better} of {len(sweeps)}, and worse in the others, whose errors differ most from layout to layout: an "
        "anchor says most about layouts that are like it.\n\n"
        + markdown_table(("sweep", *head[1:]), [_anchor_row(each, each.name) for each in sweeps])
    )


def _anchor_row(each: AnchorScore, name: str) -> tuple[str, ...]:
    (low, high), (then_low, then_high) = each.interval, each.anchored_interval
    return (
        name,
        str(each.targets),
        f"{each.weight:.2f}",
        _percent(each.error),
        _percent(each.anchored_error),
        f"{low:.2f} to {high:.2f}",
        f"{then_low:.2f} to {then_high:.2f}",
        f"{100 * each.held:.0f} %, then {100 * each.anchored_held:.0f} %",
    )


def _near_words(name: str) -> str:
    """`moe own model`, in words."""
    kind, owner, near = name.split()
    whose = "own" if owner == "own" else "of others"
    return f"{'MoE' if kind == 'moe' else kind}; {whose}, {NEARNESS[cast(Nearness, near)]}"


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
    return [(id, _signed(id, result), reason_for(id)) for id in worst]


def _constants(result: Assessment) -> list[tuple[str, ...]]:
    return [
        (
            meaning.name,
            f"{exp(value):.3g}",
            f"{meaning.prior:.3g}",
            f"{meaning.spread:.2g}",
            f"{meaning.range[0]:g} to {meaning.range[1]:g}",
            meaning.text,
        )
        for meaning, value in zip(MEANINGS, result.fitted.theta)
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ---- runs with a large error ----


_REASONS = {
    "aws-": "EFA with a proxy per message: its cost per message is known from two models only",
    "automodel-dsv3": "what is recomputed is stated as `activation checkpointing`; the planner repeats whole layers",
    "automodel-nemosuper": "a hybrid model under FSDP2 on H100, the only run of its kind",
    "dgxc-v25.05.05-dsv3-GB200": "an early GB200 release, as slow as if dispatch left NVLink",
    "dgxc-v25.05.05-grok1": "expert tensor parallelism of 4 whose communication the planner takes for exposed",
    "dgxc-v25.05.05-nemotron340b": "a tuned dense run; whether its gathers overlap is not stated",
    "folding-t3-llama3_8x70b-FSDP": "microbatch size not stated; gathering parameters less often makes it faster",
    "folding-": "microbatch and virtual stages not stated; the planner assumes 1, and one layer per virtual stage",
    "mb-25.11-pretrain-qwen3_30b-H100": "24 virtual stages of one layer; host time per stage is not in the planner",
    "mb-26.02.01-pretrain-qwen3_30b-H100": "the same run one release earlier took 1.7 times as long; flags not stated",
    "mb-26.06.01-pretrain-gpt_oss": "same flags as a run that is twice as fast in the next release",
    "mbcard-gpt-oss": "neither the dispatcher nor graphs are stated",
    "mbskill-moonlight": "one microbatch of 4,096 tokens per step: fixed costs the planner spreads too thin",
    "primus-": "the only AMD run; nothing was fitted to it, and its attention is sparse in a way that is not modelled",
    "titan-nvfp4": "torchtitan of 2026 at four GPUs; other torchtitan runs of the collection are slower per FLOP",
    "titan-b200": "torchtitan of 2025 with one sequence per step",
    "titan-t2": "torchtitan's first ring attention slows down with each doubling of the ring, Megatron's does not",
    "titan-": "frameworks on FSDP2 differ among themselves by more than the one factor they have here",
    "vtrain": "a cluster with half the usual network; which traffic shares it is not stated",
    "zoo-qwen235-h100-fsdp": "Megatron-FSDP; the planner gathers experts for every microbatch at 0.7 of the network",
    "report-t11-deepseek_v3-GB200-bf16": "its layout differs between two tables of the same report",
}  # fmt: skip
REASONS: Mapping[str, str] = MappingProxyType(_REASONS)


def reason_for(id: str) -> str:
    """The longest prefix that fits."""
    fitting = [prefix for prefix in REASONS if id.startswith(prefix)]
    return REASONS[max(fitting, key=len)] if fitting else "not understood"
