"""The dispatcher of a run: local where a rank has all experts, else the one that ``parallel.dispatcher`` names."""

from __future__ import annotations

from collections.abc import Callable

from moefold.comm.process_groups import Groups
from moefold.config.parallel import EngineDispatcher, NamedDispatcher
from moefold.config.run import RunConfig
from moefold.moe.dispatch import (
    all_gather,
    all_to_all,
    all_to_all_aligned,
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
from moefold.moe.dispatch.padded_routing import PaddedRouting, routed_multiple
from moefold.plan.dispatch_choice import dispatcher_in_use

BuildDispatcher = Callable[[RunConfig, Groups, SplitSizeSource], Dispatcher]
# From the names of ``parallel.dispatcher`` (``config.parallel.NamedDispatcher``).
DISPATCHERS: dict[NamedDispatcher, BuildDispatcher] = {
    "all_gather": all_gather.build,
    "all_to_all": all_to_all.build,
    "all_to_all_aligned": all_to_all_aligned.build,
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
        dispatcher = (DISPATCHERS | ENGINE_DISPATCHERS)[dispatcher_in_use(run)](run, groups, host)
    multiple = routed_multiple(run)
    return dispatcher if multiple == 1 else PaddedRouting(dispatcher, moe.num_experts, multiple)
