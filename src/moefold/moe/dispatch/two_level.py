"""Rows cross to another host once and are distributed inside it: two exchanges, for slower links between hosts.

The ep group is seen as hosts of ``inside.size`` neighbouring ranks. First a row goes to every host that holds one of
its experts, to the rank there with the same number as its own: one row per token and host crosses, instead of one per
token and rank. Then it goes on to the ranks of that host that hold its experts. On the way back each host sums its
ranks' outputs before one row crosses back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dedup_permute import TokenRankMap
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, ExpertInput, Routing, SplitSizeSource
from moefold.moe.dispatch.dedup_exchange import DedupExchange, Splits


class _Ticket(NamedTuple):
    across: tuple[Splits, TokenRankMap]
    inside: tuple[Splits, TokenRankMap]


class TwoLevelDispatcher:
    """``across``: the ranks with this rank's number on every host; ``inside``: those of this host."""

    def __init__(
        self, num_experts: int, across: Group, inside: Group, etp: Group, host: SplitSizeSource = SYNC_SPLIT_SIZES
    ) -> None:
        # The shards of a split expert gather rows after the second exchange, not after the first.
        alone = replace(etp, ranks=(etp.ranks[etp.index],), index=0, handle=None)
        self.across = DedupExchange("across", num_experts, across, alone, host)
        self.inside = DedupExchange("inside", num_experts // across.size, inside, etp, host)

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        across = self.across.dispatch(x_tL, routing)
        inside = self.inside.dispatch(across.rows_RL, across.assignments)
        ticket = _Ticket((across.splits, across.token_rank_map), (inside.splits, inside.token_rank_map))
        return inside.expert_input(ticket)

    def combine(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.across.combine(self.inside.combine(expert_out_RL, *ticket.inside), *ticket.across)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> TwoLevelDispatcher:
    assert run.model.moe is not None
    levels = groups["ep_across"], groups["ep_inside"]
    return TwoLevelDispatcher(run.model.moe.num_experts, *levels, groups["etp"], host)
