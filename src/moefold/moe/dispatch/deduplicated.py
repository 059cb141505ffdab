"""A token's row travels once to every rank that holds one of its experts, and the outputs are summed there.

With one row per assignment a row would travel K times. A token has fewer than K destination ranks when several of its
experts share one, and then fewer rows travel, both ways. With top-1 routing, or with experts on K different ranks,
nothing is saved.

``DedupExchange`` is one such exchange over one group (``two_level`` has two). All of a row's assignments travel beside
it in one message: K probs and K expert numbers of two bytes each. The receiver keeps those to its own experts; a
dropped assignment has the number -1, which no rank holds. Only the probs' gradient travels back.

Where an expert is split (etp > 1), the ranks that hold its shards all-gather the rows they received, because every
shard needs every row, and reduce-scatter their partial outputs on the way back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import (
    Sizes,
    all_gather_no_grad,
    all_gather_rows,
    all_to_all_counts,
    all_to_all_rows,
    reduce_scatter_no_grad,
    reduce_scatter_rows,
)
from moefold.comm.process_groups import Group, Groups
from moefold.config.run import RunConfig
from moefold.moe.dedup_permute import (
    TokenRankMap,
    gather_tokens,
    reduce_token_values,
    reduce_tokens,
    token_rank_map,
    token_rank_mask,
)
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

# Of an expert's number as it travels.
_NUMBER_BYTES = 2


class Splits(NamedTuple):
    """Rows sent to and received from each peer, and rows received by each rank that shares a split expert."""

    send: Sizes
    recv: Sizes
    etp_sizes: Sizes


class Rows(NamedTuple):
    """Rows with all their K probs and expert numbers, as they travel; and what the way back needs."""

    rows_NL: Tensor
    prob_NK: Tensor
    number_NK: Tensor
    splits: Splits
    token_rank_map: TokenRankMap


class Received(NamedTuple):
    """Rows with their assignments to the experts of this rank, and what the way back needs."""

    rows_RL: Tensor
    assignments: Routing
    splits: Splits
    token_rank_map: TokenRankMap

    def expert_input(self, counts: ExchangedRows, on_host: HostRows, ticket: Any) -> ExpertInput:
        """With the assignments per expert that were counted for this exchange."""
        rows_per_expert = [sum(rows) for rows in zip(*on_host.arriving, strict=True)][1:]
        rows_per_expert_e = counts.arriving_WX[:, 1:].sum(0)
        return ExpertInput(
            self.rows_RL, self.assignments, rows_per_expert_e, rows_per_expert, capacity=None, ticket=ticket
        )


class DedupExchange:
    """``num_experts`` are those of all ranks of the group together, in blocks of equal size.

    Counts come first: ``exchange_counts`` sends them, the dispatcher reads those of all its exchanges together, and
    ``prepare`` is given them. Each way then has the three parts of a dispatcher.
    """

    def __init__(
        self, name: ExchangeName, num_experts: int, group: Group, etp: Group, codecs: RowCodecs = AS_THEY_ARE
    ) -> None:
        self.name, self.group, self.etp, self.codecs = name, group, etp, codecs
        self.num_experts, self.num_local = num_experts, num_experts // group.size
        self.first_expert = group.index * self.num_local
        assert num_experts < 2**15, f"{num_experts} experts have numbers of more than two bytes"

    def mask_of(self, routing: Routing) -> Tensor:
        """[t, W]: whether a token goes to each rank of the group."""
        return token_rank_mask(routing.experts // self.num_local, routing.kept, self.group.size)

    def exchange_counts(self, rows_W: Tensor, *more: Tensor) -> ExchangedRows:
        """Send every peer its row count, then its rows of each of ``more``; nothing is read on the host."""
        sent = torch.cat([rows_W[:, None], *more], 1)
        received = all_to_all_counts(sent, self.group)
        counts = all_gather_no_grad(received, (self.group.size,) * self.etp.size, self.etp)
        return ExchangedRows(rows_W, counts)

    def prepare(self, x_tL: Tensor, routing: Routing, mask_tW: Tensor, rows: HostRows) -> Rows:
        splits = self._splits(rows)
        sent = token_rank_map(mask_tW, sum(splits.send))
        number_tK = routing.experts if routing.kept is None else routing.experts.where(routing.kept, -1)
        number_NK = number_tK.short().index_select(0, sent.token_N)
        return Rows(gather_tokens(x_tL, sent), _GatherProbs.apply(routing.probs, sent), number_NK, splits, sent)

    def exchange(self, sent: Rows) -> Rows:
        splits, codec = sent.splits, self.codecs.forward
        received = all_to_all_rows(sent.rows_NL, send=splits.send, recv=splits.recv, group=self.group, codec=codec)
        rows_RL = all_gather_rows(received, splits.etp_sizes, self.etp, codec=codec)
        prob_RK, number_RK = _SendAssignments.apply(sent.prob_NK, sent.number_NK, splits, self.group, self.etp)
        return sent._replace(rows_NL=rows_RL, prob_NK=prob_RK, number_NK=number_RK)

    def finish(self, received: Rows) -> Received:
        expert_RK = received.number_NK.long().sub_(self.first_expert)
        kept_RK = (expert_RK >= 0).logical_and_(expert_RK < self.num_local)
        assignments = Routing(expert_RK, received.prob_NK, kept_RK)
        return Received(received.rows_NL, assignments, received.splits, received.token_rank_map)

    def exchange_back(self, expert_out_RL: Tensor, splits: Splits) -> Tensor:
        codec = self.codecs.backward
        own = reduce_scatter_rows(expert_out_RL, splits.etp_sizes, self.etp, grad_codec=codec)
        return all_to_all_rows(own, send=splits.recv, recv=splits.send, group=self.group, grad_codec=codec)

    def finish_back(self, rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
        return reduce_tokens(rows_NL, sent)

    def _splits(self, rows: HostRows) -> Splits:
        from_source, size = [arrived for arrived, *_ in rows.arriving], self.group.size
        runs = [tuple(from_source[start : start + size]) for start in range(0, len(from_source), size)]
        return Splits(tuple(rows.leaving), runs[self.etp.index], tuple(map(sum, runs)))


class _GatherProbs(torch.autograd.Function):
    """[N, K]: the probs of the token of every row."""

    @staticmethod
    def forward(ctx: Any, prob_tK: Tensor, sent: TokenRankMap) -> Tensor:
        ctx.sent = sent
        return prob_tK.index_select(0, sent.token_N)

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor, None]:
        """Each prob's gradient is nonzero only on the rank that holds its expert, so the sum has one term."""
        return reduce_token_values(grad_NK, ctx.sent), None


