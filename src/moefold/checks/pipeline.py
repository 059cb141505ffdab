"""Rules about pipelines: every layer has a stage, and the schedule takes these sizes."""

from __future__ import annotations

from moefold.blueprint.stages import stage_size_problems, stages_of
from moefold.checks.sizes import divides
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem, did_you_mean
from moefold.schedule.names import SCHEDULES
from moefold.topology.folded_layout import FoldedLayout


def stages_hold_every_layer(run: RunConfig) -> list[Problem]:
    """parallel.stages parses, has pp * vpp stages, and places every layer and MTP module; None is balanced by cost."""
    if not _sizes_are_positive(run):
        return []
    if run.parallel.stages is None:
        return stage_size_problems(run.model, run.parallel)
    try:
        stages_of(run.model, run.parallel)
    except ConfigError as error:
        return list(error.problems)
    return []


def schedule_is_known(run: RunConfig) -> Problem | None:
    name = run.parallel.schedule
    if name in SCHEDULES:
        return None
    return Problem(
        "parallel.schedule",
        f"no schedule is called {name[:60]!r}",
        f"{did_you_mean(name, SCHEDULES)}known: {', '.join(SCHEDULES)}",
    )


def virtual_stages_fit_the_schedule(run: RunConfig) -> list[Problem]:
    """Some schedules take one stage per rank, some exactly two. How many microbatches they need is another rule."""
    parallel = run.parallel
    if parallel.schedule not in SCHEDULES or not _sizes_are_positive(run):
        return []
    found = SCHEDULES[parallel.schedule].problems(parallel.pp, parallel.vpp, microbatches=1)
    return [problem for problem in found if problem.path == "parallel.vpp"]


def microbatches_fit_the_schedule(run: RunConfig, layout: FoldedLayout) -> list[Problem]:
    """bin_packed makes as many microbatches as its documents need and adds empty ones up to what the schedule needs."""
    parallel, data = run.parallel, run.data
    one_round = data.micro_batch * layout.size("dp")
    if data.packing == "bin_packed" or data.global_batch < 1 or not divides(one_round, data.global_batch):
        return []
    if parallel.schedule not in SCHEDULES or virtual_stages_fit_the_schedule(run) or not _sizes_are_positive(run):
        return []
    microbatches = data.global_batch // one_round
    schedule = SCHEDULES[parallel.schedule]
    return [
        Problem(
            "data.global_batch",
            f"{problem.message} (global_batch / (micro_batch * dp) = {data.global_batch} / {one_round})",
            problem.fix,
        )
        for problem in schedule.problems(parallel.pp, parallel.vpp, microbatches)
    ]


RULES = (stages_hold_every_layer, schedule_is_known, virtual_stages_fit_the_schedule)
RULES_WITH_LAYOUT = (microbatches_fit_the_schedule,)


def _sizes_are_positive(run: RunConfig) -> bool:
    """Sizes below one are reported by `sizes_are_positive`."""
    return min(run.parallel.pp, run.parallel.vpp, run.model.num_layers, run.model.num_mtp + 1, run.data.micro_batch) > 0
