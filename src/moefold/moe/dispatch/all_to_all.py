"""A row per choice travels straight to the rank that owns its expert, by one uneven all-to-all each way.

t tokens here, N rows leaving, S rows arriving here, E experts in all, e experts of this rank, P source ranks, D width.

Experts are split over the ep group in contiguous blocks, so rows sorted by expert are sorted by destination too. Where
an expert is itself split (etp > 1), the ranks that hold its parts first gather each other's arrivals, because every
part needs every row, and add their partial answers up on the way back. Rows arrive by source, then by expert, then as
they were sent: a stable order, so the same routing gives the same bits.

With a ``capacity`` every rank sends exactly that many rows per expert, empty ones included. Then all counts are known
before anything is looked at, and nothing here waits for the device.
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
from moefold.comm.process_groups import Group
from moefold.moe.dedup_permute import TokenRankMap, gather_tokens, reduce_tokens, token_rank_map_of_assignments
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Arrived, Routing, SplitSizeSource
from moefold.moe.permute import (
    Grouped,
    count_choices,
    group_by_expert,
    group_padded,
    put_back,
    take_rows,
    take_weights,
)


class _Counts(NamedTuple):
    """How many rows travel: to and from each ep peer, to each etp peer, per (source, local expert), and in all."""

    send: Sizes
    recv: Sizes
    etp_sizes: Sizes
    rows_from_Pe: Tensor
    rows_per_expert: list[int]


class _Ticket(NamedTuple):
    """The way home: split with the etp peers, send back, add up per token."""

    counts: _Counts
    # Of the rows that are there, or None where empty ones travel too.
    pairs: TokenRankMap | None
    token_N: Tensor
    num_tokens: int


class AllToAllDispatcher:
    """A sort at home and an exchange."""

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

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        padded = self.capacity is not None
        leaving, counts = self._sort(routing) if self.capacity is None else self._sort_padded(routing, self.capacity)
        pairs = None if padded else token_rank_map_of_assignments(leaving.choice_N, *routing.expert_tK.shape)
        rows_ND = take_rows(x_tD, leaving.token_N) if pairs is None else gather_tokens(x_tD, pairs)
        rows_SD = self._send(rows_ND, counts)
        weight_S = self._send(take_weights(routing.weight_tK, leaving.choice_N, padded), counts)
        expert_S = _expert_of_rows(counts.rows_from_Pe, rows_SD.shape[0])
        return Arrived(
            rows_SD,
            Routing(expert_S[:, None], weight_S[:, None]),
            counts.rows_from_Pe.sum(0),
            counts.rows_per_expert,
            None if self.capacity is None else counts.rows_per_expert[0],
            _Ticket(counts, pairs, leaving.token_N, x_tD.shape[0]),
        )

    def combine(self, answers_SD: Tensor, ticket: _Ticket) -> Tensor:
        counts = ticket.counts
        mine = reduce_scatter_rows(answers_SD, counts.etp_sizes, self.etp)
        back_ND = all_to_all_rows(mine, send=counts.recv, recv=counts.send, group=self.ep)
        if ticket.pairs is not None:
            return reduce_tokens(back_ND, ticket.pairs)
        return put_back(back_ND, ticket.token_N, ticket.num_tokens)

    def _send(self, rows: Tensor, counts: _Counts) -> Tensor:
        here = all_to_all_rows(rows, send=counts.send, recv=counts.recv, group=self.ep)
        return all_gather_rows(here, counts.etp_sizes, self.etp)

    def _sort(self, routing: Routing) -> tuple[Grouped, _Counts]:
        """Tell every peer what is coming; counts are read on the host here and nowhere else."""
        leaving_E = count_choices(routing, self.num_experts)
        leaving = self.host.leaving(leaving_E)
        theirs_Pe = all_to_all_counts(leaving_E, self.ep).view(self.ep.size, self.num_local)
        rows_from_Pe = all_gather_no_grad(theirs_Pe, (self.ep.size,) * self.etp.size, self.etp)
        on_host_Pe = self.host.arriving(rows_from_Pe)
        from_source = [sum(rows) for rows in on_host_Pe]
        # Sources stand etp peer by etp peer; what came to this rank itself is its own run of them.
        recv = tuple(from_source[self.etp.index * self.ep.size :][: self.ep.size])
        rows_per_expert = [sum(rows) for rows in zip(*on_host_Pe, strict=True)]
        counts = _Counts(
            _sum_runs(leaving, self.num_local),
            recv,
            _sum_runs(from_source, self.ep.size),
            rows_from_Pe,
            rows_per_expert,
        )
        return group_by_expert(routing, self.num_experts, sum(leaving)), counts

    def _sort_padded(self, routing: Routing, capacity: int) -> tuple[Grouped, _Counts]:
        even = (capacity * self.num_local,) * self.ep.size
        sources = self.ep.size * self.etp.size
        rows_from_Pe = torch.full((sources, self.num_local), capacity, device=routing.expert_tK.device)
        counts = _Counts(even, even, (sum(even),) * self.etp.size, rows_from_Pe, [capacity * sources] * self.num_local)
        return group_padded(routing, self.num_experts, capacity), counts


def _sum_runs(counts: list[int], length: int) -> Sizes:
    return tuple(sum(counts[start : start + length]) for start in range(0, len(counts), length))


def _expert_of_rows(rows_from_Pe: Tensor, num_rows: int) -> Tensor:
    """Rows arrive grouped by source, then expert."""
    num_sources, num_local = rows_from_Pe.shape
    expert_of_run = torch.arange(num_local, device=rows_from_Pe.device).repeat(num_sources)
    return expert_of_run.repeat_interleave(rows_from_Pe.flatten(), output_size=num_rows)
