"""Every rank of the expert block gathers all tokens of the block and takes those routed to its own experts.

The expert block is the ep x etp ranks that together hold every expert once. Gathering moves more bytes than sending
rows where they are needed, unless tokens have many experts (K near ep). In return it needs no exchange of counts, and
one reduce-scatter on the way back sums over a token's experts and over the shards of split experts (etp > 1) alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import Sizes, all_gather_no_grad, all_gather_rows, reduce_scatter_rows
from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import (
    AS_THEY_ARE,
    SYNC_SPLIT_SIZES,
    Dispatcher,
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
from moefold.moe.dispatch.padded_routing import assignments_per_token, num_pad_tokens, routed_multiple


class _Counts(NamedTuple):
    """Tokens of each rank; rows of each expert of this rank and the same on the host, None where not exchanged."""

    tokens_of_rank: Sizes
    rows_per_expert_e: Tensor | None = None
    rows_per_expert: list[int] | None = None


class _Rows(NamedTuple):
    """Rows and assignments with global expert numbers: of this rank as sent, of the whole block as received."""

    x_RL: Tensor
    routing: Routing
    counts: _Counts


class AllGatherDispatcher(Dispatcher):
    """``tokens_of_rank``: tokens of each rank of the block; None where they change and must be exchanged."""

    def __init__(
        self,
        num_experts: int,
        block: Group,
        ep: Group,
        tokens_of_rank: Sizes | None,
        capacity: int | None = None,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
        codecs: RowCodecs = AS_THEY_ARE,
    ) -> None:
        self.codecs = codecs
        self.block, self.tokens_of_rank, self.host = block, tokens_of_rank, host
        self.num_experts, self.num_local = num_experts, num_experts // ep.size
        # Which of the block's ranks have the same experts is up to the order of ranks; ep's own numbers are not.
        self.first_expert = ep.index * self.num_local
        # Every rank of the block may send ``capacity`` rows to an expert.
        self.local = LocalDispatcher(self.num_local, None if capacity is None else capacity * block.size, host.gathered)

    def dispatch_counts(self, routing: Routing) -> _Counts:
        """Tokens of each rank, and rows of each expert of this rank, in one exchange and one read."""
        if self.tokens_of_rank is not None:
            return _Counts(self.tokens_of_rank)
        num_tokens = torch.full((1,), routing.experts.shape[0], device=routing.experts.device)
        counts = torch.cat([num_tokens, counts_of(routing, self.num_experts)])[None]
        counts_WX = all_gather_no_grad(counts, (1,) * self.block.size, self.block)
        first = 1 + self.first_expert
        rows_per_expert_e = counts_WX[:, first : first + self.num_local].sum(0)
        tokens, rows_per_expert = self.host.tokens_and_gathered(counts_WX[:, 0], rows_per_expert_e)
        return _Counts(tuple(tokens), rows_per_expert_e, rows_per_expert)

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: _Counts) -> _Rows:
        # Booleans travel as bytes: not every backend supports them.
        kept = None if routing.kept is None else routing.kept.byte()
        return _Rows(x_tL, Routing(routing.experts, routing.probs, kept), counts)

    def dispatch_exchange(self, sent: _Rows) -> _Rows:
        (x_tL, routing, counts), sizes = sent, sent.counts.tokens_of_rank
        x_RL = all_gather_rows(x_tL, sizes, self.block, codec=self.codecs.forward)
        prob_RK = all_gather_rows(routing.probs, sizes, self.block)
        expert_RK = all_gather_no_grad(routing.experts, sizes, self.block)
        kept_RK = None if routing.kept is None else all_gather_no_grad(routing.kept, sizes, self.block)
        return _Rows(x_RL, Routing(expert_RK, prob_RK, kept_RK), counts)

    def dispatch_finish(self, received: _Rows) -> ExpertInput:
        """Assignments renumbered to the experts of this rank; those to other experts are not kept."""
        x_RL, routing, counts = received
        expert_RK = routing.experts - self.first_expert
        kept_RK = (expert_RK >= 0).logical_and_(expert_RK < self.num_local)
        if routing.kept is not None:
            kept_RK &= routing.kept.bool()
        gathered = Routing(expert_RK, routing.probs, kept_RK)
        if self.local.capacity is not None or counts.rows_per_expert_e is None or counts.rows_per_expert is None:
            return self.local.dispatch(x_RL, gathered)._replace(ticket=counts.tokens_of_rank)
        return ExpertInput(
            x_RL, gathered, counts.rows_per_expert_e, counts.rows_per_expert, None, counts.tokens_of_rank
        )

    def combine_exchange(self, expert_out_RL: Tensor, ticket: Sizes) -> Tensor:
        return reduce_scatter_rows(expert_out_RL, ticket, self.block, grad_codec=self.codecs.backward)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> AllGatherDispatcher:
    moe = run.model.moe
    assert moe is not None
    block, layout = groups["expert_block"], groups.layout
    tokens_of_rank = None
    # Of a chunk the tokens are counted.
    if shapes_are_fixed(run) and run.parallel.exchange_chunks == 1:
        pads = num_pad_tokens(moe.num_experts, assignments_per_token(moe), routed_multiple(run))
        tokens_of_rank = tuple(
            tokens_by_shard(run)[layout.index("cp", rank)][layout.index("tp", rank)] + pads for rank in block.ranks
        )
    capacity = padded_rows(run, groups.layout.size("dp"))
    codecs = row_codecs(run)
    return AllGatherDispatcher(moe.num_experts, block, groups["ep"], tokens_of_rank, capacity, host, codecs)
