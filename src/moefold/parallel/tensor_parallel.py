"""Tensor and sequence parallelism: the seams of ``nn/parallel_interfaces.py`` on real groups.

N tokens of a microbatch, T of them in this rank's context share, t of those on this rank, D width.

Between attention and feed-forward the tokens of a microbatch are cut over the tp ranks, in contiguous shares that need
not be equal. Matmuls that are cut by heads or hidden width need all tokens, so they stand between a ``gather`` and a
``reduce``. The head and the loss are cut by vocabulary; every tp rank ends with the same loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import (
    gather_plain,
    gather_rows,
    gather_same,
    reduce_rows,
    sum_partial,
    sum_plain,
    sum_same,
)
from moefold.comm.process_groups import Group, Groups
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import Reach
from moefold.topology.shares import share_sizes


class TokenShards:
    """The tokens of a microbatch, cut over the context ranks that share it, and each share over the tp ranks."""

    def __init__(self, groups: Groups) -> None:
        self.tp, self.stage, self.contexts = groups["tp"], groups["stage"], groups.contexts

    def gather(self, x_tD: Tensor, batch: Batch) -> Tensor:
        return gather_rows(x_tD, self._sizes(batch.num_tokens), self.tp)

    def reduce(self, x_TD: Tensor) -> Tensor:
        return reduce_rows(x_TD, self._sizes(x_TD.shape[0]), self.tp)

    def whole(self, x_t: Tensor, batch: Batch) -> Tensor:
        if x_t.dtype == torch.bool:
            return self.whole(x_t.byte(), batch).bool()
        held_T = gather_plain(x_t, self._sizes(batch.num_tokens), self.tp)
        if batch.context_size == 1:
            return held_T
        by_rank_N = gather_plain(held_T, batch.held_sizes, self.contexts[batch.context_size])
        return torch.empty_like(by_rank_N).index_copy_(0, batch.order_N, by_rank_N)

    def mine(self, x_N: Tensor, batch: Batch) -> Tensor:
        return self.share(x_N if batch.place_T is None else x_N[batch.place_T])

    def share(self, x_T: Tensor) -> Tensor:
        return x_T.split(self._sizes(x_T.shape[0]))[self.tp.index]

    def sum_heads(self, x: Tensor) -> Tensor:
        return sum_partial(x, self.tp)

    def sum_counts(self, counts: Tensor, reach: Reach, batch: Batch) -> Tensor:
        if reach == "everyone":
            return sum_plain(counts, self.stage)
        counts = sum_plain(counts, self.tp)
        return counts if batch.context_size == 1 else sum_plain(counts, self.contexts[batch.context_size])

    def _sizes(self, num_tokens: int) -> tuple[int, ...]:
        return share_sizes(num_tokens, self.tp.size)


class VocabShards:
    """The vocabulary, cut over the tp ranks in equal contiguous parts."""

    def __init__(self, tp: Group) -> None:
        self.tp = tp

    def first_row(self, num_rows: int) -> int:
        return self.tp.index * num_rows

    def merge_logsumexp(self, lse_T: Tensor) -> Tensor:
        parts_PT = gather_same(lse_T.unsqueeze(0), (1,) * self.tp.size, self.tp)
        return parts_PT.logsumexp(0)

    def merge_sum(self, x_T: Tensor) -> Tensor:
        return sum_same(x_T, self.tp)
