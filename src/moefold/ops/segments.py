"""Counts, ranks and sums within segments of equal keys, with shapes that never depend on the data.

Items have keys in [0, num_segments). The number of items is known on the host, the number per key is not: functions
return one number per item or per key, and nothing is read back to the host.

``segment_sum`` is torch's ``embedding_bag``, which reads each selected row once, times its weight, and accumulates in
float32 at least. It is a custom operator, so that memory tracing sees its output and not embedding_bag's side outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def count_keys(key_N: Tensor, num_segments: int, item_N: Tensor | None = None) -> Tensor:
    """How many items have each key, int64; with ``item_N`` given, only the items that are true."""
    counts = torch.zeros(num_segments, dtype=key_N.dtype, device=key_N.device)
    if item_N is None:
        return counts.scatter_(0, key_N, 1, reduce="add")
    return counts.index_add_(0, key_N, item_N.to(key_N.dtype))


def rank_within_key(key_N: Tensor, num_segments: int, priority_N: Tensor | None = None) -> Tensor:
    """How many items with the same key come before each item: higher priority first, then earlier position.

    After a sort by key, an item's rank is its position minus that of its key's first item.
    """
    if priority_N is None:
        sorted_N, order_N = stable_sort(key_N, num_segments)
    else:
        best_first_N = priority_N.argsort(descending=True, stable=True)
        sorted_N, order_N = stable_sort(key_N.index_select(0, best_first_N), num_segments)
        order_N = best_first_N.index_select(0, order_N)
    rank_N = torch.arange(key_N.shape[0], device=key_N.device).sub_(torch.searchsorted(sorted_N, sorted_N))
    return torch.empty_like(rank_N).scatter_(0, order_N, rank_N)


def stable_sort(key_N: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """Keys in order, and the stable argsort. 16-bit keys sort several times faster."""
    sorted_N, order_N = key_N.to(torch.int16 if num_segments < 2**15 else torch.int64).sort(stable=True)
    return sorted_N, order_N


def stable_order(key_N: Tensor, num_segments: int) -> Tensor:
    """The stable argsort by key."""
    return stable_sort(key_N, num_segments)[1]


def rank_within_key_reference(key_N: Tensor, priority_N: Tensor | None = None) -> Tensor:
    """The reference of ``rank_within_key``: compare every pair."""
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
def segment_sum(rows_PL: Tensor, row_N: Tensor, first_X: Tensor, weight_N: Tensor | None) -> Tensor:
    """[X, L]: sum i is of the rows ``row[first[i]:first[i + 1]]``, times their weights if there are any."""
    weight_N = None if weight_N is None else weight_N.to(rows_PL.dtype)
    return F.embedding_bag(row_N, rows_PL, first_X, mode="sum", per_sample_weights=weight_N)


@segment_sum.register_fake
def _shape(rows_PL: Tensor, row_N: Tensor, first_X: Tensor, weight_N: Tensor | None) -> Tensor:
    return rows_PL.new_empty(first_X.shape[0], rows_PL.shape[1])


def segment_sum_reference(rows_PL: Tensor, row_N: Tensor, first_X: Tensor, weight_N: Tensor | None) -> Tensor:
    """The reference: a loop over sums, in float64."""
    weight_N = torch.ones_like(row_N, dtype=rows_PL.dtype) if weight_N is None else weight_N.to(rows_PL.dtype)
    ends = [*first_X.tolist()[1:], row_N.shape[0]]
    sums = [
        (rows_PL[row_N[start:stop]].double() * weight_N[start:stop, None].double()).sum(0)
        for start, stop in zip(first_X.tolist(), ends, strict=True)
    ]
    return torch.stack(sums).to(rows_PL.dtype) if sums else rows_PL.new_zeros(0, rows_PL.shape[1])
