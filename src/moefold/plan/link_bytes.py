"""Which link carries what: bytes that one GPU receives in one step, by cause, over fast links and over the network.

The counts are those that the time is made of (`plan/traffic.py`), of the pipeline rank that receives most. A gather
over several domains brings each GPU its share of what the other domains have over the network; the rest comes from
GPUs of its own domain; in two steps, inside of hosts and between them, it is the same bytes. Clones of experts (ECHO)
are those of the mean rank. `collective_counts.py` has every message of a run of moefold's own, byte for byte; a test
holds these sums against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from moefold.blueprint.model_shape import Layer, MoE
from moefold.blueprint.param_counts import layer_counts
from moefold.blueprint.parameters import join_parameter
from moefold.plan.echo_cost import expert_bytes
from moefold.plan.memory.states import padded_vocab, rank_weights, shards
from moefold.plan.stage_contents import StageContents, stages_of_shape, written_stages
from moefold.plan.timing.layer_time import shards_by_layer
from moefold.plan.traffic import (
    Reach,
    context_bytes,
    data_reach,
    dense_reach,
    dispatch_bytes,
    exchanges_of,
    expert_data_reach,
    expert_reach,
    gathered_word,
    pipeline_leaves_domain,
    sequence_bytes,
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
    parallel, model = workload.parallel, workload.model
    stages = stages_of_shape(model, parallel.pp * parallel.vpp, written_stages(workload))
    contents = [stages.different[which] for which in stages.which]
    holder = place(parallel.pp, parallel.vpp, schedule_named(parallel.schedule).placement)
    ranks = [Sums(lambda: (0.0, 0.0)) for _ in range(parallel.pp)]
    for rank, sums in enumerate(ranks):
        held = tuple(each for each, holds in zip(contents, holder, strict=True) if holds == rank)
        for stage in held:
            _add_stage(workload, stage, sums)
        # The outermost parameters stay where they are between forward and backward.
        ends = rank_weights(model, held, (parallel.tp, parallel.ep, parallel.etp)).ends
        _add_parameters(workload, ends, 0.0, 1.0, sums, passes=1)
    _add_pipeline(workload, contents, holder, ranks)
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


def _add_pipeline(
    workload: Workload, contents: Sequence[StageContents], holder: Sequence[int], ranks: Sequence[Sums]
) -> None:
    """Hidden states between stages and gradients of embeddings that several ranks hold."""
    name = "messages between stages"
    both = (0.0, 1.0) if pipeline_leaves_domain(workload) else (1.0, 0.0)
    once = workload.microbatches * stage_bytes(workload)
    # One hidden state goes on, and one of every MTP module before; their gradients come back.
    streams = list(accumulate((stage.mtp for stage in contents), initial=1))[1:]
    for one, other, hidden in zip(holder, holder[1:], streams, strict=False):
        for receiver in (one, other) if one != other else ():
            _add(ranks[receiver], name, *(hidden * once * share for share in both))
    model, tied = workload.model, workload.model.tied
    holders = {
        rank
        for stage, rank in zip(contents, holder, strict=True)
        if stage.embedding or stage.mtp or (tied and stage.head)
    }
    table = padded_vocab(model.vocab, workload.parallel.tp) * model.dim / workload.parallel.tp
    # moefold sends shards to each of the others; other frameworks sum whole gradients.
    often = (len(holders) - 1) / shards(workload)[0] if workload.is_own else 2 * (len(holders) - 1) / len(holders)
    for rank in holders:
        _add(ranks[rank], name, *(often * table * workload.gradient_bytes * share for share in both))


def _add_stage(workload: Workload, stage: StageContents, sums: Sums) -> None:
    model, tp = workload.model, workload.parallel.tp
    # Every MTP module is the same layer behind a matrix that joins what it reads.
    modules = ((model.mtp_layers[-1], stage.mtp),) if stage.mtp else ()
    for layer, number in (*stage.layers, *modules):
        _add_layer(workload, layer, number, sums)
    _add_parameters(workload, stage.mtp * join_parameter("", model.dim).size / tp, 0.0, 1.0, sums)
    if tp > 1:
        # Parts of embeddings are summed, and tokens are gathered before logits; backward it is the other way round.
        often = stage.embedding + stage.mtp + stage.head * (1 + model.mtp)
        total = 2 * often * workload.microbatches * sequence_bytes(workload) * tp / (tp - 1)
        _add(sums, "tensor parallelism", *_received(total, dense_reach(workload, "tp")))


def _add_layer(workload: Workload, layer: Layer, number: float, sums: Sums) -> None:
    parallel, times = workload.parallel, number * workload.microbatches
    exchanges = exchanges_of(workload, layer)
    if isinstance(layer.feed, MoE):
        sent = dispatch_bytes(workload, layer.feed)
        often = times * sum(exchanges.dispatches)
        _add(sums, "expert dispatch and combine", often * sent.inside, often * sent.outside)
        if parallel.echo is not None:
            where, passes = expert_reach(workload), 2.0 + ("experts" in workload.recompute)
            each = times * passes * workload.clones.clones / where.size * expert_bytes(workload.run)
            outside = each * (where.size - where.inside) / (where.size - 1)
            _add(sums, "clones of experts", each - outside, outside)
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
