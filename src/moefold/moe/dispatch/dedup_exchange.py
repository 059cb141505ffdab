"""One hop: a row goes once to every rank of a group that owns an expert it chose, and takes those choices along.

t rows here, N rows leaving, S rows arriving, K choices per row, P ranks of the group, C sources, e experts of each
rank, D width.

With K choices a row would travel K times if each choice went for itself. Here it travels once per rank, as often as
its choices fall on different ranks, and the answers are added up before they come home. All of a row's choices travel
beside it: K weights and K expert numbers of two bytes each, in one message. Who gets them keeps its own; a choice that
was dropped has the number -1, which is nobody's. Their way back is the weights' gradient alone.

Where an expert is split (etp > 1), the ranks that hold its parts gather each other's arrivals, because every part
needs every row, and add their partial answers up on the way back.
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
from moefold.moe.dispatch.base import ExchangeName, Routing, SplitSizeSource
from moefold.moe.permute import count_choices

# Of an expert's number as it travels.
_NUMBER_BYTES = 2


class Splits(NamedTuple):
    """How many rows go to and come from each peer, and how many each of the ranks that split an expert has got."""

    send: Sizes
    recv: Sizes
    etp_sizes: Sizes


class Received(NamedTuple):
    """Rows with their choices among the experts of this rank, how many choose each of those, and the way home."""

    rows_SD: Tensor
    choices: Routing
    chosen_e: Tensor
    chosen: list[int]
    way: Splits
    pairs: TokenRankMap


class DedupExchange:
    """``num_experts`` are those of all ranks of the group together, in blocks of equal size."""

    def __init__(self, name: ExchangeName, num_experts: int, group: Group, etp: Group, host: SplitSizeSource) -> None:
        self.name, self.group, self.etp, self.host = name, group, etp, host
        self.num_experts, self.num_local = num_experts, num_experts // group.size
        self.first_expert = group.index * self.num_local
        assert num_experts < 2**15, f"{num_experts} experts have numbers of more than two bytes"

    def dispatch(self, x_tD: Tensor, routing: Routing) -> Received:
        wanted_tP = token_rank_mask(routing.expert_tK // self.num_local, routing.kept_tK, self.group.size)
        way, counts_Ce, on_host = self._agree(wanted_tP, count_choices(routing, self.num_experts))
        pairs = token_rank_map(wanted_tP, sum(way.send))
        rows_ND = gather_tokens(x_tD, pairs)
        there = all_to_all_rows(rows_ND, send=way.send, recv=way.recv, group=self.group)
        rows_SD = all_gather_rows(there, way.etp_sizes, self.etp)
        number_tK = routing.expert_tK if routing.kept_tK is None else routing.expert_tK.where(routing.kept_tK, -1)
        weight_SK, number_SK = _Choices.apply(routing.weight_tK, number_tK, pairs, way, self.group, self.etp)
        own_SK = number_SK - self.first_expert
        choices = Routing(own_SK.long(), weight_SK, (own_SK >= 0) & (own_SK < self.num_local))
        chosen = [sum(rows) for rows in zip(*on_host, strict=True)]
        return Received(rows_SD, choices, counts_Ce.sum(0), chosen, way, pairs)

    def combine(self, answers_SD: Tensor, way: Splits, pairs: TokenRankMap) -> Tensor:
        mine = reduce_scatter_rows(answers_SD, way.etp_sizes, self.etp)
        back_ND = all_to_all_rows(mine, send=way.recv, recv=way.send, group=self.group)
        return reduce_tokens(back_ND, pairs)

    def _agree(self, wanted_tP: Tensor, chosen_E: Tensor) -> tuple[Splits, Tensor, list[list[int]]]:
        """Tell every peer how many rows are coming and how many of them each expert gets; read on the host here."""
        rows_P = wanted_tP.sum(0)
        told = torch.cat([rows_P[:, None], chosen_E.view(self.group.size, self.num_local)], 1)
        leaving = self.host.leaving_once(self.name, rows_P)
        theirs = all_to_all_counts(told, self.group)
        counts = all_gather_no_grad(theirs, (self.group.size,) * self.etp.size, self.etp)
        on_host = self.host.arriving_once(self.name, counts)
        from_source = [rows for rows, *_ in on_host]
        size = self.group.size
        runs = [tuple(from_source[start : start + size]) for start in range(0, len(from_source), size)]
        way = Splits(tuple(leaving), runs[self.etp.index], tuple(map(sum, runs)))
        return way, counts[:, 1:], [chosen for _, *chosen in on_host]


class _Choices(torch.autograd.Function):
    """Weights and numbers in one message there; the weights' gradient back."""

    @staticmethod
    def forward(
        ctx: Any, weight_tK: Tensor, number_tK: Tensor, pairs: TokenRankMap, way: Splits, group: Group, etp: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.pairs, ctx.way, ctx.group, ctx.etp = pairs, way, group, etp
        # As bytes: not every transport knows numbers of two bytes.
        packed = torch.cat([_own_memory(part).view(torch.uint8) for part in (weight_tK, number_tK.short())], 1)
        packed = packed.index_select(0, pairs.source_N)
        packed = all_to_all_rows(packed, send=way.send, recv=way.recv, group=group)
        packed = all_gather_no_grad(packed, way.etp_sizes, etp)
        numbers = number_tK.shape[1] * _NUMBER_BYTES
        weight_SK = _own_memory(packed[:, :-numbers]).view(weight_tK.dtype)
        number_SK = _own_memory(packed[:, -numbers:]).view(torch.int16)
        ctx.mark_non_differentiable(number_SK)
        return weight_SK, number_SK

    @staticmethod
    def backward(ctx: Any, grad_SK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """A weight that is nobody's own there has no gradient there, so that each comes from one place."""
        mine = reduce_scatter_no_grad(grad_SK, ctx.way.etp_sizes, ctx.etp)
        home = all_to_all_rows(mine, send=ctx.way.recv, recv=ctx.way.send, group=ctx.group)
        return reduce_token_values(home, ctx.pairs), None, None, None, None, None


def _own_memory(columns: Tensor) -> Tensor:
    """A copy whose columns lie side by side, so that it can be read as numbers of another width.

    `contiguous` does not promise that: a single row or a single column (K = 1) counts as contiguous whatever its
    stride, and keeps it.
    """
    return columns.clone(memory_format=torch.contiguous_format)
