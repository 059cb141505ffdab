"""All-to-all, with the rows of every expert rounded up to a multiple, so that grouped GEMMs see aligned sizes.

Low-precision grouped GEMMs need each expert's rows in blocks of 16 or 32. Rows travel exactly as with ``all_to_all``;
the receiving rank puts zero rows with prob 0 behind each expert's rows, as many as its count lacks to the next multiple
(``parallel.row_multiple``), and cuts their outputs out before rows travel back. An expert without rows stays without.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch import all_to_all
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.base import Carried, Dispatcher, ExpertInput, Routing, SplitSizeSource
from moefold.ops.padded_runs import aligned


class _Ticket(NamedTuple):
    """``rows`` and ``padded``: of each expert, as received and with padding."""

    inner: Carried
    rows: list[int]
    padded: list[int]


class AlignedAllToAllDispatcher(Dispatcher):
    def __init__(self, inner: AllToAllDispatcher, multiple: int) -> None:
        self.inner, self.multiple = inner, multiple

    def dispatch_counts(self, routing: Routing) -> Carried:
        return self.inner.dispatch_counts(routing)

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: Carried) -> Carried:
        return self.inner.dispatch_prepare(x_tL, routing, counts)

    def dispatch_exchange(self, sent: Carried) -> Carried:
        return self.inner.dispatch_exchange(sent)

    def dispatch_finish(self, received: Carried) -> ExpertInput:
        expert_in = self.inner.dispatch_finish(received)
        rows = expert_in.host_rows
        padded = aligned(rows, self.multiple)
        missing_e = -expert_in.rows_per_expert_e % self.multiple
        aligned_e = expert_in.rows_per_expert_e + missing_e
        expert_R = torch.repeat_interleave(aligned_e, output_size=sum(padded))
        prob_R = _pad_runs(expert_in.assignments.probs, rows, padded)
        return expert_in._replace(
            rows_RL=_pad_runs(expert_in.rows_RL, rows, padded),
            assignments=Routing(expert_R[:, None], prob_R),
            rows_per_expert_e=aligned_e,
            rows_per_expert=padded,
            capacity=None if expert_in.capacity is None else padded[0],
            ticket=_Ticket(expert_in.ticket, rows, padded),
        )

    def combine_prepare(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.inner.combine_prepare(_cut_runs(expert_out_RL, ticket.rows, ticket.padded), ticket.inner)

    def combine_exchange(self, rows_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.inner.combine_exchange(rows_RL, ticket.inner)

    def combine_finish(self, rows_NL: Tensor, ticket: _Ticket) -> Tensor:
        return self.inner.combine_finish(rows_NL, ticket.inner)


def _pad_runs(rows: Tensor, sizes: list[int], padded: list[int]) -> Tensor:
    """Zero rows behind the run of each expert, up to its padded size."""
    if sizes == padded:
        return rows
    zeros = rows.new_zeros(max(more - size for size, more in zip(sizes, padded, strict=True)), *rows.shape[1:])
    runs = zip(rows.split(sizes), sizes, padded, strict=True)
    return torch.cat([part for run, size, more in runs for part in (run, zeros[: more - size])])


def _cut_runs(rows: Tensor, sizes: list[int], padded: list[int]) -> Tensor:
    """The way back of ``_pad_runs``."""
    if sizes == padded:
        return rows
    return torch.cat([run[:size] for run, size in zip(rows.split(padded), sizes, strict=True)])


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> AlignedAllToAllDispatcher:
    return AlignedAllToAllDispatcher(all_to_all.build(run, groups, host), run.parallel.row_multiple)
