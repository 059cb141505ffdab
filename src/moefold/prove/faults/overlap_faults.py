"""Faults of what runs beside an exchange: outputs lost or added twice, gradients that never arrive, parts and chunks in
another order, of rows on their way to experts and of tokens around matmuls of tensor and context parallelism.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

import moefold.moe.dispatch.all_to_all
import moefold.moe.exchange_beside
import moefold.parallel.ulysses
from moefold.comm.collectives import all_gather_replicated, reduce_scatter_rows
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.overlapped_layer import Overlapped, OverlappedSteps
from moefold.nn.batch import Batch
from moefold.nn.phase_autograd import Gradients, Recorded
from moefold.parallel.tensor_parallel import ChunkedTokenShards
from moefold.parallel.ulysses import UlyssesInChunks, document_order
from moefold.prove.faults.parallel_faults import put, wrap

Step = Callable[[OverlappedSteps, Overlapped, int], Overlapped]


def _scale_shared_output(times: float) -> None:
    def make(down: Step) -> Step:
        def scaled(self: OverlappedSteps, carry: Overlapped, chunk: int) -> Overlapped:
            carry = down(self, carry, chunk)
            assert carry.shared is not None
            return carry._replace(shared=times * carry.shared)

        return scaled

    wrap(OverlappedSteps, "_shared_down", make)


def shared_output_lost() -> None:
    _scale_shared_output(0)


def shared_output_added_twice() -> None:
    _scale_shared_output(2)


def shared_expert_runs_twice_in_backward() -> None:
    """Its output is right, and the gradient of its input is added once more."""

    def make(up: Step) -> Step:
        def once_more(self: OverlappedSteps, carry: Overlapped, chunk: int) -> Overlapped:
            twice = carry.x_tD + (carry.x_tD - carry.x_tD.detach())
            return up(self, carry._replace(x_tD=twice), chunk)._replace(x_tD=carry.x_tD)

        return once_more

    wrap(OverlappedSteps, "_shared_up", make)


def gradient_of_a_started_exchange_lost() -> None:
    """The communication stream's result is not waited for: what was sent has no gradient."""

    def make(backward: Callable[[Recorded, Gradients], Gradients]) -> Callable[[Recorded, Gradients], Gradients]:
        return lambda recorded, gradients: [None for _ in backward(recorded, gradients)]

    wrap(moefold.moe.exchange_beside, "backward_phase", make)


def combine_finished_before_its_exchange() -> None:
    """Each rank sums the rows that it was about to send back. Routing is balanced, so that there are as many."""
    put(AllToAllDispatcher, "combine_exchange", lambda self, rows_RL, ticket: rows_RL)


def overflow_of_rows_beside_lost() -> None:
    """Rows that did not fit are not reported, so the step does not run once more."""

    def make(end: Step) -> Step:
        return lambda self, carry, chunk: end(self, carry, chunk)._replace(report=carry.report)

    wrap(OverlappedSteps, "_end_dispatch", make)


