"""All-to-all, with the rows of every expert rounded up to a multiple, so that grouped GEMMs see aligned sizes.

Low-precision grouped GEMMs need each expert's rows in blocks of 16 or 32. Rows travel exactly as with ``all_to_all``;
the receiving rank appends zero rows with prob 0, as many per expert as its count lacks to the next multiple
(``parallel.row_multiple``), and cuts their outputs off before rows travel back. An expert without rows stays without.
With a capacity the experts pad by themselves, so only the capacity is rounded up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch import all_to_all
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.base import ExpertInput, Routing, SplitSizeSource


class _Ticket(NamedTuple):
    inner: Any
    num_rows: int


class AlignedAllToAllDispatcher:
    def __init__(self, inner: AllToAllDispatcher, multiple: int) -> None:
        self.inner, self.multiple = inner, multiple

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        expert_in = self.inner.dispatch(x_tL, routing)
        aligned = [-(-rows // self.multiple) * self.multiple for rows in expert_in.rows_per_expert]
        missing_e = -expert_in.rows_per_expert_e % self.multiple
        expert_in = expert_in._replace(
            rows_per_expert_e=expert_in.rows_per_expert_e + missing_e,
            ticket=_Ticket(expert_in.ticket, expert_in.rows_RL.shape[0]),
        )
        if expert_in.capacity is not None:
            return expert_in._replace(rows_per_expert=aligned, capacity=aligned[0])
        num_padding = sum(aligned) - sum(expert_in.rows_per_expert)
        return _append_rows(expert_in, missing_e, num_padding)._replace(rows_per_expert=aligned)

    def combine(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.inner.combine(expert_out_RL[: ticket.num_rows], ticket.inner)


def _append_rows(expert_in: ExpertInput, missing_e: Tensor, num_padding: int) -> ExpertInput:
    """Zero rows with prob 0, ``missing_e`` of them for each expert; their number is known, so nothing is read back."""
    rows_RL, (experts, probs, _) = expert_in.rows_RL, expert_in.assignments
    local_experts = torch.arange(missing_e.shape[0], device=missing_e.device)
    expert_N = local_experts.repeat_interleave(missing_e, output_size=num_padding)
    return expert_in._replace(
        rows_RL=torch.cat([rows_RL, rows_RL.new_zeros(num_padding, rows_RL.shape[1])]),
        assignments=Routing(
            torch.cat([experts, expert_N[:, None]]), torch.cat([probs, probs.new_zeros(num_padding, 1)])
        ),
    )


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> AlignedAllToAllDispatcher:
    return AlignedAllToAllDispatcher(all_to_all.build(run, groups, host), run.parallel.row_multiple)
