"""Two plans of one question side by side: memory line by line, time by cause, and in words why one is faster.

Each plan is a text of pinned choices, as for `--fix`. What it leaves open is searched, or, where nothing is searched,
is the run's own. Dispatch and combine of experts are shown whole, exposed and hidden: a plan is often faster because
its exchange hides, not because it sends less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moefold.config.loading import override
from moefold.errors import ConfigError, Problem, ProblemsError
from moefold.plan.launch_command import changes_to_run
from moefold.plan.prediction import Prediction
from moefold.plan.report.proposal_report import anchor_data, prediction_data
from moefold.plan.search.batch_ramp import ramp_words
from moefold.plan.search.candidates import choice_of_workload, described, why_illegal, workload_of_choice
from moefold.plan.search.explain import changed_choices, seconds, sweep_spread, time_differences
from moefold.plan.search.proposal import Proposal, Question, propose, with_framework
from moefold.plan.search.search import NothingFitsError, Progress
from moefold.plan.search.space import LayoutChoice, limits_of, narrowed, pinned, usual_space
from moefold.plan.workload import workload_of_run
from moefold.units import format_bytes, format_count

# Causes that make up less of a difference are not named.
_WORTH_A_WORD = 0.1
_MOST_CAUSES = 3


@dataclass(frozen=True)
class Comparison:
    """Two named plans of one question."""

    names: tuple[str, str]
    proposals: tuple[Proposal, Proposal]

    @property
    def plans(self) -> tuple[Prediction, Prediction]:
        first, second = self.proposals
        return first.chosen, second.chosen

    @property
    def fits(self) -> bool:
        return all(each.memory.fits for each in self.plans)


def compare(question: Question, plans: Sequence[str], progress: Progress | None = None) -> Comparison:
    """Both plans, or every problem of both."""
    found, problems = list[Proposal](), list[Problem]()
    for text in plans:
        try:
            found.append(propose(_question_of(question, text), progress))
        except ProblemsError as error:
            problems += [replace(each, path=f"plan {text!r}: {each.path}") for each in error.problems]
        except NothingFitsError as error:
            problems.append(Problem(f"plan {text!r}", str(error)))
    if problems:
        raise ConfigError(*problems)
    first, second = found
    return Comparison((_name(plans[0], "A"), _name(plans[1], "B")), (first, second))


def _name(text: str, letter: str) -> str:
    return f"{letter}: {text}" if text.strip() else f"{letter}: nothing pinned"


def _question_of(question: Question, text: str) -> Question:
    """The question with these choices pinned: to the search, or else in the run itself."""
    fixed = ",".join(filter(None, (_others(question.fixed, text), text)))
    if question.searching:
        return replace(question, fixed=fixed)
    whole = workload_of_run(question.run, question.cluster, question.imbalance)
    own = with_framework(whole, question.framework, question.release)
    space, choice = narrowed(usual_space(own, question.recipes), fixed), choice_of_workload(own)
    names = [name for name, _ in pinned(fixed)]
    if several := [name for name in names if len(getattr(space, name)) > 1]:
        message = "has several values, and without a search each choice has one"
        raise ConfigError(*(Problem(f"fix {name}", message, "leave --no-search out") for name in several))
    asked = choice._replace(**{name: getattr(space, name)[0] for name in names})
    limits = limits_of(own)
    # What nobody pinned is the run's own, whether a search would try it or not.
    around = replace(space, **{name: (getattr(asked, name),) for name in LayoutChoice._fields})
    if (reason := why_illegal(asked, limits, around)) is not None:
        raise ConfigError(Problem("fix", reason, "pin further choices, or leave --no-search out"))
    made = workload_of_choice(asked, own, limits, around) if asked != choice else own
    pinned_run = override(question.run, changes_to_run(made, question.run))
    # Commands say what differs from what the name stands for.
    return replace(question, run=pinned_run, named=question.named or question.run, fixed="")


def _others(fixed: str, text: str) -> str:
    """Pins of the question that the plan does not pin itself."""
    own = {name for name, _ in pinned(text)}
    return ",".join(f"{name}={','.join(words)}" for name, words in pinned(fixed) if name not in own)


# ---- in words ----


def verdict(comparison: Comparison) -> str:
    """Which is faster, why, and whether the planner can tell."""
    first, second = comparison.plans
    own, other = first.time.step_seconds, second.time.step_seconds
    swapped = other < own
    fast, slow = (second, first) if swapped else (first, second)
    names = comparison.names[::-1] if swapped else comparison.names
    share = slow.time.step_seconds / fast.time.step_seconds - 1
    if share < 0.0005:
        return f"Both take the same time ({seconds(own)} per step)." + _not_fitting(comparison)
    a, b = (name.partition(":")[0] for name in names)
    error = sweep_spread(first.workload)
    told = (
        f"That is within the planner's error: layouts of one sweep are mispredicted against each other by {error:.0%}, "
        "so it may be the other way."
        if share <= error
        else f"That is more than the {error:.0%} by which layouts of one sweep are mispredicted against each other."
    )
    return (
        f"{a} is {share:.1%} faster than {b} ({seconds(fast.time.step_seconds)} against "
        f"{seconds(slow.time.step_seconds)}). {_why(fast, slow, a, b)} {told}{_not_fitting(comparison)}"
    )


def _why(fast: Prediction, slow: Prediction, a: str, b: str) -> str:
    """The causes of the difference, and of exchanges whether less is sent or more is hidden."""
    whole = slow.time.step_seconds - fast.time.step_seconds
    saved, lost = list[str](), list[str]()
    for each in time_differences(fast, slow):
        if abs(each.more) < _WORTH_A_WORD * whole:
            continue
        both = f"{seconds(each.first)} against {seconds(each.second)} exposed"
        words = f"{each.name} ({both}{_whole(each.name, fast, slow)})"
        (saved if each.more > 0 else lost).append(words)
    found = f"{a} waits or computes less in {_listed(saved)}" if saved else f"No single cause makes {a} faster"
    more = f"; it loses a part of that in {_listed(lost)}" if lost else ""
    choices = changed_choices(choice_of_workload(fast.workload), choice_of_workload(slow.workload))
    return f"{found}{more}. {b} has {choices}."


def _whole(name: str, *plans: Prediction) -> str:
    """What there is of it in all, where a part is hidden."""
    lines = [next((line for line in plan.time.lines if line.name == name), None) for plan in plans]
    if not any(line is not None and line.hidden > 0 for line in lines):
        return ""
    return f", of {' and '.join(seconds(0.0 if line is None else line.seconds) for line in lines)} in all"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:_MOST_CAUSES])


def _not_fitting(comparison: Comparison) -> str:
    out = [
        f" {name.partition(':')[0]} does not fit: {format_bytes(plan.memory.total)} of "
        f"{format_bytes(plan.memory.capacity)}."
        for name, plan in zip(comparison.names, comparison.plans)
        if not plan.memory.fits
    ]
    return "".join(out)


# ---- shown ----


def comparison_report(comparison: Comparison) -> RenderableType:
    return Group(*_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    question = comparison.proposals[0].question
    cluster = question.cluster
    title = f"{question.name} on {cluster.num_gpus:,} {cluster.gpu.name}, {question.framework}"
    yield Text(title, style="bold")
    for name, plan in zip(comparison.names, comparison.plans):
        yield Text(f"{name}\n   {described(choice_of_workload(plan.workload))}")
    head = _table("", "A", "B", "B - A")
    for label, of, shown in _FIGURES:
        head.add_row(label, *_cells([of(plan) for plan in comparison.plans], shown))
    days = [made.days for made in comparison.proposals]
    head.add_row(f"days for {format_count(question.tokens)} tokens", *_cells(days, lambda each: f"{each:,.1f}"))
    head.add_row("wall", *(plan.wall for plan in comparison.plans), "")
    yield head
    times = _table("", "A exposed", "A hidden", "B exposed", "B hidden", "B - A exposed")
    for name, cells in _time_rows(comparison.plans):
        exposed = [whole - hidden for whole, hidden in cells]
        parts = [shown for (_, hidden), out in zip(cells, exposed) for shown in (seconds(out), _if_any(hidden))]
        times.add_row(name, *parts, _signed(exposed[1] - exposed[0], seconds))
    yield times
    memory = _table("", "A", "B", "B - A")
    for name, held in _memory_rows(comparison.plans):
        memory.add_row(name, *_cells(held, format_bytes))
    yield memory
    found = comparison.proposals[0].anchored
    ramps = [ramp_words(made.phases) for made in comparison.proposals]
    both = [f"{letter}: {words}" if words else "" for letter, words in zip("AB", ramps)]
    for words in (verdict(comparison), *both, found.words if found else ""):
        if words:
            yield Padding(Text(words), (0, 0, 0, 1))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    return table


_FIGURES: tuple[tuple[str, Callable[[Prediction], float], Callable[[float], str]], ...] = (
    ("step", lambda plan: plan.time.step_seconds, seconds),
    ("80 % interval, from", lambda plan: plan.time.low, seconds),
    ("to", lambda plan: plan.time.high, seconds),
    ("tokens/s/GPU", lambda plan: plan.tokens_per_second_per_gpu, lambda rate: f"{rate:,.0f}"),
    ("memory", lambda plan: plan.memory.total, format_bytes),
    ("of GPU", lambda plan: plan.memory.total / plan.memory.capacity, lambda share: f"{share:.0%}"),
)


def _time_rows(plans: Iterable[Prediction]) -> list[tuple[str, list[tuple[float, float]]]]:
    """(all seconds, hidden ones) of both plans by cause, in the order of a step's lines."""
    each = [{line.name: (line.seconds, line.hidden) for line in plan.time.lines} for plan in plans]
    names = dict.fromkeys(name for lines in each for name in lines)
    return [(name, [lines.get(name, (0.0, 0.0)) for lines in each]) for name in names]


