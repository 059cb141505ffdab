"""Counting and ranking inside groups of equal keys, with shapes that never depend on the data.

N items, each with a key in [0, num_segments). The number of items is known, the number per key is not: so nothing here
returns a list per key, only one number per item or per key, and nothing has to be read back to the host.

Sums of chosen rows, in one pass.

P rows, S sums, C chosen rows in the order of their sums, L width.

torch's ``embedding_bag`` reads each chosen row once, times its weight, and adds up in float32 at least.
It is an operation of ours here, so that whoever watches memory sees its answer and not what torch notes down beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def count_keys(key_N: Tensor, num_segments: int, item_N: Tensor | None = None) -> Tensor:
    """How many items have each key, int64; with ``item_N`` given, only the items that are true."""
    one_N = torch.ones_like(key_N) if item_N is None else item_N.to(key_N.dtype)
    return torch.zeros(num_segments, dtype=key_N.dtype, device=key_N.device).index_add(0, key_N, one_N)


def rank_within_key(key_N: Tensor, num_segments: int, priority_N: Tensor | None = None) -> Tensor:
    """How many items with the same key come before each item: higher priority first, then earlier position.

    Items sorted by key stand in runs; an item's place in its run is its place in all minus where the run begins.
    """
    order_N = stable_order(key_N, num_segments)
    if priority_N is not None:
        best_first_N = priority_N.argsort(descending=True, stable=True)
        order_N = best_first_N[stable_order(key_N[best_first_N], num_segments)]
    ends = count_keys(key_N, num_segments).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    rank_N = torch.arange(key_N.shape[0], device=key_N.device) - starts[key_N[order_N]]
    return torch.empty_like(rank_N).scatter(0, order_N, rank_N)


def stable_order(key_N: Tensor, num_segments: int) -> Tensor:
    """The order that sorts by key and leaves equal keys as they were. 16-bit keys sort several times faster."""
    return key_N.to(torch.int16 if num_segments < 2**15 else torch.int64).argsort(stable=True)


def rank_within_key_reference(key_N: Tensor, priority_N: Tensor | None = None) -> Tensor:
    """The twin of ``rank_within_key``: compare every pair."""
    key = key_N.tolist()
    priority = [0.0] * len(key) if priority_N is None else priority_N.tolist()
    before = [
        sum(
            key[j] == key[i] and (priority[j] > priority[i] or (priority[j] == priority[i] and j < i))
            for j in range(len(key))
        )
        for i in range(len(key))
    ]
    return torch.tensor(before, dtype=torch.int64)


@torch.library.custom_op(
    "moefold::add_up", mutates_args=(), schema="(Tensor rows, Tensor row, Tensor first, Tensor? weight) -> Tensor"
)
def segment_sum(rows_PL: Tensor, row_C: Tensor, first_S: Tensor, weight_C: Tensor | None) -> Tensor:
    """[S, L]: sum i is of the rows ``row[first[i]:first[i + 1]]``, times their weights if there are any."""
    weight_C = None if weight_C is None else weight_C.to(rows_PL.dtype)
    return F.embedding_bag(row_C, rows_PL, first_S, mode="sum", per_sample_weights=weight_C)


@segment_sum.register_fake
def _shape(rows_PL: Tensor, row_C: Tensor, first_S: Tensor, weight_C: Tensor | None) -> Tensor:
    return rows_PL.new_empty(first_S.shape[0], rows_PL.shape[1])


def segment_sum_reference(rows_PL: Tensor, row_C: Tensor, first_S: Tensor, weight_C: Tensor | None) -> Tensor:
    """The twin."""
    weight_C = torch.ones_like(row_C, dtype=rows_PL.dtype) if weight_C is None else weight_C.to(rows_PL.dtype)
    ends = [*first_S.tolist()[1:], row_C.shape[0]]
    sums = [
        (rows_PL[row_C[start:stop]].double() * weight_C[start:stop, None].double()).sum(0)
        for start, stop in zip(first_S.tolist(), ends, strict=True)
    ]
    return torch.stack(sums).to(rows_PL.dtype) if sums else rows_PL.new_zeros(0, rows_PL.shape[1])
