"""What attention keeps of the tokens so far, so that a generated token costs one row of each matmul and not the text's.

Attention is the only place where tokens meet, so the cache is an attention core (`core.py`): a block is built with a
``CachedCore`` and computes everything else as always. Keys enter the cache as attention gets them, normed and rotated;
MLA's are those of every head, which are larger than its latents. A gated delta net has no keys to keep: a
``CachedDeltaCore`` keeps the state of its rule, [C, U] per head, and the last inputs of its convolution, both of the
same size whatever the length. The full forward is the reference: with no sequences begun, the cores are the plain ones.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moefold.attention.core import AllTokensAtOnce, AttentionCore
from moefold.attention.gated_delta_rule import (
    causal_conv,
    conv_step,
    gated_delta_rule,
    gated_delta_rule_with_states,
    gated_delta_step,
    last_inputs,
)
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
        # Of layers with linear attention: [B, Y - 1, X] inputs of the convolution, and the rule's states [B, H, C, U].
        self.conv_inputs: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def begin(self, num_sequences: int, room: int) -> None:
        """Forget what there was; no sequence will be longer than ``room``. With 0 sequences the cache is off."""
        self.num_sequences, self.room, self.used = num_sequences, room, 0
        for kept in (self._layers, self.conv_inputs, self.states):
            kept.clear()

    def write(self, layer: int, k_SJC: Tensor, v_SJU: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Puts these tokens where they belong, and returns all keys and values of the layer: [B, X, J, C] and U."""
        if layer not in self._layers:
            rows = (self.num_sequences, self.room)
            self._layers[layer] = k_SJC.new_zeros(*rows, *k_SJC.shape[1:]), v_SJU.new_zeros(*rows, *v_SJU.shape[1:])
        k_BXJC, v_BXJU = self._layers[layer]
        where = batch.documents.set_of_token_T, batch.positions_S
        k_BXJC[where], v_BXJU[where] = k_SJC, v_SJU
        return k_BXJC[:, : self.used], v_BXJU[:, : self.used]


class CachedCore(AllTokensAtOnce):
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
        if not _one_each(batch.lengths):
            return whole(chunk=chunk)
        return attend_cached(q_SHC, k_BXJC, v_BXJU, batch.positions_S, scale, window, sinks_H, chunk)


class CachedDeltaCore:
    """Of one gated delta net: prompts start without a state and leave theirs here, single tokens take it on."""

    def __init__(self, cache: KVCache, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    def convolve(self, x_SX: Tensor, taps_XY: Tensor, positions_S: Tensor, lengths: tuple[int, ...]) -> Tensor:
        kept, before = self.cache.conv_inputs, taps_XY.shape[1] - 1
        if self.cache.num_sequences == 0:
            return causal_conv(x_SX, taps_XY, positions_S)
        if not _one_each(lengths):
            kept[self.layer] = last_inputs(x_SX, lengths, before)
            return causal_conv(x_SX, taps_XY, positions_S)
        first = x_SX.new_zeros(len(x_SX), before, x_SX.shape[1])
        rows_BYX = torch.cat((kept.get(self.layer, first), x_SX[:, None]), dim=1)
        kept[self.layer] = rows_BYX[:, 1:]
        return conv_step(rows_BYX, taps_XY)

    def rule(
        self,
        q_SJC: Tensor,
        k_SJC: Tensor,
        v_SHU: Tensor,
        log_decay_SH: Tensor,
        beta_SH: Tensor,
        lengths: tuple[int, ...],
        chunk_size: int,
    ) -> Tensor:
        tokens, kept = (q_SJC, k_SJC, v_SHU, log_decay_SH, beta_SH), self.cache.states
        if self.cache.num_sequences == 0:
            return gated_delta_rule(*tokens, lengths, chunk_size)
        if not _one_each(lengths):
            out_SHU, kept[self.layer] = gated_delta_rule_with_states(*tokens, lengths, chunk_size)
            return out_SHU
        first = log_decay_SH.new_zeros(*log_decay_SH.shape, k_SJC.shape[-1], v_SHU.shape[-1])
        out_SHU, kept[self.layer] = gated_delta_step(*tokens, kept.get(self.layer, first))
        return out_SHU


def _one_each(lengths: tuple[int, ...]) -> bool:
    return all(length == 1 for length in lengths)


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
