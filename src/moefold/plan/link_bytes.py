"""Which link carries what: bytes that one GPU receives in one step, by cause, over fast links and over the network.

The counts are those that the time is made of (`plan/traffic.py`), of the pipeline rank that receives most. A gather
over several domains brings each GPU its share of what the other domains have over the network; the rest comes from
GPUs of its own domain. `collective_counts.py` has every message of a run of moefold's own, byte for byte; a test holds
these sums against it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from moefold.blueprint.model_shape import Layer, MoE
from moefold.blueprint.param_counts import layer_counts
from moefold.plan.stage_contents import stages_of_shape, written_stages
from moefold.plan.timing.layer_time import shards_by_layer
from moefold.plan.traffic import (
    Reach,
    context_bytes,
    data_reach,
    dense_reach,
    dispatch_bytes,
    exchanges_of,
    expert_data_reach,
    gathered_word,
    pipeline_leaves_domain,
    stage_bytes,
    summed_word,
    synced_word,
    tensor_bytes,
    tensor_reach,
)
from moefold.plan.workload import Workload
from moefold.schedule.actions import place
from moefold.schedule.names import schedule_named


class LinkBytes(NamedTuple):
    """Names are those of the time's lines."""

    name: str
    inside: float
    outside: float

    @property
    def total(self) -> float:
        return self.inside + self.outside


Sums = defaultdict[str, tuple[float, float]]


def link_bytes(workload: Workload) -> tuple[LinkBytes, ...]:
    """Of the rank that receives most, the largest first; what nobody sends is left out."""
    parallel = workload.parallel
    stages = stages_of_shape(workload.model, parallel.pp * parallel.vpp, written_stages(workload))
    holder = place(parallel.pp, parallel.vpp, schedule_named(parallel.schedule).placement)
    ranks = [Sums(lambda: (0.0, 0.0)) for _ in range(parallel.pp)]
    for rank, which in zip(holder, stages.which):
        contents = stages.different[which]
        for layer, number in contents.layers:
            _add_layer(workload, layer, number, ranks[rank])
        ends = (contents.embedding + contents.head) * workload.model.dim * workload.model.vocab / parallel.tp
        # The outermost parameters stay where they are between forward and backward.
        _add_parameters(workload, ends, 0.0, 1.0, ranks[rank], passes=1)
    once, crosses = workload.microbatches * stage_bytes(workload), pipeline_leaves_domain(workload)
    for one, other in (*pairwise(holder), *pairwise(holder[::-1])):
        if one != other:
            _add(ranks[other], "messages between stages", once * (not crosses), once * crosses)
    most = max(ranks, key=lambda sums: sum(map(sum, sums.values())))
    found = (LinkBytes(name, *both) for name, both in most.items() if sum(both))
    return tuple(sorted(found, key=lambda each: -each.total))


def _add(sums: Sums, name: str, inside: float, outside: float) -> None:
    before = sums[name]
    sums[name] = (before[0] + inside, before[1] + outside)


def _received(total: float, where: Reach) -> tuple[float, float]:
    """Of a gather of so many bytes, or a scatter: what a rank lacks, from its own domain and from others."""
    outside = total * (where.domains - 1) / where.domains / where.inside if where.crosses else 0.0
    return total * (where.size - 1) / where.size - outside, outside


def _add_layer(workload: Workload, layer: Layer, number: float, sums: Sums) -> None:
    parallel, times = workload.parallel, number * workload.microbatches
    exchanges = exchanges_of(workload, layer)
    if isinstance(layer.feed, MoE):
        sent = dispatch_bytes(workload, layer.feed)
        often = times * sum(exchanges.dispatches)
        _add(sums, "expert dispatch and combine", often * sent.inside, often * sent.outside)
    ways = max(parallel.tp, parallel.etp)
    if ways > 1:
        total = times * sum(exchanges.tensor) * tensor_bytes(workload, layer) * ways / (ways - 1)
        _add(sums, "tensor parallelism", *_received(total, tensor_reach(workload)))
    if parallel.cp > 1:
        total = times * sum(exchanges.context) * context_bytes(workload, layer) * parallel.cp / (parallel.cp - 1)
        _add(sums, "context parallelism", *_received(total, dense_reach(workload, "cp")))
    held = layer_counts(layer, workload.model.dim).on_rank(parallel.tp, parallel.ep, parallel.etp)
    _add_parameters(workload, *held, number, sums)


def _add_parameters(
    workload: Workload, dense: float, experts: float, number: float, sums: Sums, passes: int = 2
) -> None:
    """Gathered for every pass and summed after the second one, or both once per step."""
    by_layer = shards_by_layer(workload)
    each = synced_word(workload)
    if by_layer:
        each = workload.microbatches * (passes * gathered_word(workload) + summed_word(workload))
    name = "sharded parameters" if by_layer else "gradients and parameters"
    for held, where in ((dense, data_reach(workload)), (experts, expert_data_reach(workload))):
        _add(sums, name, *_received(number * each * held, where))
