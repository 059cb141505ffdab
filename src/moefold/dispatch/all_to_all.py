"""Rows travel straight to the rank that owns their expert, by one uneven all-to-all each way.

t tokens here, R rows computed here, E experts in all, e experts of this rank, S source ranks, D width.

Experts are split over the ep group in contiguous blocks, so rows sorted by expert are sorted by destination too. Where
an expert is itself split (etp > 1), the ranks that hold its parts first gather each other's arrivals, because every
part needs every row, and add their partial answers up on the way back. On arrival rows are ordered by expert, then by
the rank they came from, then as they were sent: a stable order, so the same routing gives the same bits.

With a ``capacity`` every rank sends exactly that many rows per expert, empty ones included. Then all counts are known
before anything is looked at, and nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.exchange import Sizes, exchange_counts, exchange_rows
from moefold.comm.gather import gather_plain, gather_rows, reduce_rows
from moefold.comm.group import Group
from moefold.dispatch.contract import Arrived, Routing
from moefold.dispatch.counts import READ_BACK, HostCounts
from moefold.dispatch.local import LocalDispatcher


class _Counts(NamedTuple):
    """How many rows travel: to and from each ep peer, to each etp peer, per (source, local expert), and in all."""

    send: Sizes
    recv: Sizes
    etp_sizes: Sizes
    rows_from_Se: Tensor
    rows_per_expert: list[int]


class _Ticket(NamedTuple):
    """The way home: undo the sort by expert, split with the etp peers, send back, add up per token."""

    arrival_of_row_R: Tensor
    counts: _Counts
    home: Any


class AllToAllDispatcher:
    """A sort at home, an exchange, and a sort on arrival."""

    def __init__(
        self, num_experts: int, ep: Group, etp: Group, capacity: int | None = None, host: HostCounts = READ_BACK
    ) -> None:
        self.home = LocalDispatcher(num_experts, capacity, host.leaving)
        self.num_local = num_experts // ep.size
        self.ep, self.etp, self.capacity, self.host = ep, etp, capacity, host

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        leaving = self.home.dispatch(x_tD, routing)
        counts = self._count(leaving) if self.capacity is None else self._constant_counts(leaving, self.capacity)
        rows_RD = self._send(leaving.rows_RD, counts)
        weight_R = self._send(leaving.weight_R, counts)
        order_R = _order_by_expert(counts.rows_from_Se, rows_RD.shape[0])
        return Arrived(
            rows_RD[order_R],
            weight_R[order_R],
            counts.rows_from_Se.sum(0),
            counts.rows_per_expert,
            _Ticket(order_R, counts, leaving.ticket),
        )

    def combine(self, rows_RD: Tensor, ticket: _Ticket) -> Tensor:
        counts = ticket.counts
        as_arrived_RD = torch.zeros_like(rows_RD).index_copy(0, ticket.arrival_of_row_R, rows_RD)
        mine = reduce_rows(as_arrived_RD, counts.etp_sizes, self.etp)
        back = exchange_rows(mine, send=counts.recv, recv=counts.send, group=self.ep)
        return self.home.combine(back, ticket.home)

    def _send(self, rows: Tensor, counts: _Counts) -> Tensor:
        here = exchange_rows(rows, send=counts.send, recv=counts.recv, group=self.ep)
        return gather_rows(here, counts.etp_sizes, self.etp)

    def _count(self, leaving: Arrived) -> _Counts:
        """Tell every peer what is coming; counts are read on the host here and nowhere else."""
        assert leaving.rows_per_expert is not None
        theirs_Pe = exchange_counts(leaving.rows_per_expert_e, self.ep).view(self.ep.size, self.num_local)
        rows_from_Se = gather_plain(theirs_Pe, (self.ep.size,) * self.etp.size, self.etp)
        send = _sum_runs(leaving.rows_per_expert, self.num_local)
        on_host_Se = self.host.arriving(rows_from_Se)
        from_source = [sum(rows) for rows in on_host_Se]
        # Sources stand etp peer by etp peer; what came to this rank itself is its own run of them.
        recv = tuple(from_source[self.etp.index * self.ep.size :][: self.ep.size])
        rows_per_expert = [sum(rows) for rows in zip(*on_host_Se, strict=True)]
        return _Counts(send, recv, _sum_runs(from_source, self.ep.size), rows_from_Se, rows_per_expert)

    def _constant_counts(self, leaving: Arrived, capacity: int) -> _Counts:
        even = (capacity * self.num_local,) * self.ep.size
        sources = self.ep.size * self.etp.size
        rows_from_Se = torch.full((sources, self.num_local), capacity, device=leaving.rows_RD.device)
        return _Counts(even, even, (sum(even),) * self.etp.size, rows_from_Se, [capacity * sources] * self.num_local)


def _sum_runs(counts: list[int], length: int) -> Sizes:
    return tuple(sum(counts[start : start + length]) for start in range(0, len(counts), length))


def _order_by_expert(rows_from_Se: Tensor, num_rows: int) -> Tensor:
    """Rows arrive grouped by source, then expert; return the stable order by expert."""
    num_sources, num_local = rows_from_Se.shape
    expert_of_run = torch.arange(num_local, device=rows_from_Se.device).repeat(num_sources)
    expert_R = expert_of_run.repeat_interleave(rows_from_Se.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True)
