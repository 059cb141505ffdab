"""A token's row goes once to every rank that owns an expert it chose; its answers are added up there.

t tokens here, S rows arriving here, D width.

A token with K choices meets fewer than K ranks when several of its experts live together, and then fewer rows travel
than with a row per choice, both ways. With one choice per token, or experts that all live apart, nothing is saved.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefold.comm.process_groups import Group
from moefold.moe.dedup_permute import TokenRankMap
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Arrived, Routing, SplitSizeSource
from moefold.moe.dispatch.dedup_exchange import DedupExchange, Splits


class _Ticket(NamedTuple):
    way: Splits
    pairs: TokenRankMap


class DeduplicatedDispatcher:
    """One hop over the ep group."""

    def __init__(self, num_experts: int, ep: Group, etp: Group, host: SplitSizeSource = SYNC_SPLIT_SIZES) -> None:
        self.hop = DedupExchange("direct", num_experts, ep, etp, host)

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        landed = self.hop.dispatch(x_tD, routing)
        ticket = _Ticket(landed.way, landed.pairs)
        return Arrived(landed.rows_SD, landed.choices, landed.chosen_e, landed.chosen, None, ticket)

    def combine(self, answers_SD: Tensor, ticket: _Ticket) -> Tensor:
        return self.hop.combine(answers_SD, ticket.way, ticket.pairs)
