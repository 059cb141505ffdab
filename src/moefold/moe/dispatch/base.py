"""The dispatcher interface: rows go to the ranks of their experts, and one summed row per token comes back.

A dispatcher moves rows and does nothing else. The rows received are source rows, each with its assignments to the
experts of this rank; the experts return one row for each, the sum over its experts of prob times expert output. So a
row with several experts on one rank need travel only once each way, and sorting rows by expert is the experts' job.

Each way has three parts, so that only collectives occupy the communication stream and everything else computes:

    dispatch    counts | prepare: sort, gather rows | exchange | finish: put received rows in order
    combine            | prepare: order by source   | exchange | finish: sum rows per token

``counts`` is the collective that tells every rank how many rows it will receive; ``prepare`` cannot give its rows a
shape before. ``dispatch`` and ``combine`` are these parts one after the other. A dispatcher keeps no state between
them: what a later part needs is in the value of the earlier one, and what the way back needs is in the ticket, so any
number of microbatches can be in flight.

The splits of an uneven all-to-all must be on the host, and routing makes them on the device. A ``SplitSizeSource``
brings them over: ``SyncSplitSizes`` waits for the device and copies; the dry run knows them without any data. Where
every expert has a padded capacity or microbatches have a fixed shape, counts follow from the configuration alone:
``padded_rows``, ``tokens_by_shard``.

``LocalDispatcher`` is the simplest one: all experts are on this rank, and nothing is sent.

With ``precision.dispatch`` rows go to experts as narrow numbers (``RowCodecs``): tokens in dispatch, gradients in
combine's backward. They are in their own dtype again where they arrive; the gradient of the cast is that of the
identity. What comes back, expert outputs and gradients of tokens, is sent as it is. ``LocalDispatcher`` casts the same
rows, so that a value does not depend on where its expert is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.batching.zigzag import num_held
from moefold.config.precision_recipes import DISPATCH_CASTS
from moefold.config.run import RunConfig
from moefold.moe.permute import count_assignments
from moefold.moe.topk import capacity_of
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.row_messages import NarrowRowCodec
from moefold.topology.folded_layout import shard_sizes


class Routing(NamedTuple):
    """K assignments per row: expert numbers, probs, and which assignments are kept (None: all; others were dropped).

    [t, K] with global expert numbers where the router made it, [R, K] with this rank's own where rows were received.
    ``counts_E``: how many kept assignments each expert has, where that has been counted.
    """

    experts: Tensor
    probs: Tensor
    kept: Tensor | None = None
    counts_E: Tensor | None = None


def counts_of(routing: Routing, num_experts: int) -> Tensor:
    """[E]: kept assignments of each expert, counted here if they have not been."""
    return count_assignments(routing, num_experts) if routing.counts_E is None else routing.counts_E


# What a part of a dispatcher hands to a later one, or to the way back. Each dispatcher has types of its own for it, and
# nobody else looks inside.
Carried = Any


class CloneWeights(Protocol):
    """Of experts of other ranks that are cloned here for one microbatch (`moe/dispatch/expert_clones.py`)."""

    def __call__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """From this rank's experts, [e, ...] each, to the clones here, one per slot, in ``dtype``.

        All ranks of the ep group take part, in the backward too: gradients of clones are added to those of the experts
        that they are clones of.
        """
        ...


class ExpertInput(NamedTuple):
    """Rows for the experts of this rank, with their assignments to those experts, numbered from 0."""

    rows_RL: Tensor
    assignments: Routing
    # How many kept assignments each expert has, and the same on the host; None where only the device knows, and then
    # there may be rows of zeros behind those of the last expert.
    rows_per_expert_e: Tensor
    rows_per_expert: list[int] | None
    # Every expert computes exactly so many rows, padding included, so no shape depends on data; None if they differ.
    capacity: int | None
    ticket: Carried
    # Rows are those that grouped GEMMs compute: one assignment each, all kept, in the order of the experts.
    by_expert: bool = False
    # With clones, their rows follow those of this rank's own experts: counts and assignments number them behind.
    clones: CloneWeights | None = None
    # How many rows did not fit into buffers of a fixed size; None where there are no such buffers.
    overflow: Tensor | None = None

    @property
    def host_rows(self) -> list[int]:
        """``rows_per_expert`` for who cannot do without."""
        return self.rows_per_expert_e.tolist() if self.rows_per_expert is None else self.rows_per_expert


class Dispatcher:
    """The parts of both ways. ``dispatch_counts``, ``dispatch_exchange`` and ``combine_exchange`` have all collectives,
    and run on the communication stream where a schedule overlaps them."""

    def dispatch_counts(self, routing: Routing) -> Carried:
        """What ``dispatch_prepare`` must know of the other ranks; None where sizes are known beforehand."""
        return None

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: Carried) -> Carried:
        """The rows as they will be sent."""
        raise NotImplementedError

    def dispatch_exchange(self, sent: Carried) -> Carried:
        """The rows as they were received."""
        raise NotImplementedError

    def dispatch_finish(self, received: Carried) -> ExpertInput:
        """The rows as the experts take them."""
        raise NotImplementedError

    def combine_prepare(self, expert_out_RL: Tensor, ticket: Carried) -> Tensor:
        """The experts' rows as they will be sent back."""
        return expert_out_RL

    def combine_exchange(self, rows_RL: Tensor, ticket: Carried) -> Tensor:
        """[N, L]: the rows as they came back."""
        raise NotImplementedError

    def combine_finish(self, rows_NL: Tensor, ticket: Carried) -> Tensor:
        """[t, L]: each token's expert outputs summed; the experts have already multiplied them by the probs."""
        return rows_NL

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        sent = self.dispatch_prepare(x_tL, routing, self.dispatch_counts(routing))
        received = self.dispatch_exchange(sent)
        # What was sent is freed before what was received is put in order.
        del sent
        return self.dispatch_finish(received)

    def combine(self, expert_out_RL: Tensor, ticket: Carried) -> Tensor:
        rows_RL = self.combine_prepare(expert_out_RL, ticket)
        return self.combine_finish(self.combine_exchange(rows_RL, ticket), ticket)