class _SendAssignments(torch.autograd.Function):
    """Probs and expert numbers in one message there; the probs' gradient back."""

    @staticmethod
    def forward(
        ctx: Any, prob_NK: Tensor, number_NK: Tensor, splits: Splits, group: Group, etp: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.splits, ctx.group, ctx.etp = splits, group, etp
        # As bytes: not every backend supports int16.
        packed = torch.cat([part.view(torch.uint8) for part in (prob_NK, number_NK)], 1)
        packed = all_to_all_rows(packed, send=splits.send, recv=splits.recv, group=group)
        packed = all_gather_no_grad(packed, splits.etp_sizes, etp)
        number_bytes = number_NK.shape[1] * _NUMBER_BYTES
        prob_RK = _packed_copy(packed[:, :-number_bytes]).view(prob_NK.dtype)
        number_RK = _packed_copy(packed[:, -number_bytes:]).view(torch.int16)
        ctx.mark_non_differentiable(number_RK)
        return prob_RK, number_RK

    @staticmethod
    def backward(ctx: Any, grad_RK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        own = reduce_scatter_no_grad(grad_RK, ctx.splits.etp_sizes, ctx.etp)
        grad_NK = all_to_all_rows(own, send=ctx.splits.recv, recv=ctx.splits.send, group=ctx.group)
        return grad_NK, None, None, None, None


def _packed_copy(columns: Tensor) -> Tensor:
    """A copy whose columns lie side by side, so that it can be viewed as another dtype.

    `contiguous` does not promise that: a single row or a single column (K = 1) counts as contiguous whatever its
    stride, and keeps it.
    """
    return columns.clone(memory_format=torch.contiguous_format)


class _Counts(NamedTuple):
    """``mask_tW``: whether a token goes to each rank."""

    mask_tW: Tensor
    counts: ExchangedRows
    on_host: HostRows


class _InFlight(NamedTuple):
    rows: Rows
    counts: _Counts


class _Ticket(NamedTuple):
    splits: Splits
    token_rank_map: TokenRankMap


class DeduplicatedDispatcher(Dispatcher):
    """One exchange over the ep group."""

    def __init__(
        self,
        num_experts: int,
        ep: Group,
        etp: Group,
        host: SplitSizeSource = SYNC_SPLIT_SIZES,
        codecs: RowCodecs = AS_THEY_ARE,
    ) -> None:
        self.exchange, self.host = DedupExchange("direct", num_experts, ep, etp, codecs), host

    def dispatch_counts(self, routing: Routing) -> _Counts:
        exchange, mask_tW = self.exchange, self.exchange.mask_of(routing)
        per_expert_We = counts_of(routing, exchange.num_experts).view(exchange.group.size, exchange.num_local)
        counts = exchange.exchange_counts(mask_tW.sum(0), per_expert_We)
        return _Counts(mask_tW, counts, self.host.exchanged_once({"direct": counts})["direct"])

    def dispatch_prepare(self, x_tL: Tensor, routing: Routing, counts: _Counts) -> _InFlight:
        return _InFlight(self.exchange.prepare(x_tL, routing, counts.mask_tW, counts.on_host), counts)

    def dispatch_exchange(self, sent: _InFlight) -> _InFlight:
        return sent._replace(rows=self.exchange.exchange(sent.rows))

    def dispatch_finish(self, received: _InFlight) -> ExpertInput:
        rows, (_, counts, on_host) = self.exchange.finish(received.rows), received.counts
        return rows.expert_input(counts, on_host, _Ticket(rows.splits, rows.token_rank_map))

    def combine_exchange(self, rows_RL: Tensor, ticket: _Ticket) -> Tensor:
        return self.exchange.exchange_back(rows_RL, ticket.splits)

    def combine_finish(self, rows_NL: Tensor, ticket: _Ticket) -> Tensor:
        return self.exchange.finish_back(rows_NL, ticket.token_rank_map)


def build(run: RunConfig, groups: Groups, host: SplitSizeSource) -> DeduplicatedDispatcher:
    assert run.model.moe is not None
    return DeduplicatedDispatcher(run.model.moe.num_experts, groups["ep"], groups["etp"], host, row_codecs(run))
