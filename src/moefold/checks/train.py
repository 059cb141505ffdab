"""Rules about a run's course: a name that is a name, and a rate that knows how long the run is."""

from __future__ import annotations

from moefold.config.run import RunConfig
from moefold.errors import Problem


def name_is_one_word(run: RunConfig) -> Problem | None:
    """The name becomes a directory; it must not lead anywhere else."""
    if run.name and not run.name.startswith(".") and not set(run.name) & set("/\\\0"):
        return None
    return Problem("name", f"{run.name!r} is not the name of a directory", "use letters, digits, _ and -")


def rates_fit_into_the_run(run: RunConfig) -> Problem | None:
    rates, steps = run.optim.lr_schedule, run.train.steps
    needed = rates.warmup + (rates.decay if rates.kind == "wsd" else 0)
    if needed <= steps:
        return None
    what = f"warmup + decay = {rates.warmup} + {rates.decay}" if rates.kind == "wsd" else f"warmup = {rates.warmup}"
    return Problem(
        "optim.lr_schedule", f"{what} is longer than the run of {steps} steps", f"use at most {steps} in all"
    )


def rates_end_at_or_below_the_peak(run: RunConfig) -> Problem | None:
    floor = run.optim.lr_schedule.floor
    return None if floor <= 1 else Problem("optim.lr_schedule.floor", f"is {floor:g} times the peak", "use 0 to 1")


RULES = (name_is_one_word, rates_fit_into_the_run, rates_end_at_or_below_the_peak)
