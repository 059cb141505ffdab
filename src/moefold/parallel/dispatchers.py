"""The dispatcher of a run: local where a rank has all experts, else the one that ``parallel.dispatcher`` names.

Where a layer's exchanges run beside its own computation, it has one dispatcher for each chunk of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moefold.comm.p2p import CommStream
from moefold.comm.process_groups import Groups
from moefold.config.moe import MoEConfig
from moefold.config.parallel import EngineDispatcher, NamedDispatcher, ParallelConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch import (
    all_gather,
    all_to_all,
    all_to_all_aligned,
    all_to_all_bounded,
    deduplicated,
    deepep,
    deepep_elastic,
    symmetric_memory,
    two_level,
)
from moefold.moe.dispatch.base import (
    SYNC_SPLIT_SIZES,
    Dispatcher,
    LocalDispatcher,
    SplitSizeSource,
    padded_rows,
    row_codecs,
)
from moefold.moe.dispatch.expert_clones import EchoDispatcher
from moefold.moe.dispatch.padded_routing import PaddedRouting, routed_multiple
from moefold.moe.exchange_beside import ExchangesBeside
from moefold.moe.overlapped_layer import LayerOverlap
from moefold.plan.clone_loads import EchoSizes
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.schedule.layer_orders import exchange_order

BuildDispatcher = Callable[[RunConfig, Groups, SplitSizeSource], Dispatcher]
# From the names of ``parallel.dispatcher`` (``config.parallel.NamedDispatcher``).
DISPATCHERS: dict[NamedDispatcher, BuildDispatcher] = {
    "all_gather": all_gather.build,
    "all_to_all": all_to_all.build,
    "all_to_all_aligned": all_to_all_aligned.build,
    "all_to_all_bounded": all_to_all_bounded.build,
    "deduplicated": deduplicated.build,
    "two_level": two_level.build,
}
# Of other libraries, imported when they are built.
ENGINE_DISPATCHERS: dict[EngineDispatcher, BuildDispatcher] = {
    "deepep": deepep.build,
    "deepep_elastic": deepep_elastic.build,
    "symmetric_memory": symmetric_memory.build,
}


def dispatcher_for(run: RunConfig, groups: Groups, host: SplitSizeSource = SYNC_SPLIT_SIZES) -> Dispatcher:
    """Local where this rank has all experts, else the one the run names; ``host`` supplies the split sizes."""
    moe = run.model.moe
    assert moe is not None
    if groups["expert_block"].alone:
        capacity = padded_rows(run, groups.layout.size("dp"))
        dispatcher: Dispatcher = LocalDispatcher(moe.num_experts, capacity, host.leaving, row_codecs(run))
    else:
        dispatcher = _exchanging(run, groups, host)
    multiple = routed_multiple(run)
    return dispatcher if multiple == 1 else PaddedRouting(dispatcher, moe.num_experts, multiple)


def _exchanging(run: RunConfig, groups: Groups, host: SplitSizeSource) -> Dispatcher:
    build, moe, echo = (DISPATCHERS | ENGINE_DISPATCHERS)[dispatcher_in_use(run)], run.model.moe, run.parallel.echo
    assert moe is not None
    if echo is None or groups["ep"].alone:
        return build(run, groups, host)
    sizes = EchoSizes(moe.num_experts, groups["ep"].size, echo.slots)
    # For a dispatcher a place is an expert.
    places = replace(run, model=replace(run.model, moe=replace(moe, num_experts=sizes.num_places)))
    inner = build(places, groups, host)
    return EchoDispatcher(inner, sizes, echo.min_rows, groups["ep"], groups["expert_block"], host)


def overlaps_itself(parallel: ParallelConfig) -> bool:
    """Whether exchanges of a microbatch run beside its own computation."""
    return "shared_experts" in parallel.overlap or parallel.exchange_chunks > 1


def layer_overlap(
    run: RunConfig, groups: Groups, host: SplitSizeSource, stream: CommStream, _: MoEConfig
) -> LayerOverlap:
    chunks = run.parallel.exchange_chunks
    order = exchange_order(chunks, "shared_experts" in run.parallel.overlap)
    dispatchers = (dispatcher_for(run, groups, host.of_chunk(chunk, chunks)) for chunk in range(chunks))
    return LayerOverlap(ExchangesBeside(stream), order, tuple(dispatchers))
