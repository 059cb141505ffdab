"""Ulysses: an all-to-all that turns token shards with all heads into head shards with all tokens, and back.

One all-to-all carries queries, keys and values, counted in elements, so that neither tokens nor heads need to divide
evenly. Each rank gets consecutive query heads, and the key/value heads that these attend to; where there are fewer
key/value heads than ranks, several ranks get the same one, and its gradients are summed at its owner. Tokens arrive
ordered by rank and are permuted into document order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from moefold.batching.zigzag import Span, held_spans, num_held
from moefold.comm.collectives import all_to_all_rows
from moefold.comm.process_groups import Group
from moefold.topology.folded_layout import shard_sizes

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class HeadAllToAll:
    """The all-to-all of one group; ``first`` is the context index of its first rank, ``size`` the context size."""

    group: Group
    lengths: Lengths
    first: int
    size: int
    num_heads: int
    num_kv_heads: int

    def tokens_to_heads(self, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[A, h, C], [A, j, C] and [A, j, U], the tokens in document order."""
        qkv = (q_SHC, k_SJC, v_SJU)
        heads = [x.unbind(1) for x in qkv]
        sent, counts = [], []
        for spans in zip(self._q_heads, self._kv_heads, self._kv_heads):
            for_peer = [head.flatten() for mine, (a, b) in zip(heads, spans) for head in mine[a:b]]
            sent += for_peer
            counts.append(sum(head.numel() for head in for_peer))
        num_heads = [_span_size(spans[self.group.index]) for spans in (self._q_heads, self._kv_heads, self._kv_heads)]
        shapes = [[(count, tokens, x.shape[-1]) for count, x in zip(num_heads, qkv)] for tokens in self._tokens]
        arriving = tuple(sum(a * b * c for a, b, c in of_peer) for of_peer in shapes)
        flat = torch.cat(sent) if sent else q_SHC.new_empty(0)
        received = all_to_all_rows(flat, send=tuple(counts), recv=arriving, group=self.group)
        pieces = iter(received.split([a * b * c for of_peer in shapes for a, b, c in of_peer]))
        by_peer = [[next(pieces).view(shape).transpose(0, 1) for shape in of_peer] for of_peer in shapes]
        order = self._order.to(q_SHC.device, non_blocking=True)
        q, k, v = (torch.cat(of_kind).index_select(0, order) for of_kind in zip(*by_peer))
        return q, self._repeat_kv(k), self._repeat_kv(v)

    def heads_to_tokens(self, out_AhU: Tensor) -> Tensor:
        """[S, H, U]: all heads of this rank's tokens."""
        order = self._order.argsort().to(out_AhU.device, non_blocking=True)
        rows = out_AhU.index_select(0, order)
        value_dim, mine = rows.shape[-1], self._tokens[self.group.index]
        recv = tuple(mine * _span_size(span) * value_dim for span in self._q_heads)
        send = tuple(tokens * rows.shape[1] * value_dim for tokens in self._tokens)
        received = all_to_all_rows(rows.flatten(), send=send, recv=recv, group=self.group)
        shares = [x.view(mine, -1, value_dim) for x in received.split(recv)] if mine else []
        return torch.cat(shares, dim=1) if mine else received.view(0, self.num_heads, value_dim)

    def local_heads(self, x_H: Tensor) -> Tensor:
        """This rank's heads of a tensor with one entry per head."""
        return x_H.split([_span_size(span) for span in self._q_heads])[self.group.index]

    def _repeat_kv(self, x_AjC: Tensor) -> Tensor:
        """Unchanged where this rank's query heads are whole groups of a key/value head; else a copy per query head."""
        q_per_kv = self.num_heads // self.num_kv_heads
        start, stop = self._q_heads[self.group.index]
        if x_AjC.shape[1] <= 1 or (start % q_per_kv == 0 and stop % q_per_kv == 0):
            return x_AjC
        kv_start = start // q_per_kv
        heads = x_AjC.unbind(1)
        return torch.stack([heads[head // q_per_kv - kv_start] for head in range(start, stop)], dim=1)

    @property
    def _tokens(self) -> tuple[int, ...]:
        return tokens_per_rank(self.lengths, self.first, self.group.size, self.size)

    @property
    def _q_heads(self) -> tuple[Span, ...]:
        return query_head_spans(self.num_heads, self.group.size)

    @property
    def _kv_heads(self) -> tuple[Span, ...]:
        return kv_head_spans(self.num_heads, self.num_kv_heads, self.group.size)

    @property
    def _order(self) -> Tensor:
        return document_order(self.lengths, self.first, self.group.size, self.size)


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


def _span_size(span: Sequence[int]) -> int:
    return span[1] - span[0]
