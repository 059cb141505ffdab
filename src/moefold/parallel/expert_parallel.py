"""Which dispatcher carries tokens to experts under a layout.

``config.parallel.NamedDispatcher`` lists the names. Each names a module of ``moe/dispatch`` with a function
``build(run, groups, host)``.
"""

from __future__ import annotations

from importlib import import_module

from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Dispatcher, SplitSizeSource
from moefold.moe.dispatch.fixed_counts import padded_rows
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.plan.dispatch_choice import dispatcher_in_use


def dispatcher_for(run: RunConfig, groups: Groups, host: SplitSizeSource = SYNC_SPLIT_SIZES) -> Dispatcher:
    """Local where this rank has all experts, else the one the run names; ``host`` supplies the split sizes."""
    moe = run.model.moe
    assert moe is not None
    if groups["expert_block"].alone:
        return LocalDispatcher(moe.num_experts, padded_rows(run, groups), host.leaving)
    dispatcher: Dispatcher = import_module(f"moefold.moe.dispatch.{dispatcher_in_use(run)}").build(run, groups, host)
    return dispatcher
