"""Who holds what of the parameters that Muon updates, under either form of sharded data parallelism.

FSDP leaves every rank one box of a parameter. Flat sharding leaves it a range of a bucket, which may cut a parameter
anywhere: several boxes, or none. Both are computed for every rank of a pipeline rank from the run alone, so that all
ranks deal alike, and the planner counts what they will do.
"""

from __future__ import annotations

from moefold.blueprint.flat_layout import FlatBucket, boxes_of_range, shifted
from moefold.blueprint.muon_matrices import Spans, matrices_of
from moefold.blueprint.muon_owners import HeldBoxes, MuonParameter, spans_of
from moefold.blueprint.param_groups import update_rule
from moefold.blueprint.parameters import ParameterSpec, parameters
from moefold.blueprint.sharding import data_sharded_box, local_slices
from moefold.config.run import RunConfig
from moefold.plan.stage_contents import flat_layout_of, parts_by_rank
from moefold.topology.folded_layout import FoldedLayout


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
