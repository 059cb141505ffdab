"""Rules about a training run: its name, its lr schedule, how the batch divides into microbatches, its tokens."""

from __future__ import annotations

from math import isfinite, isnan

from moefold.blueprint.param_groups import unmatched
from moefold.blueprint.parameters import parameters
from moefold.checks.sizes import divides, divisors
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.topology.folded_layout import FoldedLayout


def name_is_one_word(run: RunConfig) -> Problem | None:
    """The name becomes a directory and must not point outside of `train.directory`."""
    if run.name and not run.name.startswith(".") and not set(run.name) & set("/\\\0"):
        return None
    return Problem("name", f"{run.name!r} is not the name of a directory", "use letters, digits, _ and -")


def lr_schedule_fits_into_the_run(run: RunConfig) -> Problem | None:
    schedule, steps = run.optim.lr_schedule, run.train.steps
    needed = schedule.warmup + (schedule.decay if schedule.kind == "wsd" else 0)
    if needed <= steps:
        return None
    parts = {"warmup": schedule.warmup} | ({"decay": schedule.decay} if schedule.kind == "wsd" else {})
    what = f"{' + '.join(parts)} = {' + '.join(map(str, parts.values()))}"
    return Problem(
        "optim.lr_schedule", f"{what} is longer than the run of {steps} steps", f"use at most {steps} in all"
    )


def lr_ends_at_or_below_the_peak(run: RunConfig) -> Problem | None:
    floor = run.optim.lr_schedule.floor
    return None if floor <= 1 else Problem("optim.lr_schedule.floor", f"is {floor:g} times the peak", "use 0 to 1")


def parameter_groups_have_parameters(run: RunConfig) -> list[Problem]:
    """A pattern that matches nothing is a typing error, which training would not show."""
    groups = run.optim.groups
    if not groups:
        return []
    names = [spec.name for spec in parameters(run.model)]
    found = []
    for number, before in unmatched(groups, names).items():
        path, pattern = f"optim.groups.{number}.match", groups[number].match
        if before is None:
            message, fix = f"{pattern!r} matches no parameter", f"use names such as {names[1]}, with * for any part"
        else:
            message = f"every parameter that {pattern!r} matches is in group {before} ({groups[before].match!r})"
            fix = "put the narrower pattern first: the first match counts"
        found.append(Problem(path, message, fix))
    return found


def parameter_groups_have_usable_numbers(run: RunConfig) -> list[Problem]:
    found = []
    for number, group in enumerate(run.optim.groups):
        for name, value in (("lr_scale", group.lr_scale), ("weight_decay", group.weight_decay)):
            if value is not None and not (isfinite(value) and value >= 0):
                path = f"optim.groups.{number}.{name}"
                found.append(Problem(path, f"is {value:g}", "use 0 or a positive number"))
    return found


def microbatches_fill_the_batch(run: RunConfig) -> Problem | None:
    data = run.data
    if data.packing == "bin_packed" or divides(data.micro_batch, data.global_batch):
        return None
    return Problem(
        "data.micro_batch",
        f"{data.global_batch} sequences of a step do not divide into microbatches of {data.micro_batch}",
        f"use {divisors(data.global_batch)}",
    )


def every_rank_gets_as_many_microbatches(run: RunConfig, layout: FoldedLayout) -> Problem | None:
    data, dp = run.data, layout.size("dp")
    one_round = data.micro_batch * dp
    if data.packing == "bin_packed":
        return None
    if divides(one_round, data.global_batch) or not divides(data.micro_batch, data.global_batch):
        return None
    return Problem(
        "data.global_batch",
        f"{data.global_batch} sequences do not divide over micro_batch * dp = {data.micro_batch} * {dp} = {one_round}",
        f"use a multiple of {one_round}, such as {-(-data.global_batch // one_round) * one_round}",
    )


def mixture_weights_are_positive(run: RunConfig) -> list[Problem]:
    found: list[Problem] = []
    for number, source in enumerate(run.data.mixture):
        if not isfinite(source.weight) or source.weight < 0:
            path = f"data.mixture.{number}.weight"
            found.append(Problem(path, f"is {source.weight:g}", "use 0 or a positive number"))
    if run.data.mixture and not any(source.weight > 0 or isnan(source.weight) for source in run.data.mixture):
        found.append(Problem("data.mixture", "no source has a positive weight", "give at least one"))
    return found


def training_has_tokens(run: RunConfig) -> Problem | None:
    if run.data.sources:
        return None
    return Problem(
        "data.train",
        "names no tokens to train on",
        "use --data.train FOLDER, made by `moefold tokenize FILES --out FOLDER`; `builtin` is a toy corpus of bytes",
    )


RULES = (
    name_is_one_word,
    lr_schedule_fits_into_the_run,
    lr_ends_at_or_below_the_peak,
    parameter_groups_have_parameters,
    parameter_groups_have_usable_numbers,
    microbatches_fill_the_batch,
    mixture_weights_are_positive,
)
# A run without tokens can still be planned, dry-run and proved.
RULES_TO_TRAIN = (training_has_tokens,)
RULES_WITH_LAYOUT = (every_rank_gets_as_many_microbatches,)
