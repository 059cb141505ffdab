"""Heads for tokens: each rank gives away most heads of its tokens and gets the other tokens of its own heads.

T tokens on this rank, W tokens of all ranks of the group together, H query heads, G key/value heads, h and g those of
this rank, d query and key entries, v value entries.

One all-to-all carries queries, keys and values, element by element, so that neither tokens nor heads need to divide
evenly. The peers' query heads are consecutive shares; with them go the key/value heads that they look at, so where
there are fewer of those than ranks, several ranks get the same one and its gradients add up at home. Tokens arrive in
the order of their owners and are put into the order of the documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from moefold.batching.zigzag import Span, num_held, places
from moefold.comm.collectives import all_to_all_rows
from moefold.comm.process_groups import Group
from moefold.topology.shares import share_sizes

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class HeadTrade:
    """What the ranks of a group give each other: ``first`` is the context index of the group's first rank."""

    group: Group
    lengths: Lengths
    first: int
    size: int
    num_heads: int
    num_kv_heads: int

    def to_heads(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[W, h, d], [W, g, d] and [W, g, v], the tokens in document order."""
        kinds = (q_THd, k_TGd, v_TGv)
        heads = [x.unbind(1) for x in kinds]
        given, counts = [], []
        for wanted in zip(self._q_heads, self._kv_heads, self._kv_heads):
            for_peer = [head.flatten() for mine, (a, b) in zip(heads, wanted) for head in mine[a:b]]
            given += for_peer
            counts.append(sum(head.numel() for head in for_peer))
        here = self.group.index
        num_heads = [_width(spans[here]) for spans in (self._q_heads, self._kv_heads, self._kv_heads)]
        shapes = [[(count, tokens, x.shape[-1]) for count, x in zip(num_heads, kinds)] for tokens in self._tokens]
        arriving = tuple(sum(a * b * c for a, b, c in of_peer) for of_peer in shapes)
        flat = torch.cat(given) if given else q_THd.new_empty(0)
        got = all_to_all_rows(flat, send=tuple(counts), recv=arriving, group=self.group)
        pieces = iter(got.split([a * b * c for of_peer in shapes for a, b, c in of_peer]))
        by_peer = [[next(pieces).view(shape).transpose(0, 1) for shape in of_peer] for of_peer in shapes]
        order = self._order.to(q_THd.device, non_blocking=True)
        q, k, v = (torch.cat(of_kind).index_select(0, order) for of_kind in zip(*by_peer))
        return q, self._for_each_query_head(k), self._for_each_query_head(v)

    def to_tokens(self, seen_Whv: Tensor) -> Tensor:
        """[T, H, v]: everyone's heads of my tokens."""
        order = self._order.argsort().to(seen_Whv.device, non_blocking=True)
        rows = seen_Whv.index_select(0, order)
        value_dim, mine = rows.shape[-1], self._tokens[self.group.index]
        recv = tuple(mine * _width(span) * value_dim for span in self._q_heads)
        send = tuple(tokens * rows.shape[1] * value_dim for tokens in self._tokens)
        got = all_to_all_rows(rows.flatten(), send=send, recv=recv, group=self.group)
        shares = [x.view(mine, -1, value_dim) for x in got.split(recv)] if mine else []
        return torch.cat(shares, dim=1) if mine else got.view(0, self.num_heads, value_dim)

    def of_heads(self, x_H: Tensor) -> Tensor:
        """This rank's heads of something that every head has one of."""
        return x_H.split([_width(span) for span in self._q_heads])[self.group.index]

    def _for_each_query_head(self, x_Wgd: Tensor) -> Tensor:
        """As it is where query heads fall into equal groups by the head they look at; else one copy for each."""
        shared_by = self.num_heads // self.num_kv_heads
        start, stop = self._q_heads[self.group.index]
        if x_Wgd.shape[1] <= 1 or (start % shared_by == 0 and stop % shared_by == 0):
            return x_Wgd
        kv_start = start // shared_by
        heads = x_Wgd.unbind(1)
        return torch.stack([heads[head // shared_by - kv_start] for head in range(start, stop)], dim=1)

    @property
    def _tokens(self) -> tuple[int, ...]:
        return tokens_of(self.lengths, self.first, self.group.size, self.size)

    @property
    def _q_heads(self) -> tuple[Span, ...]:
        return query_head_spans(self.num_heads, self.group.size)

    @property
    def _kv_heads(self) -> tuple[Span, ...]:
        return kv_head_spans(self.num_heads, self.num_kv_heads, self.group.size)

    @property
    def _order(self) -> Tensor:
        return document_order(self.lengths, self.first, self.group.size, self.size)


def query_head_spans(num_heads: int, takers: int) -> tuple[Span, ...]:
    stops = tuple(accumulate(share_sizes(num_heads, takers)))
    return tuple(zip((0, *stops[:-1]), stops))


def kv_head_spans(num_heads: int, num_kv_heads: int, takers: int) -> tuple[Span, ...]:
    """The key/value heads that each taker's query heads look at; neighbours may share one."""
    shared_by = num_heads // num_kv_heads
    spans = query_head_spans(num_heads, takers)
    return tuple((a // shared_by, -(-b // shared_by)) if a < b else (0, 0) for a, b in spans)


@lru_cache(maxsize=128)
def tokens_of(lengths: Lengths, first: int, count: int, size: int) -> tuple[int, ...]:
    return tuple(num_held(lengths, index, size) for index in range(first, first + count))


@lru_cache(maxsize=128)
def document_order(lengths: Lengths, first: int, count: int, size: int) -> Tensor:
    """Rows of these ranks, one rank after the other: which of them is the first of the documents, the second, ..."""
    held = [torch.arange(*span) for index in range(first, first + count) for span in places(lengths, index, size)]
    return torch.cat([torch.arange(0), *held]).argsort()


def _width(span: Sequence[int]) -> int:
    return span[1] - span[0]
