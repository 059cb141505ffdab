"""One row per assignment travels to the rank that holds its expert, by one uneven all-to-all each way.

Experts are split over the ep group in contiguous blocks, so rows sorted by expert are sorted by destination too. Where
an expert is itself split (etp > 1), the ranks that hold its shards all-gather the rows they received, because every
shard needs every row, and reduce-scatter their partial outputs on the way back. Rows arrive by source rank, then by
expert, then as they were sent: a stable order, so the same routing gives the same bits.

With a ``capacity`` every rank sends exactly that many rows per expert, padding included. Then all counts are known
beforehand, and nothing here waits for the device.
"""

from __future__ import annotations

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
from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dedup_permute import TokenRankMap, assignment_map, gather_tokens, reduce_tokens
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, ExpertInput, Routing, SplitSizeSource, padded_rows
from moefold.moe.permute import (
    Grouped,
    count_assignments,
    gather_probs,
    gather_rows,
    group_by_expert,
    group_padded,
    unpermute_rows,
)


class _Counts(NamedTuple):
    """Rows sent to and received from each ep peer, received by each etp peer, per (source, local expert), in all."""

    send: Sizes
    recv: Sizes
    etp_sizes: Sizes
    rows_from_We: Tensor
    rows_per_expert: list[int]


class _Ticket(NamedTuple):
    """The way back: reduce-scatter to the etp peers, all-to-all to the ep peers, sum per token."""

    counts: _Counts
    # Of the rows that were sent, or None where padding is sent too.
    token_rank_map: TokenRankMap | None
    token_N: Tensor
    num_tokens: int


class AllToAllDispatcher:
    """Sort by expert, then all-to-all."""

    def __init__(
        self,
        num_experts: int,
        ep: Group,
        etp: Group,
        capacity: int | None = None,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
    ) -> None:
        self.num_experts, self.num_local = num_experts, num_experts // ep.size
        self.ep, self.etp, self.capacity, self.host = ep, etp, capacity, host

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        padded = self.capacity is not None
        sent, counts = self._sort(routing) if self.capacity is None else self._sort_padded(routing, self.capacity)
        token_rank_map = None if padded else assignment_map(sent.assignment_N, *routing.experts.shape)
        rows_NL = gather_rows(x_tL, sent.token_N) if token_rank_map is None else gather_tokens(x_tL, token_rank_map)
        rows_RL = self._send(rows_NL, counts)
        prob_R = self._send(gather_probs(routing.probs, sent.assignment_N, padded), counts)
        expert_R = _expert_of_rows(counts.rows_from_We, rows_RL.shape[0])
        return ExpertInput(
            rows_RL,
            Routing(expert_R[:, None], prob_R[:, None]),
            counts.rows_from_We.sum(0),
            counts.rows_per_expert,
            None if self.capacity is None else counts.rows_per_expert[0],
            _Ticket(counts, token_rank_map, sent.token_N, x_tL.shape[0]),
        )

    def combine(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        counts = ticket.counts
        own = reduce_scatter_rows(expert_out_RL, counts.etp_sizes, self.etp)
        rows_NL = all_to_all_rows(own, send=counts.recv, recv=counts.send, group=self.ep)
        if ticket.token_rank_map is not None:
            return reduce_tokens(rows_NL, ticket.token_rank_map)
        return unpermute_rows(rows_NL, ticket.token_N, ticket.num_tokens)

    def _send(self, rows: Tensor, counts: _Counts) -> Tensor:
        received = all_to_all_rows(rows, send=counts.send, recv=counts.recv, group=self.ep)
        return all_gather_rows(received, counts.etp_sizes, self.etp)

    def _sort(self, routing: Routing) -> tuple[Grouped, _Counts]:
        """Exchange counts with all peers; they are read on the host here and nowhere else."""
        leaving_E = count_assignments(routing, self.num_experts)
        leaving = self.host.leaving(leaving_E)
        received_We = all_to_all_counts(leaving_E, self.ep).view(self.ep.size, self.num_local)
        rows_from_We = all_gather_no_grad(received_We, (self.ep.size,) * self.etp.size, self.etp)
        on_host_We = self.host.arriving(rows_from_We)
        from_source = [sum(rows) for rows in on_host_We]
        # Sources are ordered etp peer by etp peer; what came to this rank itself is its own run of them.
        recv = tuple(from_source[self.etp.index * self.ep.size :][: self.ep.size])
        rows_per_expert = [sum(rows) for rows in zip(*on_host_We, strict=True)]
        counts = _Counts(
            _sum_runs(leaving, self.num_local),
            recv,
            _sum_runs(from_source, self.ep.size),
            rows_from_We,
            rows_per_expert,
        )
        return group_by_expert(routing, self.num_experts, sum(leaving)), counts

    def _sort_padded(self, routing: Routing, capacity: int) -> tuple[Grouped, _Counts]:
        even = (capacity * self.num_local,) * self.ep.size
        sources = self.ep.size * self.etp.size
        rows_from_We = torch.full((sources, self.num_local), capacity, device=routing.experts.device)
        counts = _Counts(even, even, (sum(even),) * self.etp.size, rows_from_We, [capacity * sources] * self.num_local)
        return group_padded(routing, self.num_experts, capacity), counts


def _sum_runs(counts: list[int], length: int) -> Sizes:
    return tuple(sum(counts[start : start + length]) for start in range(0, len(counts), length))


def _expert_of_rows(rows_from_We: Tensor, num_rows: int) -> Tensor:
    """Rows arrive grouped by source, then by expert."""
    num_sources, num_local = rows_from_We.shape
    expert_of_run = torch.arange(num_local, device=rows_from_We.device).repeat(num_sources)
    return expert_of_run.repeat_interleave(rows_from_We.flatten(), output_size=num_rows)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> AllToAllDispatcher:
    assert run.model.moe is not None
    return AllToAllDispatcher(
        run.model.moe.num_experts, groups["ep"], groups["etp"], padded_rows(run, groups.layout.size("dp")), host
    )
