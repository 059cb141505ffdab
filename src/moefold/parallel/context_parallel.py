"""Context parallelism: attention when a rank holds only some tokens of each document, in three ways.

Ring: keys and values travel around the ranks; works for any number of heads. All-to-all (Ulysses): each rank attends
with some heads to all tokens; two all-to-alls and no merging, but at most as many ranks as heads. Hierarchical:
all-to-all among consecutive ranks, where links are fast, and a ring across these sets.

Tokens are sharded in zigzag (``batching/zigzag.py``). A batch says over how many ranks it is sharded, and a core has
this rank's group of every size that occurs. The gradient of sinks is partial: it is summed over the group, like that
of every other parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moefold.attention.core import AllTokensAtOnce, AttentionCore, HeadsInChunks
from moefold.attention.mask_blocks import chunk_lengths
from moefold.attention.varlen import VarlenAttention
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.comm.process_groups import Group
from moefold.nn.batch import Batch
from moefold.parallel.ring_attention import ring_attend
from moefold.parallel.ring_plan import ring_steps
from moefold.parallel.ulysses import HeadAllToAll, UlyssesChunks, UlyssesInChunks, document_order, tokens_per_rank

# By context size: the group for the all-to-all of heads, and the group of the ring; None where there is none.
ContextGroups = Mapping[int, tuple[Group | None, Group | None]]


def ring_groups(contexts: Mapping[int, Group]) -> ContextGroups:
    """A ring over all ranks of each group."""
    return {size: (None, group) for size, group in contexts.items()}


def ulysses_groups(contexts: Mapping[int, Group]) -> ContextGroups:
    """An all-to-all of heads over all ranks of each group."""
    return {size: (group, None) for size, group in contexts.items()}


class ContextParallelCore(AllTokensAtOnce):
    """Attention over the ranks of a context group: all-to-all to head shards, local or ring attention, and back.

    Where there are both groups, context rank i is number i % inner of set i // inner: the all-to-all of heads is inside
    a set, and a ring runs across the sets.
    """

    def __init__(self, groups: ContextGroups, attention: VarlenAttention | None = None) -> None:
        self.groups = groups
        self.attention = attention or SdpaAttention()

    def __call__(
        self,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
        chunk: int | None = None,
    ) -> Tensor:
        head_group, ring = (None, None) if batch.context_size == 1 else self.groups[batch.context_size]
        if head_group is None or head_group.alone:
            return self._ring_or_local(ring, 1, q_SHC, k_SJC, v_SJU, batch, scale, window, sinks_H, chunk)
        first = 0 if ring is None else ring.index * head_group.size
        where = batch.lengths, first, head_group.size, batch.context_size
        heads = HeadAllToAll(head_group, tokens_per_rank(*where), q_SHC.shape[1], k_SJC.shape[1])
        order = document_order(*where).to(q_SHC.device, non_blocking=True)
        sinks_h = None if sinks_H is None else heads.local_heads(sinks_H)
        q, k, v = (x.index_select(0, order) for x in heads.tokens_to_heads(q_SHC, k_SJC, v_SJU))
        k, v = heads.repeat_kv(k), heads.repeat_kv(v)
        out_AhU = self._ring_or_local(ring, head_group.size, q, k, v, batch, scale, window, sinks_h, chunk)
        return heads.heads_to_tokens(out_AhU.index_select(0, order.argsort()))

    def _ring_or_local(
        self,
        ring: Group | None,
        ranks_per_member: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        chunk: int | None,
    ) -> Tensor:
        if ring is None or ring.alone:
            return self.attention.attend(q, k, v, chunk_lengths(batch.lengths, chunk), scale, window, sinks)
        steps = ring_steps(batch.lengths, batch.context_size, ranks_per_member, ring.index, window, chunk)
        tokens = sum(batch.lengths) // ring.size
        return ring_attend(
            q, k, v, sinks, group=ring, steps=steps, scale=scale, mean_tokens=tokens, attention=self.attention
        )


class ChunkedUlyssesCore(ContextParallelCore):
    """All-to-alls of heads in chunks of tokens, each beside the matmuls before and after attention of another."""

    def __init__(
        self, contexts: Mapping[int, Group], chunks: UlyssesChunks, attention: VarlenAttention | None = None
    ) -> None:
        super().__init__(ulysses_groups(contexts), attention)
        self.chunks = chunks

    def in_chunks(
        self, batch: Batch, *, scale: float, window: int | None, chunk: int | None = None
    ) -> HeadsInChunks | None:
        if batch.context_size == 1:
            return None
        lengths = chunk_lengths(batch.lengths, chunk)
        return UlyssesInChunks(
            self.chunks, batch, lambda q, k, v, sinks: self.attention.attend(q, k, v, lengths, scale, window, sinks)
        )


class PerLayerCore:
    """One core for layers with full attention, another for those with a sliding window or with chunks."""

    def __init__(self, full: AttentionCore, windowed: AttentionCore) -> None:
        self.full, self.windowed = full, windowed

    def in_chunks(
        self, batch: Batch, *, scale: float, window: int | None, chunk: int | None = None
    ) -> HeadsInChunks | None:
        core = self.full if window is None and chunk is None else self.windowed
        return core.in_chunks(batch, scale=scale, window=window, chunk=chunk)

    def __call__(
        self,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None,
        sinks_H: Tensor | None,
        chunk: int | None = None,
    ) -> Tensor:
        core = self.full if window is None and chunk is None else self.windowed
        return core(q_SHC, k_SJC, v_SJU, batch, scale=scale, window=window, sinks_H=sinks_H, chunk=chunk)
