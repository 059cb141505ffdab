"""Rows cross to another host once, and spread there: two hops for clusters whose hosts are joined by slower links.

t tokens here, S rows arriving here, D width.

The ep group is seen as hosts of ``inside.size`` neighbours. First a row goes to every host that has an expert it
chose, to the rank there with the same number as its own: one row per token and host crosses, where one per token and
rank would. Then it goes on to the ranks of that host that own its choices. On the way home each host adds its ranks'
answers up before one row crosses back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from moefold.comm.process_groups import Group
from moefold.moe.dedup_permute import TokenRankMap
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Arrived, Routing, SplitSizeSource
from moefold.moe.dispatch.dedup_exchange import DedupExchange, Splits


class _Ticket(NamedTuple):
    across: tuple[Splits, TokenRankMap]
    inside: tuple[Splits, TokenRankMap]


class TwoLevelDispatcher:
    """``across``: the ranks with this rank's number on every host; ``inside``: those of this host."""

    def __init__(
        self, num_experts: int, across: Group, inside: Group, etp: Group, host: SplitSizeSource = SYNC_SPLIT_SIZES
    ) -> None:
        # Parts of an expert need its rows at the end of their way, not on it.
        nobody = replace(etp, ranks=(etp.ranks[etp.index],), index=0, handle=None)
        self.across = DedupExchange("across", num_experts, across, nobody, host)
        self.inside = DedupExchange("inside", num_experts // across.size, inside, etp, host)

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        host = self.across.dispatch(x_tD, routing)
        landed = self.inside.dispatch(host.rows_SD, host.choices)
        ticket = _Ticket((host.way, host.pairs), (landed.way, landed.pairs))
        return Arrived(landed.rows_SD, landed.choices, landed.chosen_e, landed.chosen, None, ticket)

    def combine(self, answers_SD: Tensor, ticket: _Ticket) -> Tensor:
        return self.across.combine(self.inside.combine(answers_SD, *ticket.inside), *ticket.across)