class RowCodecs(NamedTuple):
    """Of rows that go to experts: tokens, and gradients of expert outputs; None: as they are."""

    forward: NarrowRowCodec | None = None
    backward: NarrowRowCodec | None = None


AS_THEY_ARE = RowCodecs()


def row_codecs(run: RunConfig) -> RowCodecs:
    if run.precision.dispatch is None:
        return AS_THEY_ARE
    casts, quantizers = DISPATCH_CASTS[run.precision.dispatch], QUANTIZERS[run.kernels.casts]
    return RowCodecs(NarrowRowCodec(casts.forward, quantizers), NarrowRowCodec(casts.backward, quantizers))


# One deduplicated exchange: straight to the ranks, or across hosts first and then to the ranks inside a host.
ExchangeName = Literal["direct", "across", "inside"]


class ExchangedRows(NamedTuple):
    """Rows that leave for each rank of a deduplicated exchange, each once however many experts it has there; and from
    each source rank its rows, then its assignments to each expert at this end of the exchange."""

    leaving_W: Tensor
    arriving_WX: Tensor


class HostRows(NamedTuple):
    """The same on the host."""

    leaving: list[int]
    arriving: list[list[int]]


class SplitSizeSource(Protocol):
    """Counts on the host; each method is given the same counts on the device.

    A layer calls one of them once, with everything it needs: every call may wait for the device. A step asks for its
    ``overflow``, where it may have any.
    """

    def of_chunk(self, chunk: int, chunks: int) -> SplitSizeSource:
        """The same for one chunk of every rank's tokens (``parallel.exchange_chunks``)."""
        ...

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        """Rows of this rank's tokens for each expert."""
        ...

    def arriving(self, rows_from_We: Tensor) -> list[list[int]]:
        """Rows from each source rank for each expert of this rank."""
        ...

    def exchanged(self, rows_per_expert_E: Tensor, rows_from_We: Tensor) -> HostRows:
        """``leaving`` and ``arriving`` together."""
        ...

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        """Rows of all tokens of the expert block for each expert of this rank."""
        ...

    def tokens_and_gathered(self, tokens_of_W: Tensor, rows_per_expert_e: Tensor) -> tuple[list[int], list[int]]:
        """How many tokens each rank of the expert block holds, and ``gathered``."""
        ...

    def exchanged_once(self, exchanges: Mapping[ExchangeName, ExchangedRows]) -> dict[ExchangeName, HostRows]:
        """Of all deduplicated exchanges of a layer."""
        ...

    def cloned(self, expert_N: Tensor) -> list[int]:
        """The experts in the spare slots of all ranks; -1 for none."""
        ...

    def overflow(self, rows: Tensor) -> int:
        """Rows of a whole step that did not fit into buffers of a fixed size."""
        ...


