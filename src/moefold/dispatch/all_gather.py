"""Every rank of the block sees all tokens of the block and picks those its experts were chosen for.

t tokens here, N tokens of the block, K choices per token, R rows computed here, D width.

The block is the ep x etp ranks that together hold every expert once. Gathering moves more bytes than sending rows where
they are wanted, unless a token has many choices (K near ep); it needs no exchange of counts, and adding the
answers up on the way home serves split experts (etp > 1) and chosen experts alike.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moefold.comm.gather import Sizes, gather_plain, gather_rows, reduce_rows
from moefold.comm.group import Group
from moefold.dispatch.contract import Arrived, Routing
from moefold.dispatch.local import LocalDispatcher


class AllGatherDispatcher:
    """``tokens_of_rank`` says how many tokens each rank of the block holds."""

    def __init__(
        self, num_experts: int, block: Group, etp_size: int, tokens_of_rank: Sizes, capacity: int | None = None
    ) -> None:
        self.block, self.sizes = block, tokens_of_rank
        self.num_local = num_experts * etp_size // block.size
        # etp varies fastest inside the block.
        self.first_expert = (block.index // etp_size) * self.num_local
        # What one rank may send to an expert, all of them may.
        self.here = LocalDispatcher(self.num_local, None if capacity is None else capacity * block.size)

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        x_ND = gather_rows(x_tD, self.sizes, self.block)
        return self.here.dispatch(x_ND, self._choices_of_block(routing))

    def combine(self, rows_RD: Tensor, ticket: Any) -> Tensor:
        partial_ND = self.here.combine(rows_RD, ticket)
        return reduce_rows(partial_ND, self.sizes, self.block)

    def _choices_of_block(self, routing: Routing) -> Routing:
        """Everyone's choices, renumbered to the experts of this rank; others' experts count as dropped."""
        weight_NK = gather_rows(routing.weight_tK, self.sizes, self.block)
        expert_NK = gather_plain(routing.expert_tK, self.sizes, self.block) - self.first_expert
        kept_NK = (expert_NK >= 0) & (expert_NK < self.num_local)
        if routing.kept_tK is not None:
            # Booleans travel as bytes: not every transport knows them.
            kept_NK &= gather_plain(routing.kept_tK.byte(), self.sizes, self.block).bool()
        return Routing(expert_NK, weight_NK, kept_NK)
