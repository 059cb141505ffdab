"""Keys and values of the tokens so far, so that a generated token costs one row of each matmul and not the whole text.

Attention is the only place where tokens meet, so the cache is an attention core (`core.py`): a block is built with a
``CachedCore`` and computes everything else as always. Keys enter the cache as attention gets them, normed and rotated;
MLA's are those of every head, which are larger than its latents. The full forward is the reference: with no sequences
begun, the same core is the plain one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moefold.attention.core import AttentionCore
from moefold.nn.batch import Batch
from moefold.ops.fp32_linear import upcast


class KVCache:
    """Of all layers, for sequences that start together and grow by a token at a time. Rows are [sequence, position]."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self.room = 0
        # Positions that are in use by the longest sequence; the loop knows it without asking the device.
        self.used = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, num_sequences: int, room: int) -> None:
        """Forget what there was; no sequence will be longer than ``room``. With 0 sequences the cache is off."""
        self.num_sequences, self.room, self.used = num_sequences, room, 0
        self._layers.clear()

    def write(self, layer: int, k_SJC: Tensor, v_SJU: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Puts these tokens where they belong, and returns all keys and values of the layer: [B, X, J, C] and U."""
        if layer not in self._layers:
            rows = (self.num_sequences, self.room)
            self._layers[layer] = k_SJC.new_zeros(*rows, *k_SJC.shape[1:]), v_SJU.new_zeros(*rows, *v_SJU.shape[1:])
        k_BXJC, v_BXJU = self._layers[layer]
        where = batch.documents.set_of_token_T, batch.positions_S
        k_BXJC[where], v_BXJU[where] = k_SJC, v_SJU
        return k_BXJC[:, : self.used], v_BXJU[:, : self.used]


class CachedCore:
    """The core of one layer: prompts attend within themselves, single tokens to what is in the cache."""

    def __init__(self, whole: AttentionCore, cache: KVCache, layer: int) -> None:
        self.whole = whole
        self.cache = cache
        self.layer = layer

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
        whole = partial(self.whole, q_SHC, k_SJC, v_SJU, batch, scale=scale, window=window, sinks_H=sinks_H)
        if self.cache.num_sequences == 0:
            return whole(chunk=chunk)
        k_BXJC, v_BXJU = self.cache.write(self.layer, k_SJC, v_SJU, batch)
        if any(length != 1 for length in batch.lengths):
            return whole(chunk=chunk)
        return attend_cached(q_SHC, k_BXJC, v_BXJU, batch.positions_S, scale, window, sinks_H, chunk)


def attend_cached(
    q_BHC: Tensor,
    k_BXJC: Tensor,
    v_BXJU: Tensor,
    positions_B: Tensor,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[B, H, U]: one query per sequence, at its position, over the keys up to there; as ``sdpa.attend_reference``."""
    heads, groups = q_BHC.shape[1], k_BXJC.shape[2]
    q_BJGC = q_BHC.unflatten(1, (groups, heads // groups))
    score_BJGX = upcast(torch.einsum("bjgc,bxjc->bjgx", q_BJGC, k_BXJC)) * scale
    at_X = torch.arange(k_BXJC.shape[1], device=q_BHC.device)
    seen_BX = at_X <= positions_B[:, None]
    if window is not None:
        seen_BX &= at_X > positions_B[:, None] - window
    if chunk is not None:
        seen_BX &= at_X // chunk == positions_B[:, None] // chunk
    score_BJGX = score_BJGX.masked_fill(~seen_BX[:, None, None, :], -torch.inf)
    if sinks_H is not None:
        sink_JG = sinks_H.to(score_BJGX.dtype).unflatten(0, (groups, heads // groups))
        score_BJGX = torch.cat((score_BJGX, sink_JG[None, :, :, None].expand(len(q_BHC), -1, -1, 1)), dim=-1)
    share_BJGX = score_BJGX.softmax(-1)[..., : len(at_X)].to(v_BXJU.dtype)
    return torch.einsum("bjgx,bxju->bjgu", share_BJGX, v_BXJU).flatten(1, 2)
