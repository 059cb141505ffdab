"""Rows cross to another host once and are distributed inside it: two exchanges, for slower links between hosts.

The ep group is seen as hosts of ``inside.size`` neighbouring ranks. First a row goes to every host that holds one of
its experts, to the rank there with the same number as its own: one row per token and host crosses, instead of one per
token and rank. Then it goes on to the ranks of that host that hold its experts. On the way back each host sums its
ranks' outputs before one row crosses back. The counts of both exchanges are exchanged first, and read on the host once.
Between the two exchanges of a way rows are sorted, or summed, once more: this part of the local work stays between them
on the communication stream.
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
    Dispatcher,
    ExchangedRows,
    ExchangeName,
    ExpertInput,
    HostRows,
    Routing,
    RowCodecs,
    SplitSizeSource,
    counts_of,
    row_codecs,
)
from moefold.moe.dispatch.deduplicated import DedupExchange, Rows, Splits


class _Ticket(NamedTuple):
    across: tuple[Splits, TokenRankMap]
    inside: tuple[Splits, TokenRankMap]


class _Counts(NamedTuple):
    """``mask_tH``: whether a token goes to each host; ``inside``: counts of the second exchange."""

    mask_tH: Tensor
    inside: ExchangedRows
    on_host: dict[ExchangeName, HostRows]


class _InFlight(NamedTuple):
    """``crossed``: what the way back needs of the first exchange, once it is over."""

    rows: Rows
    counts: _Counts
    crossed: tuple[Splits, TokenRankMap] | None = None


class TwoLevelDispatcher(Dispatcher):
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

    def dispatch_counts(self, routing: Routing) -> _Counts:
        """Of both exchanges, before anything is read on the host.

        A rank tells every host how many of its tokens go to each rank there. The rank that receives them knows then how
        many rows it will pass on, before it has them.
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
        crossing = across._replace(arriving_WX=across.arriving_WX[:, :1])
        return _Counts(mask_tH, inside, self.host.exchanged_once({"across": crossing, "inside": inside}))

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: _Counts) -> _InFlight:
        return _InFlight(self.across.prepare(x_tL, routing, counts.mask_tH, counts.on_host["across"]), counts)

    def dispatch_exchange(self, sent: _InFlight) -> _InFlight:
        crossed, inside = self.across.finish(self.across.exchange(sent.rows)), self.inside
        mask_RW = inside.mask_of(crossed.assignments)
        rows = inside.prepare(crossed.rows_RL, crossed.assignments, mask_RW, sent.counts.on_host["inside"])
        return _InFlight(inside.exchange(rows), sent.counts, (crossed.splits, crossed.token_rank_map))

    def dispatch_finish(self, received: _InFlight) -> ExpertInput:
        rows, (_, counts, on_host) = self.inside.finish(received.rows), received.counts
        assert received.crossed is not None
        ticket = _Ticket(received.crossed, (rows.splits, rows.token_rank_map))
        return rows.expert_input(counts, on_host["inside"], ticket)

    def combine_exchange(self, rows_RL: Tensor, ticket: _Ticket) -> Tensor:
        (across, _), (inside, sent_inside) = ticket.across, ticket.inside
        on_host_RL = self.inside.finish_back(self.inside.exchange_back(rows_RL, inside), sent_inside)
        return self.across.exchange_back(on_host_RL, across)

    def combine_finish(self, rows_NL: Tensor, ticket: _Ticket) -> Tensor:
        _, sent = ticket.across
        return self.across.finish_back(rows_NL, sent)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> TwoLevelDispatcher:
    assert run.model.moe is not None
    levels = groups["ep_across"], groups["ep_inside"]
    return TwoLevelDispatcher(run.model.moe.num_experts, *levels, groups["etp"], host, row_codecs(run))
