"""Every rank of the block sees all tokens of the block and picks those its experts were chosen for.

t tokens here, N tokens of the block, K choices per token, D width.

The block is the ep x etp ranks that together hold every expert once. Gathering moves more bytes than sending rows where
they are wanted, unless a token has many choices (K near ep); it needs no exchange of counts, and adding the
answers up on the way home serves split experts (etp > 1) and chosen experts alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import Sizes, all_gather_no_grad, all_gather_rows, reduce_scatter_rows
from moefold.comm.process_groups import Group
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Arrived, Routing, SplitSizeSource
from moefold.moe.dispatch.local import LocalDispatcher


class AllGatherDispatcher:
    """``tokens_of_rank`` is how many tokens each rank of the block holds; None where that changes and must be asked."""

    def __init__(
        self,
        num_experts: int,
        block: Group,
        etp_size: int,
        tokens_of_rank: Sizes | None,
        capacity: int | None = None,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
    ) -> None:
        self.block, self.tokens_of_rank, self.host = block, tokens_of_rank, host
        self.num_local = num_experts * etp_size // block.size
        # etp varies fastest inside the block.
        self.first_expert = (block.index // etp_size) * self.num_local
        # What one rank may send to an expert, all of them may.
        slots = None if capacity is None else capacity * block.size
        self.here = LocalDispatcher(self.num_local, slots, host.gathered)

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Arrived:
        sizes = self._ask(x_tD) if self.tokens_of_rank is None else self.tokens_of_rank
        x_ND = all_gather_rows(x_tD, sizes, self.block)
        arrived = self.here.dispatch(x_ND, self._choices_of_block(routing, sizes))
        return arrived._replace(ticket=sizes)

    def combine(self, answers_ND: Tensor, ticket: Sizes) -> Tensor:
        return reduce_scatter_rows(answers_ND, ticket, self.block)

    def _ask(self, x_tD: Tensor) -> Sizes:
        mine = torch.tensor([x_tD.shape[0]], device=x_tD.device)
        return tuple(self.host.tokens(all_gather_no_grad(mine, (1,) * self.block.size, self.block)))

    def _choices_of_block(self, routing: Routing, sizes: Sizes) -> Routing:
        """Everyone's choices, renumbered to the experts of this rank; others' experts count as dropped."""
        weight_NK = all_gather_rows(routing.weight_tK, sizes, self.block)
        expert_NK = all_gather_no_grad(routing.expert_tK, sizes, self.block) - self.first_expert
        kept_NK = (expert_NK >= 0) & (expert_NK < self.num_local)
        if routing.kept_tK is not None:
            # Booleans travel as bytes: not every transport knows them.
            kept_NK &= all_gather_no_grad(routing.kept_tK.byte(), sizes, self.block).bool()
        return Routing(expert_NK, weight_NK, kept_NK)
