"""Row and token counts that follow from the configuration, for dispatchers that need none at run time."""

from __future__ import annotations

from moefold.batching.zigzag import num_held
from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.moe.capacity import capacity_of
from moefold.topology.folded_layout import shard_sizes


def padded_rows(run: RunConfig, groups: Groups) -> int | None:
    """Rows that every rank sends to every expert with ``capacity.pad``: the capacity of the largest set it may hold.

    With capacities counted over the whole microbatch, all of an expert's rows may come from one rank's shard.
    """
    moe = run.model.moe
    if moe is None or moe.capacity is None or not moe.capacity.pad:
        return None
    whole = most_microbatch_tokens(run, groups)
    local = moe.capacity.scope == "local" and shapes_are_fixed(run)
    largest = max(map(max, tokens_by_shard(run))) if local else whole
    return capacity_of(largest, moe.capacity.factor, moe.top_k, moe.num_experts)


def shapes_are_fixed(run: RunConfig) -> bool:
    """Whether every microbatch has the same tokens on the same ranks."""
    return run.data.packing in ("concat", "padded")


def tokens_by_shard(run: RunConfig) -> tuple[tuple[int, ...], ...]:
    """How many tokens of a microbatch of fixed shape each (context rank, tp rank) holds."""
    lengths, cp = (run.data.seq_len,) * run.data.micro_batch, run.parallel.cp
    return tuple(shard_sizes(num_held(lengths, index, cp), run.parallel.tp) for index in range(cp))


def most_microbatch_tokens(run: RunConfig, groups: Groups) -> int:
    """With dynamic context sizes ``micro_batch`` bounds one rank, and a microbatch may be cut over all of them."""
    tokens = run.data.micro_batch * run.data.seq_len
    return tokens * groups.layout.size("dp") if run.parallel.dynamic_cp else tokens
