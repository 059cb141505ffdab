"""Pages for rows of experts (`memory.retain.STEP: page`): how many a rank of a pipeline holds, from the configuration.

Buffers of `all_to_all_bounded` have `row_bound` times the rows of an even routing, in every layer: any layer of any
microbatch may get that many. Of what is kept for the backward, only the sum over all layers and microbatches in flight
matters, and sums stray less than their terms: `memory.page_bound` may be the smaller bound.

    t tokens of a rank, K experts per token, etp ranks of an expert       t K etp rows of an even routing
    A (layer, microbatch) pairs alive at the fullest moment               page_bound t K etp A rows
    pages of p rows, and one more per pair, whose last page is not full   page_bound t K etp A / p + A

for every step that is paged. Steps whose rows have the same dim share a pool. `memory.page_spill` says for which share
of them pages are in the host's memory instead. Where pages do not suffice, the step runs once more without any
(`pipeline/step.py`), so that a bound that is too small costs time and nothing else.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from moefold.blueprint.model_shape import MoE, shape_of
from moefold.blueprint.stages import StageSpec, stages_of
from moefold.config.memory import RetainedStep
from moefold.config.run import RunConfig
from moefold.plan.memory.in_flight import moments
from moefold.schedule.actions import place
from moefold.schedule.names import schedule_named


class PoolSize(NamedTuple):
    """Pages for rows of ``dim`` entries: on the device, and in the host's memory."""

    dim: int
    num_pages: int
    spill_pages: int


def paged_dims(run: RunConfig) -> dict[RetainedStep, int]:
    """Entries of a row of each step that is paged, on a rank."""
    moe = run.model.moe
    if moe is None:
        return {}
    hidden = moe.expert_hidden_dim // run.parallel.etp
    dims: dict[RetainedStep, int] = {
        "rows": moe.latent_dim or run.model.dim,
        "gate_up": 2 * hidden,
        "activation": hidden,
    }
    retained = run.memory.retained()
    return {step: dim for step, dim in dims.items() if retained[step] == "page"}


def page_pools(run: RunConfig, tokens: int, microbatches: int, pipeline_rank: int) -> tuple[PoolSize, ...]:
    """``tokens``: the most of a microbatch that a rank holds."""
    dims, moe = paged_dims(run), run.model.moe
    pairs = pairs_alive(run, microbatches, pipeline_rank)
    if moe is None or not pairs:
        return ()
    rows = tokens * moe.top_k * run.parallel.etp
    each = ceil(run.memory.page_bound * rows * pairs / run.memory.page_rows) + pairs
    found = []
    for dim in sorted(set(dims.values())):
        pages = each * list(dims.values()).count(dim)
        spilled = int(pages * run.memory.page_spill)
        found.append(PoolSize(dim, pages - spilled, spilled))
    return tuple(found)


def pairs_alive(run: RunConfig, microbatches: int, pipeline_rank: int) -> int:
    """(MoE layer, microbatch) pairs between forward and backward on a pipeline rank, at its fullest moment."""
    parallel, schedule = run.parallel, schedule_named(run.parallel.schedule)
    holder = place(parallel.pp, parallel.vpp, schedule.placement)
    held = [stage for stage in stages_of(run.model, parallel) if holder[stage.index] == pipeline_rank]
    layers = [_moe_layers(run, stage) for stage in held]
    # What a deferred weight gradient holds was read from its pages by then.
    alive = max(
        sum(live * count for live, count in zip(moment[: len(held)], layers, strict=True))
        for moment in moments(parallel.schedule, parallel.pp, parallel.vpp, microbatches)[pipeline_rank]
    )
    # A forward beside a backward: a layer may fill its pages before the other has given its own back.
    return alive + (1 if schedule.overlaps and alive else 0)


def _moe_layers(run: RunConfig, stage: StageSpec) -> int:
    shape = shape_of(run.model)
    layers = [shape.layers[number] for number in stage.layers] + [shape.mtp_layers[number] for number in stage.mtp]
    return sum(isinstance(layer.feed, MoE) for layer in layers)
