"""Which parts of the model each pipeline rank holds: stages say what belongs together, the schedule where it lives."""

from __future__ import annotations

from moefold.blueprint.stage_modules import Parts, parts_of
from moefold.blueprint.stage_ranks import StagePlace, place_stages
from moefold.blueprint.stages import stages_of
from moefold.config.run import RunConfig
from moefold.schedule.actions import place
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import FoldedLayout


def places_of(run: RunConfig, layout: FoldedLayout) -> tuple[StagePlace, ...]:
    """Every stage with the ranks that hold it."""
    placement = schedule_named(run.parallel.schedule).placement
    return place_stages(stages_of(run.model, run.parallel), layout, placement)


def parts_by_rank(run: RunConfig) -> tuple[Parts, ...]:
    """What each pipeline rank holds, from the first to the last."""
    parallel, stages = run.parallel, stages_of(run.model, run.parallel)
    holder = place(parallel.pp, parallel.vpp, schedule_named(parallel.schedule).placement)
    return tuple(
        parts_of((stage for stage in stages if holder[stage.index] == rank), run.model) for rank in range(parallel.pp)
    )
