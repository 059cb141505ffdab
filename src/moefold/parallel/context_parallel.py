"""Attention when a rank holds only some tokens of each document: three ways to reach the others.

Ring: keys and values travel, heads stay together; any number of heads will do. All-to-all: each rank takes some heads
and sees all tokens; two exchanges and no merging, but no more ranks than heads can be of use. Hierarchical: all-to-all
among neighbours, where links are fast, and a ring across the sets of neighbours.

Tokens are dealt in zigzag (``batching/zigzag.py``). A batch names the number of ranks it is spread over, and a core
knows this rank's group of every size it may meet. Gradients of sinks are this rank's part: they add up over the group,
like those of every other parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moefold.attention.core import AttentionCore
from moefold.attention.sdpa import attend
from moefold.comm.process_groups import Group
from moefold.nn.batch import Batch
from moefold.parallel.ring_attention import ring_attend
from moefold.parallel.ring_plan import around
from moefold.parallel.ulysses import HeadTrade

# By context size: the neighbours to trade heads with, and the ranks to go around; None where there is nobody.
Ways = Mapping[int, tuple[Group | None, Group | None]]


def by_ring(contexts: Mapping[int, Group]) -> Ways:
    """Keys and values go around all ranks."""
    return {size: (None, group) for size, group in contexts.items()}


def by_heads(contexts: Mapping[int, Group]) -> Ways:
    """Each rank takes a share of the heads and sees all tokens."""
    return {size: (group, None) for size, group in contexts.items()}


class ContextCore:
    """Attends over ranks that share documents.

    Where there are both groups, context rank i is number i % inner of set i // inner: heads are traded inside a set,
    and a ring runs across the sets.
    """

    def __init__(self, ways: Ways) -> None:
        self.ways = ways

    def __call__(
        self,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        traders, ring = (None, None) if batch.context_size == 1 else self.ways[batch.context_size]
        return _attend_over(traders, ring, q_THd, k_TGd, v_TGv, batch, scale, window, sinks_H)


class PerLayerCore:
    """One way for layers that see everything, another for those that look through a window."""

    def __init__(self, full: AttentionCore, windowed: AttentionCore) -> None:
        self.full, self.windowed = full, windowed

    def __call__(
        self,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        core = self.full if window is None else self.windowed
        return core(q_THd, k_TGd, v_TGv, batch, scale=scale, window=window, sinks_H=sinks_H)


def _attend_over(
    traders: Group | None,
    ring: Group | None,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Trade heads for tokens among neighbours, if there are any; go around the others, if there are any; trade back."""
    if traders is None or traders.alone:
        return _around(ring, 1, q_THd, k_TGd, v_TGv, batch, scale, window, sinks_H)
    first = 0 if ring is None else ring.index * traders.size
    trade = HeadTrade(traders, batch.lengths, first, batch.context_size, q_THd.shape[1], k_TGd.shape[1])
    sinks_h = None if sinks_H is None else trade.of_heads(sinks_H)
    q, k, v = trade.to_heads(q_THd, k_TGd, v_TGv)
    return trade.to_tokens(_around(ring, traders.size, q, k, v, batch, scale, window, sinks_h))


def _around(
    ring: Group | None,
    ranks_per_member: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    if ring is None or ring.alone:
        return attend(q, k, v, batch.lengths, scale, window, sinks)
    steps = around(batch.lengths, batch.context_size, ranks_per_member, ring.index, window)
    tokens = sum(batch.lengths) // ring.size
    return ring_attend(q, k, v, sinks, group=ring, steps=steps, scale=scale, window=window, mean_tokens=tokens)
