"""One row per assignment travels to the rank that holds its expert, by one uneven all-to-all each way.

Experts are split over the ep group in contiguous blocks, so rows sorted by expert are sorted by destination too. Where
an expert is itself split (etp > 1), the ranks that hold its shards all-gather the rows they received, because every
shard needs every row, and reduce-scatter their partial outputs on the way back. Rows arrive by source rank, then by
expert, then as they were sent: a stable order, so the same routing gives the same bits. The host knows how many came
from each source for each expert, so they are put in the order of the experts by one copy of whole runs, and the experts
need not sort them.

Counts are exchanged once and read on the host once. With a ``capacity`` every rank sends exactly that many rows per
expert, padding included. Then all counts are known beforehand, and nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import (
    Sizes,
    all_gather_no_grad,
    all_gather_rows,
    all_to_all_counts,
    all_to_all_rows,
    reduce_scatter_rows,
)
from moefold.comm.message_codecs import RowCodec
from moefold.comm.process_groups import Group, Groups
from moefold.comm.sorted_exchange import from_experts, to_experts
from moefold.config.run import RunConfig
from moefold.moe.dedup_permute import (
    SendOrder,
    TokenRankMap,
    assignment_map,
    gather_assignments,
    gather_tokens,
    reduce_tokens,
    send_order,
)
from moefold.moe.dispatch.base import (
    AS_THEY_ARE,
    SYNC_SPLIT_SIZES,
    Dispatcher,
    ExpertInput,
    Routing,
    RowCodecs,
    SplitSizeSource,
    counts_of,
    padded_rows,
    row_codecs,
)
from moefold.moe.moe_kernels import region
from moefold.moe.permute import (
    by_expert,
    by_source,
    gather_probs,
    gather_rows,
    group_by_expert,
    group_padded,
    unpermute_rows,
)


class _Counts(NamedTuple):
    """Rows sent to and received from each ep peer, received by each etp peer, per local expert, per source and local
    expert."""

    send: Sizes
    recv: Sizes
    etp_sizes: Sizes
    rows_per_expert_e: Tensor
    on_host_We: list[list[int]]

    @property
    def rows_per_expert(self) -> list[int]:
        return [sum(rows) for rows in zip(*self.on_host_We, strict=True)]


class _Ticket(NamedTuple):
    """The way back: reduce-scatter to the etp peers, all-to-all to the ep peers, sum per token."""

    counts: _Counts
    # Of the rows that were sent, or None where padding is sent too.
    token_rank_map: TokenRankMap | None
    token_N: Tensor
    num_tokens: int
    # Rows were received by expert, and are sent back from there.
    sorted_here: bool = False


class _Rows(NamedTuple):
    """One row and one prob per assignment: by expert as sent, by source and then by expert as received, unless the
    exchange has sorted them."""

    rows_NL: Tensor
    prob_N: Tensor
    ticket: _Ticket


class AllToAllDispatcher(Dispatcher):
    """Sort by expert, then all-to-all."""

    def __init__(
        self,
        num_experts: int,
        ep: Group,
        etp: Group,
        capacity: int | None = None,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
        order: Callable[[Tensor, int], SendOrder] = send_order,
        codecs: RowCodecs = AS_THEY_ARE,
    ) -> None:
        """``order``: another implementation of ``send_order``, such as a compiled one."""
        self.order, self.codecs = order, codecs
        self.num_experts, self.num_local = num_experts, num_experts // ep.size
        self.ep, self.etp, self.capacity, self.host = ep, etp, capacity, host

    def dispatch_counts(self, routing: Routing) -> _Counts:
        """Exchange counts with all peers; they are read on the host here, all in one copy, and nowhere else."""
        if self.capacity is not None:
            return self._padded_counts(routing, self.capacity)
        leaving_E = counts_of(routing, self.num_experts)
        received_We = all_to_all_counts(leaving_E, self.ep).view(self.ep.size, self.num_local)
        rows_from_We = all_gather_no_grad(received_We, (self.ep.size,) * self.etp.size, self.etp)
        leaving, on_host_We = self.host.exchanged(leaving_E, rows_from_We)
        from_source = [sum(rows) for rows in on_host_We]
        # Sources are ordered etp peer by etp peer; what came to this rank itself is its own run of them.
        recv = tuple(from_source[self.etp.index * self.ep.size :][: self.ep.size])
        return _Counts(
            _sum_runs(leaving, self.num_local),
            recv,
            _sum_runs(from_source, self.ep.size),
            rows_from_We.sum(0),
            on_host_We,
        )

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: _Counts) -> _Rows:
        num_tokens = x_tL.shape[0]
        if self.capacity is not None:
            sent = group_padded(routing, self.num_experts, self.capacity)
            rows_NL, prob_N = gather_rows(x_tL, sent.token_N), gather_probs(routing.probs, sent.assignment_N)
            return _Rows(rows_NL, prob_N, _Ticket(counts, None, sent.token_N, num_tokens))
        assignment_N, token_rank_map = self._send_order(routing, counts)
        rows_NL = gather_tokens(x_tL, token_rank_map)
        prob_N = gather_assignments(routing.probs, assignment_N, token_rank_map)
        return _Rows(rows_NL, prob_N, _Ticket(counts, token_rank_map, token_rank_map.token_N, num_tokens))

    def dispatch_exchange(self, sent: _Rows) -> _Rows:
        rows_NL, prob_N, ticket = sent
        ticket = ticket._replace(sorted_here=self._sorts())
        rows_RL = self._send(rows_NL, ticket, self.codecs.forward)
        return _Rows(rows_RL, self._send(prob_N, ticket), ticket)

    def dispatch_finish(self, received: _Rows) -> ExpertInput:
        rows_RL, prob_R, ticket = received
        counts = ticket.counts
        if not ticket.sorted_here:
            rows_RL, prob_R = by_expert(rows_RL, counts.on_host_We), by_expert(prob_R, counts.on_host_We)
        # Expert e as often as it has rows.
        expert_R = torch.repeat_interleave(counts.rows_per_expert_e, output_size=rows_RL.shape[0])
        return ExpertInput(
            rows_RL,
            Routing(expert_R[:, None], prob_R[:, None]),
            counts.rows_per_expert_e,
            counts.rows_per_expert,
            None if self.capacity is None else counts.rows_per_expert[0],
            ticket,
            by_expert=True,
        )

    def combine_prepare(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        return expert_out_RL if ticket.sorted_here else by_source(expert_out_RL, ticket.counts.on_host_We)

    def combine_exchange(self, rows_RL: Tensor, ticket: _Ticket) -> Tensor:
        counts, codec = ticket.counts, self.codecs.backward
        if ticket.sorted_here:
            return from_experts(rows_RL, counts.on_host_We, counts.send, self.ep)
        own = reduce_scatter_rows(rows_RL, counts.etp_sizes, self.etp, grad_codec=codec)
        return all_to_all_rows(own, send=counts.recv, recv=counts.send, group=self.ep, grad_codec=codec)

    def combine_finish(self, rows_NL: Tensor, ticket: _Ticket) -> Tensor:
        if ticket.token_rank_map is not None:
            return reduce_tokens(rows_NL, ticket.token_rank_map)
        return unpermute_rows(rows_NL, ticket.token_N, ticket.num_tokens)

    def _sorts(self) -> bool:
        """Rows that are copied out of shared memory are put in the order of the experts by that copy."""
        narrow = self.codecs.forward is not None or self.codecs.backward is not None
        return self.etp.alone and not narrow and not self.ep.alone and self.ep.memory() is not None

    def _send(self, rows: Tensor, ticket: _Ticket, codec: RowCodec | None = None) -> Tensor:
        counts = ticket.counts
        if ticket.sorted_here:
            return to_experts(rows, counts.send, counts.on_host_We, self.ep)
        received = all_to_all_rows(rows, send=counts.send, recv=counts.recv, group=self.ep, codec=codec)
        return all_gather_rows(received, counts.etp_sizes, self.etp, codec=codec)

    def _send_order(self, routing: Routing, counts: _Counts) -> SendOrder:
        if routing.kept is None:
            return self.order(routing.experts, self.num_experts)
        num_tokens, top_k = routing.experts.shape
        assignment_N, token_N = group_by_expert(routing, self.num_experts, sum(counts.send))
        return SendOrder(assignment_N, assignment_map(assignment_N, num_tokens, top_k, token_N))

    def _padded_counts(self, routing: Routing, capacity: int) -> _Counts:
        even = (capacity * self.num_local,) * self.ep.size
        sources = self.ep.size * self.etp.size
        rows_e = torch.full((self.num_local,), capacity * sources, device=routing.experts.device)
        return _Counts(even, even, (sum(even),) * self.etp.size, rows_e, [[capacity] * self.num_local] * sources)


def _sum_runs(counts: list[int], length: int) -> Sizes:
    return tuple(sum(counts[start : start + length]) for start in range(0, len(counts), length))


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> AllToAllDispatcher:
    assert run.model.moe is not None
    return AllToAllDispatcher(
        run.model.moe.num_experts,
        groups["ep"],
        groups["etp"],
        padded_rows(run, groups.layout.size("dp")),
        host,
        region(send_order) if run.kernels.compile == "regions" else send_order,
        row_codecs(run),
    )
