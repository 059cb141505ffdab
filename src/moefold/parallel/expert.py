"""Which dispatcher carries tokens to experts under a layout."""

from __future__ import annotations

from collections.abc import Callable

from moefold.comm.mesh import Groups
from moefold.config.moe import MoEConfig
from moefold.config.run import RunConfig
from moefold.dispatch.all_gather import AllGatherDispatcher
from moefold.dispatch.all_to_all import AllToAllDispatcher
from moefold.dispatch.contract import Dispatcher
from moefold.dispatch.local import LocalDispatcher
from moefold.ops.capacity import capacity_of
from moefold.topology.shares import share_sizes


def dispatcher_for(run: RunConfig, groups: Groups) -> Dispatcher:
    """Local where all experts are whole on this rank, else the one the run names."""
    moe = run.model.moe
    assert moe is not None
    if groups["expert_block"].alone:
        return _local(run, moe, groups)
    return DISPATCHERS[run.parallel.dispatcher](run, moe, groups)


def _local(run: RunConfig, moe: MoEConfig, groups: Groups) -> Dispatcher:
    return LocalDispatcher(moe.num_experts, padded_rows(run, groups))


def _all_to_all(run: RunConfig, moe: MoEConfig, groups: Groups) -> Dispatcher:
    return AllToAllDispatcher(moe.num_experts, groups["ep"], groups["etp"], padded_rows(run, groups))


def _all_gather(run: RunConfig, moe: MoEConfig, groups: Groups) -> Dispatcher:
    block = groups["expert_block"]
    sizes = share_sizes(microbatch_tokens(run), groups["tp"].size)
    tokens_of_rank = tuple(sizes[groups.layout.index("tp", rank)] for rank in block.ranks)
    return AllGatherDispatcher(moe.num_experts, block, groups["etp"].size, tokens_of_rank, padded_rows(run, groups))


def padded_rows(run: RunConfig, groups: Groups) -> int | None:
    """Rows that every rank gives every expert in padded mode: what the largest set it may meet is allowed.

    With capacities counted over the whole microbatch, all of an expert's rows may come from one rank's shard.
    """
    moe = run.model.moe
    if moe is None or moe.capacity is None or not moe.capacity.pad:
        return None
    whole = microbatch_tokens(run)
    largest = whole if moe.capacity.scope == "full" else max(share_sizes(whole, groups["tp"].size))
    return capacity_of(largest, moe.capacity.factor, moe.top_k, moe.num_experts)


def microbatch_tokens(run: RunConfig) -> int:
    return run.data.micro_batch * run.data.seq_len


DISPATCHERS: dict[str, Callable[[RunConfig, MoEConfig, Groups], Dispatcher]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
}
