"""Gather each token's row once per destination rank, and sum the rows that come back per token.

An entry of the list N is a pair of a token and a rank that it goes to. Pairs are ordered by rank and then by token:
what goes to one rank is one run, and the same routing gives the same bits. The sum is accumulated in float32, whatever
the dtype of the rows, in one pass over them. Gather and sum are each other's gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.moe.permute import token_of
from moefold.ops.segments import segment_sum, stable_order


class TokenRankMap(NamedTuple):
    """The token of each pair, rank after rank."""

    token_N: Tensor
    # The way back: pairs in the order of their tokens, and where those of each token begin.
    order_N: Tensor
    first_t: Tensor


def token_rank_mask(rank_tK: Tensor, kept_tK: Tensor | None, num_ranks: int) -> Tensor:
    """[t, W]: whether a token has a kept assignment on each rank."""
    if kept_tK is not None:
        # Dropped assignments go to one rank more than there are, which is cut off.
        rank_tK = rank_tK.where(kept_tK, num_ranks)
    mask = torch.zeros(rank_tK.shape[0], num_ranks + 1, dtype=torch.bool, device=rank_tK.device)
    return mask.scatter_(1, rank_tK, True)[:, :num_ranks]


def token_rank_map(mask_tW: Tensor, num_pairs: int) -> TokenRankMap:
    """``num_pairs``: how many there are, so that no shape depends on the data."""
    num_tokens, num_ranks = mask_tW.shape
    flat_mask = mask_tW.t().flatten()
    # Without tokens there are no pairs, and nothing may be divided by 0.
    token_N = torch.nonzero_static(flat_mask, size=num_pairs).flatten() % max(num_tokens, 1)
    flat_pair = (flat_mask.cumsum(0) - 1).view(num_ranks, num_tokens).t().flatten()
    by_token_N = torch.nonzero_static(mask_tW.flatten(), size=num_pairs).flatten()
    pairs_t = mask_tW.sum(1)
    return TokenRankMap(token_N, flat_pair.index_select(0, by_token_N), pairs_t.cumsum(0) - pairs_t)


def assignment_map(assignment_N: Tensor, num_tokens: int, top_k: int, token_N: Tensor | None = None) -> TokenRankMap:
    """A pair for every kept assignment, in the order of ``assignment_N``, their numbers (token * K + k).

    ``token_N``: their tokens, where known.
    """
    token_N, num_pairs = token_of(assignment_N, top_k) if token_N is None else token_N, assignment_N.shape[0]
    pair_N = torch.arange(num_pairs, device=assignment_N.device)
    if num_pairs == num_tokens * top_k:
        order_N = torch.empty_like(pair_N).scatter_(0, assignment_N, pair_N)
        return TokenRankMap(token_N, order_N, pair_N if top_k == 1 else pair_N[::top_k].contiguous())
    flat_pair = torch.full((num_tokens * top_k,), -1, device=assignment_N.device).scatter_(0, assignment_N, pair_N)
    kept = flat_pair >= 0
    by_token_N = torch.nonzero_static(kept, size=num_pairs).flatten()
    kept_t = kept.view(num_tokens, top_k).sum(1)
    return TokenRankMap(token_N, flat_pair.index_select(0, by_token_N), kept_t.cumsum(0) - kept_t)


class SendOrder(NamedTuple):
    """The numbers of the assignments in the order in which they are sent, and the map of their tokens."""

    assignment_N: Tensor
    sent: TokenRankMap


def send_order(expert_tK: Tensor, num_experts: int) -> SendOrder:
    """By expert, where every assignment is kept: no size depends on data."""
    assignment_N = stable_order(expert_tK.flatten(), num_experts + 1)
    return SendOrder(assignment_N, assignment_map(assignment_N, *expert_tK.shape))


def gather_assignments(prob_tK: Tensor, assignment_N: Tensor, sent: TokenRankMap) -> Tensor:
    """The prob of each pair of ``assignment_map``. Where all are kept, its gradient is a gather too."""
    if assignment_N.shape[0] != prob_tK.numel():
        return prob_tK.flatten().index_select(0, assignment_N)
    prob_N: Tensor = _GatherAssignments.apply(prob_tK, assignment_N, sent.order_N)
    return prob_N


def gather_tokens(x_tL: Tensor, sent: TokenRankMap) -> Tensor:
    """The row of each pair's token."""
    rows: Tensor = _GatherTokens.apply(x_tL, sent)
    return rows


def reduce_tokens(rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
    """The sum of each token's rows; zeros where it has none."""
    summed: Tensor = _ReduceTokens.apply(rows_NL, sent)
    return summed


def reduce_token_values(rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
    """The same without autograd."""
    if not rows_NL.shape[0]:
        return rows_NL.new_zeros(sent.first_t.shape[0], rows_NL.shape[1])
    return segment_sum(rows_NL.contiguous(), sent.order_N, sent.first_t, None)


class _GatherTokens(torch.autograd.Function):
    """The map is kept on ctx and not saved, so that recomputation can stop before this gather."""

    @staticmethod
    def forward(ctx: Any, x_tL: Tensor, sent: TokenRankMap) -> Tensor:
        ctx.sent = sent
        return x_tL.index_select(0, sent.token_N)

    @staticmethod
    def backward(ctx: Any, grad_NL: Tensor) -> tuple[Tensor, None]:
        return reduce_token_values(grad_NL, ctx.sent), None


class _ReduceTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NL: Tensor, sent: TokenRankMap) -> Tensor:
        ctx.sent = sent
        return reduce_token_values(rows_NL, sent)

    @staticmethod
    def backward(ctx: Any, grad_tL: Tensor) -> tuple[Tensor, None]:
        return grad_tL.index_select(0, ctx.sent.token_N), None


class _Assignments(Protocol):
    order_N: Tensor
    shape: torch.Size


class _GatherAssignments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Assignments, prob_tK: Tensor, assignment_N: Tensor, order_N: Tensor) -> Tensor:
        ctx.order_N, ctx.shape = order_N, prob_tK.shape
        return prob_tK.flatten().index_select(0, assignment_N)

    @staticmethod
    def backward(ctx: _Assignments, grad_N: Tensor) -> tuple[Tensor, None, None]:
        return grad_N.index_select(0, ctx.order_N).view(ctx.shape), None, None
