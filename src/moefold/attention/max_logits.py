"""The largest attention logit of every head, which QK-clip bounds.

A logit is q . k * scale before the softmax, of a query and a key that it sees. Fused attention does not keep logits, so
with `optim.qk_clip` they are computed once more in front of it, without gradients, a few hundred queries at a time.

A maximum can be taken twice without harm: recomputing a forward does not change it. Evaluations, which have no
gradients, are not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.attention.core import AllTokensAtOnce, AttentionCore
from moefold.attention.mask_blocks import Run, chunk_lengths, chunk_runs, document_runs
from moefold.attention.packed_mask import PackedMask
from moefold.nn.batch import Batch
from moefold.ops.fp32_linear import upcast

QUERIES_AT_ONCE = 256


class SeenKeys(NamedTuple):
    """The keys of all documents of a microbatch in order, and which of their tokens this rank's queries are."""

    k_TJC: Tensor
    q_runs: tuple[Run, ...]


# From this rank's keys: those of the whole microbatch.
GatherKeys = Callable[[Tensor, Batch], SeenKeys]


def keys_here(k_SJC: Tensor, batch: Batch) -> SeenKeys:
    """Whole sequences are on this rank."""
    return SeenKeys(k_SJC, document_runs(batch.lengths))


class LogitMaxima:
    """Largest logits of a step by block: the blocks that ran on this rank, each of its heads, all microbatches."""

    def __init__(self) -> None:
        self._by_block: dict[int, Tensor] = {}

    def observe(self, block: int, max_H: Tensor) -> None:
        before = self._by_block.get(block)
        self._by_block[block] = max_H if before is None else torch.maximum(before, max_H)

    def take(self) -> dict[int, Tensor]:
        """Those since the last time."""
        taken, self._by_block = self._by_block, {}
        return taken


class ObservedCore(AllTokensAtOnce):
    """A core whose largest logits are observed as those of a block."""

    def __init__(self, core: AttentionCore, block: int, maxima: LogitMaxima, gather: GatherKeys = keys_here) -> None:
        self.core, self.block, self.maxima, self.gather = core, block, maxima, gather

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
        if torch.is_grad_enabled():
            with torch.no_grad():
                k_TJC, q_runs = self.gather(k_SJC.detach(), batch)
                q_runs, lengths = chunk_runs(q_runs, batch.lengths, chunk), chunk_lengths(batch.lengths, chunk)
                self.maxima.observe(self.block, max_logits(q_SHC, k_TJC, q_runs, lengths, scale, window))
        return self.core(q_SHC, k_SJC, v_SJU, batch, scale=scale, window=window, sinks_H=sinks_H, chunk=chunk)


@torch.no_grad()
def max_logits(
    q_SHC: Tensor,
    k_TJC: Tensor,
    q_runs: tuple[Run, ...],
    lengths: tuple[int, ...],
    scale: float,
    window: int | None,
) -> Tensor:
    """[H]: the largest logit of each head, -inf where there is no query; at least float32."""
    mask = PackedMask(q_runs, document_runs(lengths), window)
    begin_S, end_S, _, _ = mask.spans(q_SHC.device)
    spans = _key_spans(q_runs, lengths, window)
    kv_heads = k_TJC.shape[1]
    most_H = upcast(q_SHC.new_empty(0)).new_full((q_SHC.shape[1],), -torch.inf)
    for start in range(0, len(spans), QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, len(spans))
        first, last = spans[start][0], spans[stop - 1][1]
        # Query heads beside those of the same key: [J, G n, C].
        q_JnC = upcast(q_SHC[start:stop]).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        k_JmC = upcast(k_TJC[first:last]).transpose(0, 1)
        score_JGnm = torch.bmm(q_JnC, k_JmC.mT).unflatten(1, (-1, stop - start)).mul_(scale)
        key_m = torch.arange(first, last, device=q_SHC.device)
        hidden_nm = (key_m < begin_S[start:stop, None]) | (key_m >= end_S[start:stop, None])
        most_H = torch.maximum(most_H, score_JGnm.masked_fill_(hidden_nm, -torch.inf).amax((-1, -2)).flatten())
    return most_H


def _key_spans(q_runs: Sequence[Run], lengths: Sequence[int], window: int | None) -> list[tuple[int, int]]:
    """The rows of keys that each query sees, on the host; neither end ever decreases."""
    first = (0, *accumulate(lengths))
    return [
        (first[run.document] + (0 if window is None else max(0, place - window + 1)), first[run.document] + place + 1)
        for run in q_runs
        for place in range(run.start, run.stop)
    ]
