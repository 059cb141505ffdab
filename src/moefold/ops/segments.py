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
    one_N = torch.ones_like(key_N) if item_N is None else item_N.to(key_N.dtype)
    return torch.zeros(num_segments, dtype=key_N.dtype, device=key_N.device).index_add(0, key_N, one_N)


def rank_within_key(key_N: Tensor, num_segments: int, priority_N: Tensor | None = None) -> Tensor:
    """How many items with the same key come before each item: higher priority first, then earlier position.

    After a sort by key, an item's rank is its position minus the start of its key's run.
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
    """The stable argsort by key. 16-bit keys sort several times faster."""
    return key_N.to(torch.int16 if num_segments < 2**15 else torch.int64).argsort(stable=True)


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
