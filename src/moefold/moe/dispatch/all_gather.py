"""Every rank of the expert block gathers all tokens of the block and takes those routed to its own experts.

The expert block is the ep x etp ranks that together hold every expert once. Gathering moves more bytes than sending
rows where they are needed, unless tokens have many experts (K near ep). In return it needs no exchange of counts, and
one reduce-scatter on the way back sums over a token's experts and over the shards of split experts (etp > 1) alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import Sizes, all_gather_no_grad, all_gather_rows, reduce_scatter_rows
from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import (
    AS_THEY_ARE,
    SYNC_SPLIT_SIZES,
    ExpertInput,
    LocalDispatcher,
    Routing,
    RowCodecs,
    SplitSizeSource,
    counts_of,
    padded_rows,
    row_codecs,
    shapes_are_fixed,
    tokens_by_shard,
)
from moefold.moe.dispatch.padded_routing import num_pad_tokens, routed_multiple


class AllGatherDispatcher:
    """``tokens_of_rank``: tokens of each rank of the block; None where they change and must be exchanged."""

    def __init__(
        self,
        num_experts: int,
        block: Group,
        etp_size: int,
        tokens_of_rank: Sizes | None,
        capacity: int | None = None,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
        codecs: RowCodecs = AS_THEY_ARE,
    ) -> None:
        self.codecs = codecs
        self.block, self.tokens_of_rank, self.host = block, tokens_of_rank, host
        self.num_experts, self.num_local = num_experts, num_experts * etp_size // block.size
        # etp varies fastest inside the block.
        self.first_expert = (block.index // etp_size) * self.num_local
        # Every rank of the block may send ``capacity`` rows to an expert.
        self.local = LocalDispatcher(self.num_local, None if capacity is None else capacity * block.size, host.gathered)

    def dispatch(self, x_tL: Tensor, routing: Routing) -> ExpertInput:
        if self.tokens_of_rank is not None:
            x_RL = all_gather_rows(x_tL, self.tokens_of_rank, self.block, codec=self.codecs.forward)
            gathered = self._gather_routing(routing, self.tokens_of_rank)
            return self.local.dispatch(x_RL, gathered)._replace(ticket=self.tokens_of_rank)
        sizes, rows_per_expert_e, rows_per_expert = self._exchange_sizes(x_tL, routing)
        x_RL = all_gather_rows(x_tL, sizes, self.block, codec=self.codecs.forward)
        gathered = self._gather_routing(routing, sizes)
        if self.local.capacity is not None:
            return self.local.dispatch(x_RL, gathered)._replace(ticket=sizes)
        return ExpertInput(x_RL, gathered, rows_per_expert_e, rows_per_expert, None, sizes)

    def combine(self, expert_out_RL: Tensor, ticket: Sizes) -> Tensor:
        return reduce_scatter_rows(expert_out_RL, ticket, self.block, grad_codec=self.codecs.backward)

    def _exchange_sizes(self, x_tL: Tensor, routing: Routing) -> tuple[Sizes, Tensor, list[int]]:
        """Tokens of each rank, and rows of each expert of this rank, in one exchange and one read."""
        num_tokens = torch.full((1,), x_tL.shape[0], device=x_tL.device)
        counts = torch.cat([num_tokens, counts_of(routing, self.num_experts)])[None]
        counts_WX = all_gather_no_grad(counts, (1,) * self.block.size, self.block)
        first = 1 + self.first_expert
        rows_per_expert_e = counts_WX[:, first : first + self.num_local].sum(0)
        tokens, rows_per_expert = self.host.tokens_and_gathered(counts_WX[:, 0], rows_per_expert_e)
        return tuple(tokens), rows_per_expert_e, rows_per_expert

    def _gather_routing(self, routing: Routing, sizes: Sizes) -> Routing:
        """All ranks' assignments, renumbered to the experts of this rank; those to other experts are not kept."""
        prob_RK = all_gather_rows(routing.probs, sizes, self.block)
        expert_RK = all_gather_no_grad(routing.experts, sizes, self.block) - self.first_expert
        kept_RK = (expert_RK >= 0).logical_and_(expert_RK < self.num_local)
        if routing.kept is not None:
            # Booleans travel as bytes: not every backend supports them.
            kept_RK &= all_gather_no_grad(routing.kept.byte(), sizes, self.block).bool()
        return Routing(expert_RK, prob_RK, kept_RK)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> AllGatherDispatcher:
    moe = run.model.moe
    assert moe is not None
    block, layout = groups["expert_block"], groups.layout
    tokens_of_rank = None
    if shapes_are_fixed(run):
        pads = num_pad_tokens(moe.num_experts, moe.top_k, routed_multiple(run))
        tokens_of_rank = tuple(
            tokens_by_shard(run)[layout.index("cp", rank)][layout.index("tp", rank)] + pads for rank in block.ranks
        )
    capacity = padded_rows(run, groups.layout.size("dp"))
    etp, codecs = groups["etp"].size, row_codecs(run)
    return AllGatherDispatcher(moe.num_experts, block, etp, tokens_of_rank, capacity, host, codecs)
