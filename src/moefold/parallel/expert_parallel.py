"""From a run and its layout to the dispatcher of its MoE layers."""

from __future__ import annotations

from collections.abc import Callable

from moefold.batching.zigzag import num_held
from moefold.comm.process_groups import Groups
from moefold.config.moe import MoEConfig
from moefold.config.run import RunConfig
from moefold.moe.capacity import capacity_of
from moefold.moe.dispatch.all_gather import AllGatherDispatcher
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Dispatcher, SplitSizeSource
from moefold.moe.dispatch.deduplicated import DeduplicatedDispatcher
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.dispatch.two_level import TwoLevelDispatcher
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.topology.shares import share_sizes


def dispatcher_for(run: RunConfig, groups: Groups, host: SplitSizeSource = SYNC_SPLIT_SIZES) -> Dispatcher:
    """Local where this rank has all experts, else the one the run names; ``host`` supplies the split sizes."""
    moe = run.model.moe
    assert moe is not None
    if groups["expert_block"].alone:
        return LocalDispatcher(moe.num_experts, padded_rows(run, groups), host.leaving)
    return DISPATCHERS[dispatcher_in_use(run)](run, moe, groups, host)


def _all_to_all(run: RunConfig, moe: MoEConfig, groups: Groups, host: SplitSizeSource) -> Dispatcher:
    return AllToAllDispatcher(moe.num_experts, groups["ep"], groups["etp"], padded_rows(run, groups), host)


def _all_gather(run: RunConfig, moe: MoEConfig, groups: Groups, host: SplitSizeSource) -> Dispatcher:
    block = groups["expert_block"]
    layout = groups.layout
    tokens_of_rank = None
    if shapes_are_fixed(run):
        tokens_of_rank = tuple(
            shard_sizes(run)[layout.index("cp", rank)][layout.index("tp", rank)] for rank in block.ranks
        )
    slots = padded_rows(run, groups)
    return AllGatherDispatcher(moe.num_experts, block, groups["etp"].size, tokens_of_rank, slots, host)


def padded_rows(run: RunConfig, groups: Groups) -> int | None:
    """Rows per expert that every rank sends in padded mode: the capacity for the largest set of tokens that can occur.

    With capacities counted over the whole microbatch, all of an expert's rows may come from one rank's shard.
    """
    moe = run.model.moe
    if moe is None or moe.capacity is None or not moe.capacity.pad:
        return None
    whole = most_microbatch_tokens(run, groups)
    local = moe.capacity.scope == "local" and shapes_are_fixed(run)
    largest = max(map(max, shard_sizes(run))) if local else whole
    return capacity_of(largest, moe.capacity.factor, moe.top_k, moe.num_experts)


def shapes_are_fixed(run: RunConfig) -> bool:
    """Whether every microbatch puts the same number of tokens on each rank."""
    return run.data.packing in ("concat", "padded")


def shard_sizes(run: RunConfig) -> tuple[tuple[int, ...], ...]:
    """How many tokens of a microbatch of fixed shape each (context rank, tp rank) holds."""
    lengths, cp = (run.data.seq_len,) * run.data.micro_batch, run.parallel.cp
    return tuple(share_sizes(num_held(lengths, index, cp), run.parallel.tp) for index in range(cp))


def most_microbatch_tokens(run: RunConfig, groups: Groups) -> int:
    """With dynamic context sizes the bound is per rank, and a microbatch may be sharded over all of them."""
    tokens = run.data.micro_batch * run.data.seq_len
    return tokens * groups.layout.size("dp") if run.parallel.dynamic_cp else tokens


def _deduplicated(run: RunConfig, moe: MoEConfig, groups: Groups, host: SplitSizeSource) -> Dispatcher:
    return DeduplicatedDispatcher(moe.num_experts, groups["ep"], groups["etp"], host)


def _two_level(run: RunConfig, moe: MoEConfig, groups: Groups, host: SplitSizeSource) -> Dispatcher:
    return TwoLevelDispatcher(moe.num_experts, groups["ep_across"], groups["ep_inside"], groups["etp"], host)


DISPATCHERS: dict[str, Callable[[RunConfig, MoEConfig, Groups, SplitSizeSource], Dispatcher]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "deduplicated": _deduplicated,
    "two_level": _two_level,
}
