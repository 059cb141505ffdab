"""A source row goes once to each place that wants it, and what comes back from those places is added up.

t source rows, P places, N pairs of a row and a place that wants it, D width.

Pairs stand place by place and, within a place, in the order of their rows: so what goes to one place is one run, and
the same wishes give the same bits. The way back adds up in float32, whatever the format of the rows, in one pass over
them. Going and adding up are each other's gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.ops.segments import segment_sum


class TokenRankMap(NamedTuple):
    """Which row each pair has; places follow each other."""

    source_N: Tensor
    # The way back: pairs in the order of their rows, and where those of each row begin.
    pair_N: Tensor
    first_t: Tensor


def token_rank_mask(place_tK: Tensor, kept_tK: Tensor | None, num_places: int) -> Tensor:
    """[t, P]: whether a row has a choice, one that was not dropped, at each place."""
    if kept_tK is not None:
        # Dropped choices go to a place that is cut off.
        place_tK = place_tK.where(kept_tK, num_places)
    wanted = torch.zeros(place_tK.shape[0], num_places + 1, dtype=torch.bool, device=place_tK.device)
    return wanted.scatter_(1, place_tK, True)[:, :num_places]


def token_rank_map(wanted_tP: Tensor, num_pairs: int) -> TokenRankMap:
    """``num_pairs``: how many there are, so that no shape depends on the data."""
    num_rows, num_places = wanted_tP.shape
    wanted_Pt = wanted_tP.t().flatten()
    # An empty set of rows has no pairs, and nothing may be divided by its size.
    source_N = torch.nonzero_static(wanted_Pt, size=num_pairs).flatten() % max(num_rows, 1)
    number_tP = (wanted_Pt.cumsum(0) - 1).view(num_places, num_rows).t().flatten()
    by_row_N = torch.nonzero_static(wanted_tP.flatten(), size=num_pairs).flatten()
    wishes_t = wanted_tP.sum(1)
    return TokenRankMap(source_N, number_tP.index_select(0, by_row_N), wishes_t.cumsum(0) - wishes_t)


def token_rank_map_of_assignments(choice_N: Tensor, num_rows: int, num_choices: int) -> TokenRankMap:
    """A pair for every kept choice, in the order in which ``choice_N`` has their numbers (row * K + k)."""
    source_N, num_pairs = choice_N // num_choices, choice_N.shape[0]
    numbers = torch.arange(num_pairs, device=choice_N.device)
    if num_pairs == num_rows * num_choices:
        pair_N = torch.empty_like(numbers).scatter_(0, choice_N, numbers)
        return TokenRankMap(source_N, pair_N, numbers[::num_choices].contiguous())
    number_tK = torch.full((num_rows * num_choices,), -1, device=choice_N.device).scatter_(0, choice_N, numbers)
    kept_tK = number_tK >= 0
    by_row_N = torch.nonzero_static(kept_tK, size=num_pairs).flatten()
    kept_t = kept_tK.view(num_rows, num_choices).sum(1)
    return TokenRankMap(source_N, number_tK.index_select(0, by_row_N), kept_t.cumsum(0) - kept_t)


def gather_tokens(x_tD: Tensor, pairs: TokenRankMap) -> Tensor:
    """Each pair's row."""
    rows: Tensor = _Spread.apply(x_tD, pairs)
    return rows


def reduce_tokens(rows_ND: Tensor, pairs: TokenRankMap) -> Tensor:
    """The sum of every source row's pairs; zeros where it has none."""
    home: Tensor = _AddUp.apply(rows_ND, pairs)
    return home


def reduce_token_values(rows_ND: Tensor, pairs: TokenRankMap) -> Tensor:
    """The same, outside of any gradient."""
    if not rows_ND.shape[0]:
        return rows_ND.new_zeros(pairs.first_t.shape[0], rows_ND.shape[1])
    return segment_sum(rows_ND.contiguous(), pairs.pair_N, pairs.first_t, None)


class _Spread(torch.autograd.Function):
    """The maps are held, and not saved, so that recomputation need not come this far."""

    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, pairs: TokenRankMap) -> Tensor:
        ctx.pairs = pairs
        return x_tD.index_select(0, pairs.source_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return reduce_token_values(grad_ND, ctx.pairs), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, pairs: TokenRankMap) -> Tensor:
        ctx.pairs = pairs
        return reduce_token_values(rows_ND, pairs)

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor, None]:
        return grad_tD.index_select(0, ctx.pairs.source_N), None
