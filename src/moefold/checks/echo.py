"""Rules about ECHO, clones of hot experts: where there is something to clone, and what can carry clones."""

from __future__ import annotations

from typing import get_args

from moefold.config.parallel import EngineDispatcher, PlannedDispatcherName
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.schedule.names import SCHEDULES

_PATH = "parallel.echo"
# Of other libraries, which number experts themselves.
_OTHERS = (*get_args(EngineDispatcher), *get_args(PlannedDispatcherName))


def clones_have_other_ranks(run: RunConfig) -> Problem | None:
    if run.parallel.echo is None or (run.model.moe is not None and run.parallel.ep > 1):
        return None
    why = "the model has no experts" if run.model.moe is None else f"parallel.ep is {run.parallel.ep}"
    return Problem(_PATH, f"experts are cloned on other ranks of their ep group, but {why}", "use null")


def clones_have_our_dispatcher(run: RunConfig) -> Problem | None:
    if run.parallel.echo is None or run.parallel.dispatcher not in _OTHERS:
        return None
    return Problem(
        _PATH,
        f"{run.parallel.dispatcher} sends rows to the ranks of their experts",
        "use null, or parallel.dispatcher all_to_all",
    )


def clones_have_counted_rows(run: RunConfig) -> Problem | None:
    """With a padded capacity every expert has the same rows, padding included."""
    moe = run.model.moe
    if run.parallel.echo is None or moe is None or moe.capacity is None or not moe.capacity.pad:
        return None
    return Problem(
        _PATH,
        "model.moe.capacity.pad gives every expert the same number of rows, so that none is hot",
        "use null, or set model.moe.capacity.pad to false",
    )


def clones_are_wide(run: RunConfig) -> Problem | None:
    """Narrow copies of weights belong to parameters, and a clone is none."""
    recipe = run.precision.recipe
    if run.parallel.echo is None or recipe is None:
        return None
    return Problem(_PATH, f"weights of clones are sent wide, but precision.recipe is {recipe}", "use null")


def clones_are_on_the_compute_stream(run: RunConfig) -> Problem | None:
    """Weights are exchanged between the phases of an MoE layer, on the group that the other stream uses."""
    schedule = SCHEDULES.get(run.parallel.schedule)
    if run.parallel.echo is None or schedule is None or not schedule.overlaps:
        return None
    others = ", ".join(name for name, other in SCHEDULES.items() if not other.overlaps)
    return Problem(_PATH, f"{schedule.name} exchanges rows on a stream of their own", f"use null, or one of {others}")


RULES = (
    clones_have_other_ranks,
    clones_have_our_dispatcher,
    clones_have_counted_rows,
    clones_are_wide,
    clones_are_on_the_compute_stream,
)
