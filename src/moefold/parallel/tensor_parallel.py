"""Tensor and sequence parallelism: the interfaces of ``nn/parallel_interfaces.py`` on process groups.

Between attention and feed-forward the tokens of a microbatch are sharded over the tp ranks, in contiguous shards that
need not be equal. Matmuls that are sharded by heads or hidden dim need all tokens, so they stand between a ``gather``
and a ``reduce``. The head and the loss are sharded by vocabulary; every tp rank computes the same loss.

With ``parallel.overlap: [tensor_parallel]`` both go in chunks (``ChunkedTokenShards``), on a stream of their own:

    comm      gather 0, gather 1 |          | reduce 0   | reduce 1
    compute                      | matmul 0 | matmul 1   |

Chunk c is the c-th part of every rank's shard, so what is gathered is not in the tokens' order: a feed-forward computes
in the order of chunks and needs no other, attention puts queries, keys and values in order and its output back. The
backward is the mirror (`moe/exchange_beside.py`): the gradients of a chunk arrive, or leave to be summed, beside both
matmuls (of inputs and of weights) of another. ``TokenShards`` is the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

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
from moefold.comm.p2p import CommStream
from moefold.comm.process_groups import Group, Groups
from moefold.moe.exchange_beside import ExchangesBeside
from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import OneChunk, Reach
from moefold.topology.folded_layout import chunk_sizes, shard_sizes


class TokenShards(OneChunk):
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


class ChunkedTokenShards(TokenShards):
    """Tokens before and after sharded matmuls travel in chunks, each beside the matmuls of another."""

    def __init__(
        self,
        groups: Groups,
        sums: SumFormat | None,
        grad_sums: SumFormat | None,
        chunks: int,
        stream: CommStream,
    ) -> None:
        super().__init__(groups, sums, grad_sums)
        # Of the same ranks, with a process group of its own: other collectives of this axis run on another thread.
        self.beside_tp = groups.beside_tp
        self.num_chunks, self.exchanges = chunks, ExchangesBeside(stream)

    def gather_chunks(self, batch: Batch, *x_tX: Tensor) -> Iterator[tuple[Tensor, ...]]:
        chunks = self.chunk_sizes(batch.num_tokens)
        mine = [x.split([sizes[self.tp.index] for sizes in chunks]) for x in x_tX]
        # All leave before the first is waited for; those of one chunk follow each other.
        started = [
            tuple(self.exchanges.start(partial(self._gather_one, sizes), part) for part in parts)
            for sizes, *parts in zip(chunks, *mine, strict=True)
        ]
        for pending in started:
            yield tuple(each.wait() for each in pending)

    def reduce_chunks(self, partial_SD: Iterable[Tensor], batch: Batch) -> Tensor:
        chunks = self.chunk_sizes(batch.num_tokens)
        started = [
            self.exchanges.start(partial(self._reduce_one, sizes), part)
            for sizes, part in zip(chunks, partial_SD, strict=True)
        ]
        return torch.cat([pending.wait() for pending in started])

    def split_chunks(self, per_token: Tensor) -> tuple[Tensor, ...]:
        chunks = self.chunk_sizes(len(per_token))
        if len(chunks) == 1:
            return (per_token,)
        pieces = per_token.split([size for of_rank in zip(*chunks, strict=True) for size in of_rank])
        return tuple(torch.cat(pieces[chunk :: len(chunks)]) for chunk in range(len(chunks)))

    def join_chunks(self, chunks: Sequence[Tensor]) -> Tensor:
        if len(chunks) == 1:
            return chunks[0]
        sizes = self.chunk_sizes(sum(map(len, chunks)))
        pieces = [chunk.split(of_chunk) for chunk, of_chunk in zip(chunks, sizes, strict=True)]
        return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])

    def chunk_sizes(self, num_tokens: int) -> list[tuple[int, ...]]:
        """By chunk, of every rank."""
        return chunk_sizes(self._sizes(num_tokens), self.num_chunks)

    def _gather_one(self, sizes: tuple[int, ...], chunk: Tensor) -> Tensor:
        return all_gather_rows(chunk, sizes, self.beside_tp, self.grad_sums)

    def _reduce_one(self, sizes: tuple[int, ...], part: Tensor) -> Tensor:
        return reduce_scatter_rows(part, sizes, self.beside_tp, self.sums)


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
