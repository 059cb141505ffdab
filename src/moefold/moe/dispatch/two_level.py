"""Rows cross to another host once and are distributed inside it: two exchanges, for slower links between hosts.

The ep group is seen as hosts of ``inside.size`` neighbouring ranks. First a row goes to every host that holds one of
its experts, to the rank there with the same number as its own: one row per token and host crosses, instead of one per
token and rank. Then it goes on to the ranks of that host that hold its experts. On the way back each host sums its
ranks' outputs before one row crosses back. The counts of both exchanges are exchanged first, and read on the host once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dedup_permute import TokenRankMap, token_rank_mask
from moefold.moe.dispatch.base import (
    AS_THEY_ARE,
    SYNC_SPLIT_SIZES,
    ExchangedRows,
    ExchangeName,
    ExpertInput,
    Routing,
    RowCodecs,
    SplitSizeSource,
    counts_of,
    row_codecs,
)
from moefold.moe.dispatch.deduplicated import DedupExchange, Splits


class _Ticket(NamedTuple):
    across: tuple[Splits, TokenRankMap]
    inside: tuple[Splits, TokenRankMap]


class TwoLevelDispatcher:
    """``across``: the ranks with this rank's number on every host; ``inside``: those of this host."""

    def __init__(
        self,
        num_experts: int,
        across: Group,
        inside: Group,
        etp: Group,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
        codecs: RowCodecs = AS_THEY_ARE,
    ) -> None:
        # The shards of a split expert gather rows after the second exchange, not after the first.
        alone = replace(etp, ranks=(etp.ranks[etp.index],), index=0, handle=None)
        self.across = DedupExchange("across", num_experts, across, alone, codecs)
        self.inside = DedupExchange("inside", num_experts // across.size, inside, etp, codecs)
        self.num_experts, self.host = num_experts, host

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        across, inside = self.across, self.inside
        mask_tH, counts = self._exchange_counts(routing)
        on_host = self.host.exchanged_once(counts)
        crossed = across.dispatch(x_tL, routing, mask_tH, on_host["across"])
        mask_RW = inside.mask_of(crossed.assignments)
        received = inside.dispatch(crossed.rows_RL, crossed.assignments, mask_RW, on_host["inside"])
        ticket = _Ticket((crossed.splits, crossed.token_rank_map), (received.splits, received.token_rank_map))
        return received.expert_input(counts["inside"], on_host["inside"], ticket)

    def _exchange_counts(self, routing: Routing) -> tuple[Tensor, dict[ExchangeName, ExchangedRows]]:
        """Of both exchanges, before anything is read on the host.

        A rank tells every host how many of its tokens go to each rank there. The rank that receives them knows then how
        many rows it will pass on, before it has them. Also returned: whether a token goes to each host.
        """
        hosts, ranks = self.across.group.size, self.inside.group.size
        mask_tW = token_rank_mask(routing.experts // self.inside.num_local, routing.kept, hosts * ranks)
        mask_tH = mask_tW.view(-1, hosts, ranks).any(-1)
        per_expert_E = counts_of(routing, self.num_experts)
        across = self.across.exchange_counts(
            mask_tH.sum(0), mask_tW.sum(0).view(hosts, ranks), per_expert_E.view(hosts, -1)
        )
        _, passed_on_W, per_expert = across.arriving_WX.sum(0).split([1, ranks, self.inside.num_experts])
        inside = self.inside.exchange_counts(passed_on_W, per_expert.view(ranks, -1))
        # Of the first exchange the host needs the row counts only.
        return mask_tH, {"across": across._replace(arriving_WX=across.arriving_WX[:, :1]), "inside": inside}

    def combine(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.across.combine(self.inside.combine(expert_out_RL, *ticket.inside), *ticket.across)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> TwoLevelDispatcher:
    assert run.model.moe is not None
    levels = groups["ep_across"], groups["ep_inside"]
    return TwoLevelDispatcher(run.model.moe.num_experts, *levels, groups["etp"], host, row_codecs(run))
