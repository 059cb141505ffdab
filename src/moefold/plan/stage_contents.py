"""What each (virtual) pipeline stage and each pipeline rank holds.

The stages are those of `blueprint/stages.py`; the schedule says which rank holds them. Of a run, `parts_by_rank` lists
the modules. Of any workload, `contents_of` counts layers by kind: a stage string is obeyed; without one moefold
balances and other frameworks divide evenly.

`muon_parameters` says who holds what of the parameters that Muon updates. FSDP leaves every rank one box of a
parameter. Flat sharding leaves it a range of a bucket, which may cut a parameter anywhere: several boxes, or none. Both
are computed for every rank of a pipeline rank from the run alone, so that all ranks deal alike, and the planner counts
what they will do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from moefold.blueprint.flat_layout import MEBIBYTE, FlatBucket, boxes_of_range, flat_buckets, shifted
from moefold.blueprint.model_shape import Layer, ModelShape
from moefold.blueprint.muon_matrices import HeldBoxes, MuonParameter, Spans, matrices_of, spans_of
from moefold.blueprint.narrow_matmuls import gather_casts
from moefold.blueprint.param_groups import is_trained, update_rule
from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.blueprint.sharding import data_sharded_box, local_slices
from moefold.blueprint.stage_modules import Parts, StagePlace, parts_of, place_stages
from moefold.blueprint.stages import StageSpec, balanced_stages, even_stages, parse_stages, stages_of
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig
from moefold.plan.workload import Workload
from moefold.schedule.actions import place
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import FoldedLayout

# Stands for a stage string: as moefold divides layers where it is given none.
BALANCED = "balanced"


@dataclass(frozen=True)
class StageContents:
    """One stage: layers by kind with their number, and what stands at the pipeline's ends."""

    layers: tuple[tuple[Layer, int], ...]
    embedding: bool = False
    mtp: int = 0
    head: bool = False


@dataclass(frozen=True)
class Stages:
    """Every stage's contents. Most stages are alike, so different ones are listed once and pointed at."""

    different: tuple[StageContents, ...]
    which: tuple[int, ...]


@lru_cache(maxsize=4096)
def stages_of_shape(model: ModelShape, stages: int, written: str | None) -> Stages:
    contents = contents_of(model, stages, written)
    different = tuple(dict.fromkeys(contents))
    index = {each: number for number, each in enumerate(different)}
    return Stages(different, tuple(index[each] for each in contents))


def contents_of(model: ModelShape, stages: int, written: str | None) -> tuple[StageContents, ...]:
    """One entry per stage, in the model's order."""
    return tuple(
        StageContents(
            tuple(Counter(model.layers[spec.layers.start : spec.layers.stop]).items()),
            spec.embedding,
            len(spec.mtp),
            spec.loss,
        )
        for spec in planned_stages(model, stages, written)
    )


def planned_stages(model: ModelShape, stages: int, written: str | None) -> tuple[StageSpec, ...]:
    """A string for another number of stages does not count: published layouts may be of another run."""
    if written == BALANCED or stages == 1:
        return balanced_stages(model, stages)
    if written is not None:
        parsed = parse_stages(written, len(model.layers), model.mtp)
        if len(parsed) == stages:
            return parsed
    return even_stages(model, stages)


def written_stages(workload: Workload) -> str | None:
    """The workload's stage string; moefold, where there is none, balances embedding, layers, MTP modules and loss."""
    own = workload.parallel.stages is None and workload.is_own
    return BALANCED if own else workload.parallel.stages


# ---- stages of a run, and their ranks ----


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


def flat_layout_of(run: RunConfig, layout: FoldedLayout, pp_rank: int) -> tuple[FlatBucket, ...]:
    """The flat buffers of a pipeline rank, in buckets of ``parallel.bucket_mb`` of gradients."""
    parallel, parts = run.parallel, parts_by_rank(run)
    holder = place(parallel.pp, parallel.vpp, schedule_named(parallel.schedule).placement)
    stages = [stage for stage in stages_of(run.model, parallel) if holder[stage.index] == pp_rank]
    held = [
        (spec, sum(other.holds(spec.name) for other in parts) > 1)
        for spec in parameters(run.model)
        if parts[pp_rank].holds(spec.name)
    ]
    limit = int(parallel.bucket_mb * MEBIBYTE) // max(4, BYTES[run.precision.params])
    return flat_buckets(
        run.model,
        run.precision,
        layout,
        held,
        stages,
        limit,
        lambda name: is_trained(name, run.optim),
        gather_casts(run),
        parallel.ranks_per_host,
    )


def muon_parameters(run: RunConfig, layout: FoldedLayout, rank: int) -> list[MuonParameter]:
    """Those of this rank's pipeline rank; ranks are in the order of its `stage` group."""
    pp_rank = layout.coordinate(rank, "pp")
    holds = parts_by_rank(run)[pp_rank].holds
    specs = [
        spec
        for spec in parameters(run.model)
        if holds(spec.name) and update_rule(spec.name, spec.kind, run.optim).algorithm == "muon"
    ]
    peers = layout.ranks("stage", rank)
    if run.parallel.sharding == "flat":
        held = _flat(specs, flat_layout_of(run, layout, pp_rank), layout, peers)
    else:
        held = {spec.name: tuple((spans_of(data_sharded_box(spec, layout, peer)),) for peer in peers) for spec in specs}
    return [MuonParameter(matrices_of(spec, run.model), held[spec.name]) for spec in specs]


def _flat(
    specs: list[ParameterSpec], buckets: tuple[FlatBucket, ...], layout: FoldedLayout, peers: tuple[int, ...]
) -> dict[str, HeldBoxes]:
    by_name = {spec.name: spec for spec in specs}
    held: dict[str, HeldBoxes] = {}
    for bucket in buckets:
        group = "expert_shard" if bucket.grid == "expert" else "dense_shard"
        ranges = [bucket.owned(layout.size(group), layout.index(group, peer)) for peer in peers]
        for where in bucket.parameters:
            if where.name in by_name:
                spec = by_name[where.name]
                held[where.name] = tuple(
                    _boxes(spec, layout, peer, where.shape, owned.start - where.start, owned.stop - where.start)
                    for peer, owned in zip(peers, ranges, strict=True)
                )
    return held


def _boxes(
    spec: ParameterSpec, layout: FoldedLayout, rank: int, shape: tuple[int, ...], start: int, stop: int
) -> tuple[Spans, ...]:
    """Elements start..stop of what tensor and expert parallelism leave to a rank, as boxes of the whole parameter."""
    size = 1
    for length in shape:
        size *= length
    cut = boxes_of_range(shape, max(start, 0), min(stop, size))
    return tuple(spans_of(box) for box in shifted(cut, local_slices(spec, layout, rank)))