def rows_sent_back_in_another_order() -> None:
    def make(by_source: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda rows_RL, on_host_We: by_source(rows_RL, on_host_We).flip(0)

    wrap(moefold.moe.dispatch.all_to_all, "by_source", make)


def chunks_put_together_in_reverse() -> None:
    put(OverlappedSteps, "outputs", lambda self, returned: torch.cat(returned.rows[::-1]))


def output_of_the_chunk_before() -> None:
    """All chunks have as many tokens, so that shapes do not tell."""
    put(OverlappedSteps, "outputs", lambda self, returned: torch.cat([returned.rows[0] for _ in returned.rows]))


def rows_of_a_chunk_overwritten_by_the_next() -> None:
    """The experts have computed the earlier chunk, and its backward has not read its rows yet."""

    def make(end: Step) -> Step:
        def into_the_same_buffer(self: OverlappedSteps, carry: Overlapped, chunk: int) -> Overlapped:
            carry = end(self, carry, chunk)
            rows = carry.rows[chunk].rows_RL.data
            if chunk:
                before = buffers.pop(id(self.overlap))
                count = min(len(before), len(rows))
                before[:count] = rows[:count]
            buffers[id(self.overlap)] = rows
            return carry

        return into_the_same_buffer

    buffers: dict[int, Tensor] = {}
    wrap(OverlappedSteps, "_end_dispatch", make)


def gradient_of_the_last_chunk_lost() -> None:
    """Of its tokens and of all weights, for what that chunk gave them."""

    def make(end: Step) -> Step:
        def detached(self: OverlappedSteps, carry: Overlapped, chunk: int) -> Overlapped:
            carry = end(self, carry, chunk)
            if chunk + 1 < len(carry.rows):
                return carry
            return carry._replace(rows=(*carry.rows[:-1], carry.rows[-1].detach()))

        return detached

    wrap(OverlappedSteps, "_end_combine", make)


def gradient_of_the_first_chunk_added_twice() -> None:
    """Outputs are right."""

    def make(experts: Step) -> Step:
        def twice(self: OverlappedSteps, carry: Overlapped, chunk: int) -> Overlapped:
            carry = experts(self, carry, chunk)
            if chunk:
                return carry
            out = carry.rows[0]
            return carry._replace(rows=(out + (out - out.detach()), *carry.rows[1:]))

        return twice

    wrap(OverlappedSteps, "_run_experts", make)


# ---- tensor parallelism in chunks ----


def tensor_chunks_in_the_order_of_arrival() -> None:
    """Attention takes the c-th part of every rank for tokens that follow each other."""
    put(ChunkedTokenShards, "join_chunks", lambda self, chunks: torch.cat(list(chunks)))


def tensor_chunks_summed_in_reverse() -> None:
    """The chunks are of one size, so that shapes do not tell."""

    def make(reduce_chunks: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def reversed_chunks(self: ChunkedTokenShards, partial_SD: Iterable[Tensor], batch: Batch) -> Tensor:
            return reduce_chunks(self, list(partial_SD)[::-1], batch)

        return reversed_chunks

    wrap(ChunkedTokenShards, "reduce_chunks", make)


def gathered_chunk_overwritten_by_the_next() -> None:
    """Its matmul has run forward; the gradient of the weight reads it later."""

    def make(gather_chunks: Callable[..., Iterator[tuple[Tensor, ...]]]) -> Callable[..., Iterator[tuple[Tensor, ...]]]:
        def into_one_buffer(self: ChunkedTokenShards, batch: Batch, *x_tX: Tensor) -> Iterator[tuple[Tensor, ...]]:
            before: Tensor | None = None
            for chunk in gather_chunks(self, batch, *x_tX):
                if before is not None:
                    count = min(len(before), len(chunk[0]))
                    before[:count] = chunk[0].data[:count]
                before = chunk[0].data
                yield chunk

        return into_one_buffer

    wrap(ChunkedTokenShards, "gather_chunks", make)


def tensor_chunks_summed_in_bfloat16() -> None:
    put(
        ChunkedTokenShards,
        "_reduce_one",
        lambda self, sizes, x_cD: reduce_scatter_rows(x_cD, sizes, self.beside_tp, torch.bfloat16),
    )


def gradients_of_gathered_chunks_not_summed() -> None:
    """Every rank keeps its own part of the gradient of its tokens."""
    put(
        ChunkedTokenShards,
        "_gather_one",
        lambda self, sizes, x_cX: all_gather_replicated(x_cX, sizes, self.beside_tp),
    )


# ---- all-to-alls of heads in chunks ----


def heads_of_chunks_in_the_order_of_ranks() -> None:
    """Rows are by chunk and then by rank; the permutation is the one of a single all-to-all."""
    put(
        moefold.parallel.ulysses,
        "chunk_order",
        lambda lengths, size, chunks: document_order(lengths, 0, size, size),
    )


def outputs_of_chunks_in_reverse() -> None:
    """The chunks are of one size, so that shapes do not tell."""

    def make(attend: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
        return lambda self, *heads: iter(list(attend(self, *heads))[::-1])

    wrap(UlyssesInChunks, "attend", make)


def output_of_a_chunk_overwritten_by_the_next() -> None:
    """Its projection has run forward; the gradient of the weight reads it later."""

    def make(attend: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
        def into_one_buffer(self: UlyssesInChunks, *heads: object) -> Iterator[Tensor]:
            before: Tensor | None = None
            for seen in attend(self, *heads):
                if before is not None:
                    count = min(len(before), len(seen))
                    before[:count] = seen.data[:count]
                before = seen.data
                yield seen

        return into_one_buffer

    wrap(UlyssesInChunks, "attend", make)


def gradients_of_sent_keys_lost() -> None:
    put(
        moefold.parallel.ulysses,
        "_to_heads",
        lambda exchange, qkv: exchange.tokens_to_heads(qkv[0], qkv[1].detach(), qkv[2]),
    )


# With the case that each is tried on, and how it happens in real code.
FAULTS: tuple[tuple[Callable[[], None], str, str], ...] = (
    (shared_output_lost, "shared beside", "an order leaves an operation's output behind"),
    (shared_output_added_twice, "shared beside", "an operation is in the order of both exchanges"),
    (shared_expert_runs_twice_in_backward, "shared beside", "an operation's backward is issued twice"),
    (gradient_of_a_started_exchange_lost, "shared beside", "the backward of an exchange is submitted and forgotten"),
    (combine_finished_before_its_exchange, "balanced rows beside", "finish does not wait for the exchange"),
    (overflow_of_rows_beside_lost, "bounded rows beside", "one order of a layer reports less than another"),
    (rows_sent_back_in_another_order, "shared beside", "rows return in another order than they were sent in"),
    (chunks_put_together_in_reverse, "chunks", "chunks are put together as they come back"),
    (output_of_the_chunk_before, "even chunks", "a chunk is waited for by the number of another"),
    (rows_of_a_chunk_overwritten_by_the_next, "chunks", "chunks take turns in one buffer that backward still needs"),
    (gradient_of_the_last_chunk_lost, "chunks beside", "the backward of the last exchange is never issued"),
    (tensor_chunks_in_the_order_of_arrival, "tensor in chunks", "gathered chunks are taken for tokens in their order"),
    (tensor_chunks_summed_in_reverse, "tensor in chunks of one size", "the last chunk is sent first"),
    (gathered_chunk_overwritten_by_the_next, "tensor in chunks", "chunks take turns in one buffer"),
    (tensor_chunks_summed_in_bfloat16, "tensor in chunks", "a sum of a chunk forgets its format"),
    (gradients_of_gathered_chunks_not_summed, "tensor in chunks", "a chunk's all_gather whose backward only slices"),
    (heads_of_chunks_in_the_order_of_ranks, "ulysses in chunks", "chunks are taken for one all-to-all"),
    (outputs_of_chunks_in_reverse, "ulysses in chunks of one size", "outputs are put together as they come back"),
    (output_of_a_chunk_overwritten_by_the_next, "ulysses in chunks", "chunks take turns in one buffer"),
    (gradients_of_sent_keys_lost, "ulysses in chunks", "keys are sent outside of the graph"),
    (gradient_of_the_first_chunk_added_twice, "chunks beside", "a chunk's gradient is in two sums over chunks"),
)