class SyncSplitSizes:
    """Waits for the device and copies the counts, all of a layer in one copy."""

    def of_chunk(self, chunk: int, chunks: int) -> SyncSplitSizes:
        return self

    def leaving(self, rows_per_expert_E: Tensor) -> list[int]:
        return rows_per_expert_E.tolist()

    def arriving(self, rows_from_We: Tensor) -> list[list[int]]:
        return rows_from_We.tolist()

    def exchanged(self, rows_per_expert_E: Tensor, rows_from_We: Tensor) -> HostRows:
        leaving, arriving = read_together([rows_per_expert_E, rows_from_We])
        return HostRows(leaving, _rows_of(arriving, rows_from_We))

    def gathered(self, rows_per_expert_e: Tensor) -> list[int]:
        return rows_per_expert_e.tolist()

    def tokens_and_gathered(self, tokens_of_W: Tensor, rows_per_expert_e: Tensor) -> tuple[list[int], list[int]]:
        tokens, rows = read_together([tokens_of_W, rows_per_expert_e])
        return tokens, rows

    def exchanged_once(self, exchanges: Mapping[ExchangeName, ExchangedRows]) -> dict[ExchangeName, HostRows]:
        numbers = iter(read_together([tensor for exchanged in exchanges.values() for tensor in exchanged]))
        return {
            name: HostRows(next(numbers), _rows_of(next(numbers), exchanged.arriving_WX))
            for name, exchanged in exchanges.items()
        }

    def cloned(self, expert_N: Tensor) -> list[int]:
        return expert_N.tolist()

    def overflow(self, rows: Tensor) -> int:
        return int(rows)


def read_together(counts: Sequence[Tensor]) -> list[list[int]]:
    """Whole numbers of several tensors, flat, in one copy to the host."""
    numbers: list[int] = torch.cat([tensor.flatten() for tensor in counts]).tolist()
    ends = list(accumulate(tensor.numel() for tensor in counts))
    return [numbers[end - tensor.numel() : end] for end, tensor in zip(ends, counts, strict=True)]


def _rows_of(numbers: list[int], like_WX: Tensor) -> list[list[int]]:
    """The rows of a matrix from its flat list."""
    size = like_WX.shape[1]
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


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


class LocalDispatcher(Dispatcher):
    """With a ``capacity`` every expert computes exactly that many rows: shapes are known without a sync.

    Without one, ``read`` brings the number of rows per expert to the host.
    """

    def __init__(
        self,
        num_experts: int,
        capacity: int | None = None,
        read: Callable[[Tensor], list[int]] = SYNC_SPLIT_SIZES.leaving,
        codecs: RowCodecs = AS_THEY_ARE,
    ) -> None:
        self.num_experts = num_experts
        self.capacity = capacity
        self.read = read
        self.codecs = codecs

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: None) -> tuple[Tensor, Routing]:
        return round_rows(x_tL, self.codecs.forward, None), routing

    def dispatch_exchange(self, sent: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
        return sent

    def dispatch_finish(self, received: tuple[Tensor, Routing]) -> ExpertInput:
        x_tL, routing = received
        if self.capacity is not None:
            counts = even_counts(self.num_experts, self.capacity, x_tL)
            return ExpertInput(x_tL, routing, *counts, self.capacity, None)
        rows_per_expert_E = counts_of(routing, self.num_experts)
        return ExpertInput(x_tL, routing, rows_per_expert_E, self.read(rows_per_expert_E), None, None)

    def combine_exchange(self, expert_out_tL: Tensor, ticket: None) -> Tensor:
        return expert_out_tL

    def combine_finish(self, expert_out_tL: Tensor, ticket: None) -> Tensor:
        return round_rows(expert_out_tL, None, self.codecs.backward)


def round_rows(rows: Tensor, forward: NarrowRowCodec | None, backward: NarrowRowCodec | None) -> Tensor:
    """As if rows, and their gradients, had been sent by these codecs."""
    if forward is None and backward is None:
        return rows
    rounded: Tensor = _RoundRows.apply(rows, forward, backward)
    return rounded


class _Kept(Protocol):
    """What the backward pass needs."""

    grad_codec: NarrowRowCodec | None


class _RoundRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, rows: Tensor, forward: NarrowRowCodec | None, backward: NarrowRowCodec | None) -> Tensor:
        ctx.grad_codec = backward
        return rows.view_as(rows) if forward is None else forward.round(rows)

    @staticmethod
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.grad_codec is None else ctx.grad_codec.round(grad), None, None


def even_counts(num_experts: int, capacity: int, like: Tensor) -> tuple[Tensor, list[int]]:
    """The same number of rows for every expert, on the device and on the host."""
    return torch.full((num_experts,), capacity, device=like.device), [capacity] * num_experts
