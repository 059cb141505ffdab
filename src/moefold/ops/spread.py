"""A source row goes once to each place that wants it, and what comes back from those places is added up.

t source rows, P places, N pairs of a row and a place that wants it, D width.

Pairs stand place by place and, within a place, in the order of their rows: so what goes to one place is one run, and
the same wishes give the same bits. The way back adds up in float32, whatever the format of the rows, in one pass over
them (``embedding_bag``). Going and adding up are each other's gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.segments import stable_order


class Pairs(NamedTuple):
    """Which row each pair has, and which place wants it."""

    source_N: Tensor
    place_N: Tensor
    # The way back: pairs in the order of their rows, and where those of each row begin.
    pair_N: Tensor
    first_t: Tensor


def wanted_by(place_tK: Tensor, kept_tK: Tensor | None, num_places: int) -> Tensor:
    """[t, P]: whether a row has a choice, one that was not dropped, at each place."""
    if kept_tK is not None:
        # Dropped choices go to a place that is cut off.
        place_tK = place_tK.where(kept_tK, num_places)
    wanted = torch.zeros(place_tK.shape[0], num_places + 1, dtype=torch.bool, device=place_tK.device)
    return wanted.scatter_(1, place_tK, True)[:, :num_places]


def pairs_of(wanted_tP: Tensor, num_pairs: int) -> Pairs:
    """``num_pairs``: how many there are, so that no shape depends on the data."""
    num_rows, num_places = wanted_tP.shape
    wanted_Pt = wanted_tP.t()
    by_place_N = _true_first(wanted_Pt)[:num_pairs]
    by_row_N = _true_first(wanted_tP)[:num_pairs]
    number_tP = (wanted_Pt.flatten().cumsum(0) - 1).view(num_places, num_rows).t().flatten()
    wishes_t = wanted_tP.sum(1)
    # An empty set of rows has no pairs, and nothing may be divided by its size.
    rows = max(num_rows, 1)
    return Pairs(by_place_N % rows, by_place_N // rows, number_tP[by_row_N], wishes_t.cumsum(0) - wishes_t)


def spread_rows(x_tD: Tensor, pairs: Pairs) -> Tensor:
    """Each pair's row."""
    rows: Tensor = _Spread.apply(x_tD, pairs)
    return rows


def add_up_rows(rows_ND: Tensor, pairs: Pairs) -> Tensor:
    """The sum of every source row's pairs; zeros where it has none."""
    home: Tensor = _AddUp.apply(rows_ND, pairs)
    return home


class _Spread(torch.autograd.Function):
    """The maps are held, and not saved, so that recomputation need not come this far."""

    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x_tD.index_select(0, pairs.source_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        return _sum_bags(grad_ND, ctx.pairs), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return _sum_bags(rows_ND, pairs)

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor, None]:
        return grad_tD.index_select(0, ctx.pairs.source_N), None


def _sum_bags(rows_ND: Tensor, pairs: Pairs) -> Tensor:
    if not rows_ND.shape[0]:
        return rows_ND.new_zeros(pairs.first_t.shape[0], rows_ND.shape[1])
    return F.embedding_bag(pairs.pair_N, rows_ND.contiguous(), pairs.first_t, mode="sum")


def _true_first(flags: Tensor) -> Tensor:
    return stable_order(flags.logical_not().flatten(), 2)
