"""The dispatcher interface: rows go to the ranks of their experts, and one summed row per token comes back.

A dispatcher moves rows and does nothing else. The rows received are source rows, each with its assignments to the
experts of this rank; the experts return one row for each, the sum over its experts of prob times expert output. So a
row with several experts on one rank need travel only once each way, and sorting rows by expert is the experts' job.

A dispatcher keeps no state between ``dispatch`` and ``combine``: what the way back needs is in the ticket, so any
number of microbatches can be in flight.

The splits of an uneven all-to-all must be on the host, and routing makes them on the device. A ``SplitSizeSource``
brings them over: ``SyncSplitSizes`` waits for the device and copies; the dry run knows them without any data. Where
every expert has a padded capacity or microbatches have a fixed shape, counts follow from the configuration alone:
``padded_rows``, ``tokens_by_shard``.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from moefold.batching.zigzag import num_held
from moefold.config.run import RunConfig
from moefold.moe.capacity import capacity_of
from moefold.topology.folded_layout import shard_sizes


class Routing(NamedTuple):
    """K assignments per row: expert numbers, probs, and which assignments are kept (None: all; others were dropped).

    [t, K] with global expert numbers where the router made it, [R, K] with this rank's own where rows were received.
    """

    experts: Tensor
    probs: Tensor
    kept: Tensor | None = None


class ExpertInput(NamedTuple):
    """Rows for the experts of this rank, with their assignments to those experts, numbered from 0."""

    rows_RL: Tensor
    assignments: Routing
    # How many kept assignments each expert has, and the same on the host.
    rows_per_expert_e: Tensor
    rows_per_expert: list[int]
    # Every expert computes exactly so many rows, padding included, so no shape depends on data; None if they differ.
    capacity: int | None
    ticket: Any


class Dispatcher(Protocol):
    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput: ...

    def combine(self, expert_out_RL: Tensor, ticket: Any) -> Tensor:
        """[t, L]: each token's expert outputs summed; the experts have already multiplied them by the probs."""
        ...


# One deduplicated exchange: straight to the ranks, or across hosts first and then to the ranks inside a host.
ExchangeName = Literal["direct", "across", "inside"]


class SplitSizeSource(Protocol):
    """Counts on the host; each method is given the same counts on the device."""

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        """Rows of this rank's tokens for each expert."""
        ...

    def arriving(self, rows_from_We: Tensor) -> list[list[int]]:
        """Rows from each source rank for each expert of this rank."""
        ...

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        """Rows of all tokens of the expert block for each expert of this rank."""
        ...

    def tokens(self, tokens_of_W: Tensor) -> list[int]:
        """How many tokens each rank of the expert block holds."""
        ...

    def leaving_once(self, exchange: ExchangeName, rows_W: Tensor) -> list[int]:
        """Rows that leave for each rank of the exchange's group, each once however many experts it has there."""
        ...

    def arriving_once(self, exchange: ExchangeName, counts_WX: Tensor) -> list[list[int]]:
        """From each source rank: its rows, then its assignments to each expert at this end of the exchange."""
        ...


class SyncSplitSizes:
    """Waits for the device and copies the counts."""

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        return rows_per_expert_E.tolist()

    def arriving(self, rows_from_We: Tensor) -> list[list[int]]:
        return rows_from_We.tolist()

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        return rows_per_expert_e.tolist()

    def tokens(self, tokens_of_W: Tensor) -> list[int]:
        return tokens_of_W.tolist()

    def leaving_once(self, exchange: ExchangeName, rows_W: Tensor) -> list[int]:
        return rows_W.tolist()

    def arriving_once(self, exchange: ExchangeName, counts_WX: Tensor) -> list[list[int]]:
        return counts_WX.tolist()


SYNC_SPLIT_SIZES = SyncSplitSizes()


def padded_rows(run: RunConfig, dp: int) -> int | None:
    """Rows that every rank sends to every expert with ``capacity.pad``: the capacity of the largest set it may hold.

    ``dp`` is the number of data-parallel ranks. With capacities counted over the whole microbatch, all of an expert's
    rows may come from one rank's shard.
    """
    moe = run.model.moe
    if moe is None or moe.capacity is None or not moe.capacity.pad:
        return None
    whole = most_microbatch_tokens(run, dp)
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


def most_microbatch_tokens(run: RunConfig, dp: int) -> int:
    """With dynamic context sizes ``micro_batch`` bounds one rank, and a microbatch may be cut over all of them."""
    tokens = run.data.micro_batch * run.data.seq_len
    return tokens * dp if run.parallel.dynamic_cp else tokens


def most_rank_tokens(run: RunConfig, dp: int) -> int:
    """The most tokens of a microbatch that any rank holds, the same on every rank: for buffers of a fixed size."""
    return max(map(max, tokens_by_shard(run))) if shapes_are_fixed(run) else most_microbatch_tokens(run, dp)
