"""Tensor and sequence parallelism: the interfaces of ``nn/parallel_interfaces.py`` on process groups.

Between attention and feed-forward the tokens of a microbatch are sharded over the tp ranks, in contiguous shards that
need not be equal. Matmuls that are sharded by heads or hidden dim need all tokens, so they stand between a ``gather``
and a ``reduce``. The head and the loss are sharded by vocabulary; every tp rank computes the same loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import (
    all_gather_no_grad,
    all_gather_replicated,
    all_gather_rows,
    all_reduce_no_grad,
    all_reduce_partial,
    all_reduce_replicated,
    reduce_scatter_rows,
)
from moefold.comm.message_codecs import SumFormat
from moefold.comm.process_groups import Group, Groups
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import Reach
from moefold.topology.folded_layout import shard_sizes


class TokenShards:
    """The tokens of a microbatch, sharded over its context ranks, and each context shard over the tp ranks."""

    def __init__(self, groups: Groups, sums: SumFormat | None = None, grad_sums: SumFormat | None = None) -> None:
        """How ``reduce`` and ``gather``'s backward sum; None is in at least float32."""
        self.tp, self.stage, self.contexts = groups["tp"], groups["stage"], groups.contexts
        self.sums, self.grad_sums = sums, grad_sums

    def gather(self, x_tD: Tensor, batch: Batch) -> Tensor:
        return all_gather_rows(x_tD, self._sizes(batch.num_tokens), self.tp, self.grad_sums)

    def reduce(self, x_SD: Tensor) -> Tensor:
        return reduce_scatter_rows(x_SD, self._sizes(x_SD.shape[0]), self.tp, self.sums)

    def all_gather(self, x_t: Tensor, batch: Batch) -> Tensor:
        if x_t.dtype == torch.bool:
            return self.all_gather(x_t.byte(), batch).bool()
        held_S = all_gather_no_grad(x_t, self._sizes(batch.num_tokens), self.tp)
        if batch.context_size == 1:
            return held_S
        by_rank_T = all_gather_no_grad(held_S, batch.held_sizes, self.contexts[batch.context_size])
        return torch.empty_like(by_rank_T).index_copy_(0, batch.order_T, by_rank_T)

    def local_shard(self, x_T: Tensor, batch: Batch) -> Tensor:
        return self.tp_shard(x_T if batch.place_S is None else x_T[batch.place_S])

    def tp_shard(self, x_S: Tensor) -> Tensor:
        return x_S.split(self._sizes(x_S.shape[0]))[self.tp.index]

    def head_rows(self, num_rows: int) -> slice:
        each = num_rows // self.tp.size
        return slice(self.tp.index * each, (self.tp.index + 1) * each)

    def sum_heads(self, x: Tensor) -> Tensor:
        return all_reduce_partial(x, self.tp)

    def sum_counts(self, counts: Tensor, reach: Reach, batch: Batch) -> Tensor:
        if reach == "everyone":
            return all_reduce_no_grad(counts, self.stage)
        counts = all_reduce_no_grad(counts, self.tp)
        return counts if batch.context_size == 1 else all_reduce_no_grad(counts, self.contexts[batch.context_size])

    def _sizes(self, num_tokens: int) -> tuple[int, ...]:
        return shard_sizes(num_tokens, self.tp.size)


class VocabShards:
    """The vocabulary, sharded over the tp ranks in equal contiguous ranges."""

    def __init__(self, tp: Group) -> None:
        self.tp = tp

    def first_row(self, num_rows: int) -> int:
        return self.tp.index * num_rows

    def merge_logsumexp(self, lse_S: Tensor) -> Tensor:
        parts_WS = all_gather_replicated(lse_S.unsqueeze(0), (1,) * self.tp.size, self.tp)
        return parts_WS.logsumexp(0)

    def merge_sum(self, x_S: Tensor) -> Tensor:
        return all_reduce_replicated(x_S, self.tp)
