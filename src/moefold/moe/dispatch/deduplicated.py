"""A token's row travels once to every rank that holds one of its experts, and the outputs are summed there.

With K experts per token a token has fewer than K destination ranks when several of its experts share one, and then
fewer rows travel than with one row per assignment, both ways. With top-1 routing, or with experts on K different
ranks, nothing is saved.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dedup_permute import TokenRankMap
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, ExpertInput, Routing, SplitSizeSource, counts_of
from moefold.moe.dispatch.dedup_exchange import DedupExchange, Splits


class _Ticket(NamedTuple):
    splits: Splits
    token_rank_map: TokenRankMap


class DeduplicatedDispatcher:
    """One exchange over the ep group."""

    def __init__(self, num_experts: int, ep: Group, etp: Group, host: SplitSizeSource = SYNC_SPLIT_SIZES) -> None:
        self.exchange, self.host = DedupExchange("direct", num_experts, ep, etp), host

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        exchange, mask_tW = self.exchange, self.exchange.mask_of(routing)
        per_expert_We = counts_of(routing, exchange.num_experts).view(exchange.group.size, exchange.num_local)
        counts = exchange.exchange_counts(mask_tW.sum(0), per_expert_We)
        on_host = self.host.exchanged_once({"direct": counts})["direct"]
        received = exchange.dispatch(x_tL, routing, mask_tW, on_host)
        return received.expert_input(counts, on_host, _Ticket(received.splits, received.token_rank_map))

    def combine(self, expert_out_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.exchange.combine(expert_out_RL, ticket.splits, ticket.token_rank_map)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> DeduplicatedDispatcher:
    assert run.model.moe is not None
    return DeduplicatedDispatcher(run.model.moe.num_experts, groups["ep"], groups["etp"], host)