def _memory_rows(plans: Iterable[Prediction]) -> list[tuple[str, list[float]]]:
    """Bytes of both plans line by line, the largest first."""
    each: list[dict[str, float]] = []
    for plan in plans:
        held: dict[str, float] = {}
        for line in plan.memory.lines:
            held[f"{line.group}: {line.name}"] = held.get(f"{line.group}: {line.name}", 0.0) + line.bytes
        each.append(held)
    names = dict.fromkeys(name for held in each for name in held)
    rows = [(name, [held.get(name, 0.0) for held in each]) for name in names]
    return sorted(rows, key=lambda row: -max(row[1]))


def _cells(values: Sequence[float], shown: Callable[[float], str]) -> list[str]:
    return [*map(shown, values), _signed(values[1] - values[0], shown)]


def _signed(value: float, shown: Callable[[float], str]) -> str:
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{shown(abs(value))}"


def _if_any(hidden: float) -> str:
    return seconds(hidden) if hidden > 1e-4 else ""


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    first, second = comparison.plans
    found = comparison.proposals[0].anchored
    rows = _time_rows(comparison.plans)
    return {
        "plans": [
            {"name": name, "command": " ".join(made.command), "days": made.days} | prediction_data(made.chosen)
            for name, made in zip(comparison.names, comparison.proposals)
        ],
        "time": [
            {"name": name, "exposed": [whole - hidden for whole, hidden in cells], "hidden": [h for _, h in cells]}
            for name, cells in rows
        ],
        "memory": [{"name": name, "bytes": held} for name, held in _memory_rows(comparison.plans)],
        "second_slower_by": second.time.step_seconds / first.time.step_seconds - 1,
        "planner_error": sweep_spread(first.workload),
        "verdict": verdict(comparison),
        "anchor": anchor_data(found) if found else None,
    }
