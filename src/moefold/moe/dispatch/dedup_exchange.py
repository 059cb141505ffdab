"""One deduplicated exchange: a row goes once to every rank of a group that holds one of its experts.

With one row per assignment a row would travel K times. Here it travels once per destination rank, and the outputs of
its experts there are summed before they travel back. All of a row's assignments travel beside it in one message: K
probs and K expert numbers of two bytes each. The receiver keeps those to its own experts; a dropped assignment has the
number -1, which no rank holds. Only the probs' gradient travels back.

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
from moefold.comm.process_groups import Group
from moefold.moe.dedup_permute import (
    TokenRankMap,
    gather_tokens,
    reduce_token_values,
    reduce_tokens,
    token_rank_map,
    token_rank_mask,
)
from moefold.moe.dispatch.base import ExchangeName, ExpertInput, Routing, SplitSizeSource
from moefold.moe.permute import count_assignments

# Of an expert's number as it travels.
_NUMBER_BYTES = 2


class Splits(NamedTuple):
    """Rows sent to and received from each peer, and rows received by each rank that shares a split expert."""

    send: Sizes
    recv: Sizes
    etp_sizes: Sizes


class Received(NamedTuple):
    """Rows with their assignments to the experts of this rank, rows per expert, and what the way back needs."""

    rows_RL: Tensor
    assignments: Routing
    rows_per_expert_e: Tensor
    rows_per_expert: list[int]
    splits: Splits
    token_rank_map: TokenRankMap

    def expert_input(self, ticket: Any) -> ExpertInput:
        return ExpertInput(
            self.rows_RL, self.assignments, self.rows_per_expert_e, self.rows_per_expert, capacity=None, ticket=ticket
        )


class DedupExchange:
    """``num_experts`` are those of all ranks of the group together, in blocks of equal size."""

    def __init__(self, name: ExchangeName, num_experts: int, group: Group, etp: Group, host: SplitSizeSource) -> None:
        self.name, self.group, self.etp, self.host = name, group, etp, host
        self.num_experts, self.num_local = num_experts, num_experts // group.size
        self.first_expert = group.index * self.num_local
        assert num_experts < 2**15, f"{num_experts} experts have numbers of more than two bytes"

    def dispatch(self, x_tL: Tensor, routing: Routing) -> Received:
        mask_tW = token_rank_mask(routing.experts // self.num_local, routing.kept, self.group.size)
        assignments_E = count_assignments(routing, self.num_experts)
        splits, counts_We, on_host_We = self._exchange_counts(mask_tW, assignments_E)
        sent = token_rank_map(mask_tW, sum(splits.send))
        rows_NL = gather_tokens(x_tL, sent)
        received = all_to_all_rows(rows_NL, send=splits.send, recv=splits.recv, group=self.group)
        rows_RL = all_gather_rows(received, splits.etp_sizes, self.etp)
        number_tK = routing.experts if routing.kept is None else routing.experts.where(routing.kept, -1)
        prob_RK, number_RK = _SendAssignments.apply(routing.probs, number_tK, sent, splits, self.group, self.etp)
        expert_RK = number_RK - self.first_expert
        kept_RK = (expert_RK >= 0) & (expert_RK < self.num_local)
        assignments = Routing(expert_RK.long(), prob_RK, kept_RK)
        rows_per_expert = [sum(rows) for rows in zip(*on_host_We, strict=True)]
        return Received(rows_RL, assignments, counts_We.sum(0), rows_per_expert, splits, sent)

    def combine(self, expert_out_RL: Tensor, splits: Splits, sent: TokenRankMap) -> Tensor:
        own = reduce_scatter_rows(expert_out_RL, splits.etp_sizes, self.etp)
        rows_NL = all_to_all_rows(own, send=splits.recv, recv=splits.send, group=self.group)
        return reduce_tokens(rows_NL, sent)

    def _exchange_counts(self, mask_tW: Tensor, assignments_E: Tensor) -> tuple[Splits, Tensor, list[list[int]]]:
        """Send every peer its row count and its assignments per expert; read on the host here and nowhere else."""
        rows_W = mask_tW.sum(0)
        sent = torch.cat([rows_W[:, None], assignments_E.view(self.group.size, self.num_local)], 1)
        leaving = self.host.leaving_once(self.name, rows_W)
        received = all_to_all_counts(sent, self.group)
        counts = all_gather_no_grad(received, (self.group.size,) * self.etp.size, self.etp)
        on_host = self.host.arriving_once(self.name, counts)
        from_source = [rows for rows, *_ in on_host]
        size = self.group.size
        runs = [tuple(from_source[start : start + size]) for start in range(0, len(from_source), size)]
        splits = Splits(tuple(leaving), runs[self.etp.index], tuple(map(sum, runs)))
        return splits, counts[:, 1:], [per_expert for _, *per_expert in on_host]


class _SendAssignments(torch.autograd.Function):
    """Probs and expert numbers in one message there; the probs' gradient back."""

    @staticmethod
    def forward(
        ctx: Any, prob_tK: Tensor, number_tK: Tensor, sent: TokenRankMap, splits: Splits, group: Group, etp: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.sent, ctx.splits, ctx.group, ctx.etp = sent, splits, group, etp
        # As bytes: not every backend supports int16.
        packed = torch.cat([_packed_copy(part).view(torch.uint8) for part in (prob_tK, number_tK.short())], 1)
        packed = packed.index_select(0, sent.token_N)
        packed = all_to_all_rows(packed, send=splits.send, recv=splits.recv, group=group)
        packed = all_gather_no_grad(packed, splits.etp_sizes, etp)
        number_bytes = number_tK.shape[1] * _NUMBER_BYTES
        prob_RK = _packed_copy(packed[:, :-number_bytes]).view(prob_tK.dtype)
        number_RK = _packed_copy(packed[:, -number_bytes:]).view(torch.int16)
        ctx.mark_non_differentiable(number_RK)
        return prob_RK, number_RK

    @staticmethod
    def backward(ctx: Any, grad_RK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Each prob's gradient is nonzero only on the rank that holds its expert, so the sum has one term."""
        own = reduce_scatter_no_grad(grad_RK, ctx.splits.etp_sizes, ctx.etp)
        grad_NK = all_to_all_rows(own, send=ctx.splits.recv, recv=ctx.splits.send, group=ctx.group)
        return reduce_token_values(grad_NK, ctx.sent), None, None, None, None, None


def _packed_copy(columns: Tensor) -> Tensor:
    """A copy whose columns lie side by side, so that it can be viewed as another dtype.

    `contiguous` does not promise that: a single row or a single column (K = 1) counts as contiguous whatever its
    stride, and keeps it.
    """
    return columns.clone(memory_format=torch.contiguous_format)
