"""Ulysses: an all-to-all that turns token shards with all heads into head shards with all tokens, and back.

One all-to-all carries queries, keys and values, counted in elements, so that neither tokens nor heads need to divide
evenly. Each rank gets consecutive query heads, and the key/value heads that these attend to; where there are fewer
key/value heads than ranks, several ranks get the same one, and its gradients are summed at its owner. Tokens arrive
ordered by rank; ``document_order`` puts them into document order.

With ``parallel.overlap: [ulysses]`` tokens travel in chunks on a stream of their own (``UlyssesInChunks``), as in the
attention of MegaScale-MoE (GEMM+A2A before it, A2A+GEMM after it). Chunk c is the c-th part of every rank's tokens:

    comm             | qkv 0 | qkv 1 |           | out 0 | out 1 |
    compute   qkv 0  | qkv 1 |         attention         | out 0   | out 1

The backward is the mirror (`moe/exchange_beside.py`): gradients of a chunk travel beside both matmuls, of inputs and of
weights, of another. One chunk at once is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from moefold.attention.core import Heads
from moefold.batching.zigzag import Span, held_spans, num_held
from moefold.comm.collectives import all_to_all_rows
from moefold.comm.process_groups import Group
from moefold.moe.exchange_beside import ExchangesBeside, PendingExchange
from moefold.nn.batch import Batch
from moefold.topology.folded_layout import chunk_sizes, shard_sizes

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class HeadAllToAll:
    """The all-to-all of one group; ``tokens`` of each of its ranks."""

    group: Group
    tokens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int

    def tokens_to_heads(self, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[A, h, C], [A, j, C] and [A, j, U], the tokens ordered by rank; ``repeat_kv`` completes keys and values."""
        qkv = (q_SHC, k_SJC, v_SJU)
        heads = [x.unbind(1) for x in qkv]
        sent, counts = [], []
        for spans in zip(self._q_heads, self._kv_heads, self._kv_heads):
            for_peer = [head.flatten() for mine, (a, b) in zip(heads, spans) for head in mine[a:b]]
            sent += for_peer
            counts.append(sum(head.numel() for head in for_peer))
        num_heads = [_span_size(spans[self.group.index]) for spans in (self._q_heads, self._kv_heads, self._kv_heads)]
        shapes = [[(count, tokens, x.shape[-1]) for count, x in zip(num_heads, qkv)] for tokens in self.tokens]
        arriving = tuple(sum(a * b * c for a, b, c in of_peer) for of_peer in shapes)
        flat = torch.cat(sent) if sent else q_SHC.new_empty(0)
        received = all_to_all_rows(flat, send=tuple(counts), recv=arriving, group=self.group)
        pieces = iter(received.split([a * b * c for of_peer in shapes for a, b, c in of_peer]))
        by_peer = [[next(pieces).view(shape).transpose(0, 1) for shape in of_peer] for of_peer in shapes]
        q, k, v = map(torch.cat, zip(*by_peer))
        return q, k, v

    def heads_to_tokens(self, out_AhU: Tensor) -> Tensor:
        """[S, H, U]: all heads of this rank's tokens, from tokens ordered by rank."""
        value_dim, mine = out_AhU.shape[-1], self.tokens[self.group.index]
        recv = tuple(mine * _span_size(span) * value_dim for span in self._q_heads)
        send = tuple(tokens * out_AhU.shape[1] * value_dim for tokens in self.tokens)
        received = all_to_all_rows(out_AhU.flatten(), send=send, recv=recv, group=self.group)
        shares = [x.view(mine, -1, value_dim) for x in received.split(recv)] if mine else []
        return torch.cat(shares, dim=1) if mine else received.view(0, self.num_heads, value_dim)

    def local_heads(self, x_H: Tensor) -> Tensor:
        """This rank's heads of a tensor with one entry per head."""
        return x_H.split([_span_size(span) for span in self._q_heads])[self.group.index]

    def repeat_kv(self, x_AjC: Tensor) -> Tensor:
        """Unchanged where this rank's query heads are whole groups of a key/value head; else a copy per query head."""
        q_per_kv = self.num_heads // self.num_kv_heads
        start, stop = self._q_heads[self.group.index]
        if x_AjC.shape[1] <= 1 or (start % q_per_kv == 0 and stop % q_per_kv == 0):
            return x_AjC
        kv_start = start // q_per_kv
        heads = x_AjC.unbind(1)
        return torch.stack([heads[head // q_per_kv - kv_start] for head in range(start, stop)], dim=1)

    @property
    def _q_heads(self) -> tuple[Span, ...]:
        return query_head_spans(self.num_heads, self.group.size)

    @property
    def _kv_heads(self) -> tuple[Span, ...]:
        return kv_head_spans(self.num_heads, self.num_kv_heads, self.group.size)


# Of this rank's heads of all tokens, in document order, and its sinks.
AttendHeads = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class UlyssesChunks:
    """How tokens go in chunks: over ``groups`` by context size, which no other thread uses."""

    groups: Mapping[int, Group]
    count: int
    exchanges: ExchangesBeside


class UlyssesInChunks:
    """The all-to-alls of one batch in chunks of its tokens."""

    def __init__(self, chunks: UlyssesChunks, batch: Batch, attend: AttendHeads) -> None:
        self.chunks, self.attend_heads = chunks, attend
        self.group, self.lengths = chunks.groups[batch.context_size], batch.lengths
        # By chunk, of every rank.
        self.tokens = chunk_sizes(tokens_per_rank(self.lengths, 0, self.group.size, self.group.size), chunks.count)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(tokens[self.group.index] for tokens in self.tokens)

    def attend(self, heads: Iterator[Heads], sinks_H: Tensor | None = None) -> Iterator[Tensor]:
        start, each, going = self.chunks.exchanges.start, list[HeadAllToAll](), list[PendingExchange]()
        for tokens, qkv in zip(self.tokens, heads, strict=True):
            each.append(HeadAllToAll(self.group, tokens, qkv[0].shape[1], qkv[1].shape[1]))
            going.append(start(partial(_to_heads, each[-1]), qkv))
        arrived = [pending.wait() for pending in going]
        device = arrived[0][0].device
        order = chunk_order(self.lengths, self.group.size, self.chunks.count).to(device, non_blocking=True)
        q, k, v = (torch.cat(of_kind).index_select(0, order) for of_kind in zip(*arrived))
        del arrived
        sinks_h = None if sinks_H is None else each[0].local_heads(sinks_H)
        out_AhU = self.attend_heads(q, each[0].repeat_kv(k), each[0].repeat_kv(v), sinks_h)
        parts = out_AhU.index_select(0, order.argsort()).split([sum(tokens) for tokens in self.tokens])
        # All leave before the first is waited for.
        returning = [start(exchange.heads_to_tokens, part) for exchange, part in zip(each, parts, strict=True)]
        for pending in returning:
            yield pending.wait()


def _to_heads(exchange: HeadAllToAll, qkv: Heads) -> Heads:
    return exchange.tokens_to_heads(*qkv)


def query_head_spans(num_heads: int, num_ranks: int) -> tuple[Span, ...]:
    stops = tuple(accumulate(shard_sizes(num_heads, num_ranks)))
    return tuple(zip((0, *stops[:-1]), stops))


def kv_head_spans(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[Span, ...]:
    """The key/value heads that each rank's query heads attend to; two ranks may have the same one."""
    q_per_kv = num_heads // num_kv_heads
    spans = query_head_spans(num_heads, num_ranks)
    return tuple((a // q_per_kv, -(-b // q_per_kv)) if a < b else (0, 0) for a, b in spans)


@lru_cache(maxsize=128)
def tokens_per_rank(lengths: Lengths, first: int, count: int, size: int) -> tuple[int, ...]:
    return tuple(num_held(lengths, index, size) for index in range(first, first + count))


@lru_cache(maxsize=128)
def document_order(lengths: Lengths, first: int, count: int, size: int) -> Tensor:
    """The permutation that takes rows ordered by rank to document order."""
    held = [torch.arange(*span) for index in range(first, first + count) for span in held_spans(lengths, index, size)]
    return torch.cat([torch.arange(0), *held]).argsort()


@lru_cache(maxsize=128)
def chunk_order(lengths: Lengths, size: int, chunks: int) -> Tensor:
    """The permutation that takes rows ordered by chunk, and in a chunk by rank, to document order."""
    tokens = tokens_per_rank(lengths, 0, size, size)
    # Numbers of rows ordered by rank, chunk by chunk.
    by_rank = torch.arange(sum(tokens)).split(
        [part for of_rank in zip(*chunk_sizes(tokens, chunks)) for part in of_rank]
    )
    num_chunks = len(by_rank) // size
    by_chunk = [by_rank[rank * num_chunks + chunk] for chunk in range(num_chunks) for rank in range(size)]
    return torch.cat(by_chunk).argsort()[document_order(lengths, 0, size, size)]


def _span_size(span: Sequence[int]) -> int:
    return span[1] - span[0]
