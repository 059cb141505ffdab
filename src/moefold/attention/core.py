"""What GQA and MLA share: rotary embedding of queries and keys, and the interface of attention itself.

A core decides which ranks' keys a token's query attends to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from moefold.attention.mask_blocks import chunk_lengths
from moefold.attention.varlen import VarlenAttention
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.config.attention import RopeConfig
from moefold.nn.batch import Batch
from moefold.ops.backends import IN_TORCH, Kernels
from moefold.ops.rope import rotary_tables


class Rotary(nn.Module):
    """Rotates ``dim`` entries of every head by its token's position: GQA's first ones, MLA's last ones.

    cos and sin are computed on demand, so there is no buffer to place, move or save.
    """

    def __init__(self, rope: RopeConfig, dim: int, kernels: Kernels = IN_TORCH) -> None:
        super().__init__()
        self.rope = rope
        self.dim = dim
        self.kernels = kernels

    def forward(self, positions_S: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions: float32, or float64 where the activations are."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        return rotary_tables(self.rope, self.dim, positions_S, wide)

    def rotate(self, q_SHC: Tensor, k_SJC: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Grouped-query attention: the first ``dim`` entries of every head, which are mostly all of them."""
        sizes = self.dim, q_SHC.shape[-1] - self.dim
        if sizes[1]:
            (first_q, rest_q), (first_k, rest_k) = q_SHC.split(sizes, dim=-1), k_SJC.split(sizes, dim=-1)
            first_q, first_k = self._rotate(first_q, first_k, tables)
            return torch.cat((first_q, rest_q), dim=-1), torch.cat((first_k, rest_k), dim=-1)
        return self._rotate(q_SHC, k_SJC, tables)

    def _rotate(self, q_SHX: Tensor, k_SJX: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        q_SHX, rotated_SJX = self.kernels.rotate_qk(q_SHX, k_SJX, *tables, self.rope.interleaved)
        assert rotated_SJX is not None
        return q_SHX, rotated_SJX

    def rotate_queries(self, q_SHC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return self.kernels.rotate_qk(q_SHC, None, *tables, self.rope.interleaved)[0]

    def keys_and_values(
        self, heads_SHX: Tensor, rope_SX: Tensor, tables: tuple[Tensor, Tensor], nope: int
    ) -> tuple[Tensor, Tensor]:
        """Latent attention: ``nope`` entries of a head are its key's, and all keys share the rotated part."""
        return self.kernels.keys_and_values(heads_SHX, rope_SX, *tables, nope, self.rope.interleaved)


# Queries, keys and values of some tokens: [c, H, C], [c, J, C] and [c, J, U].
Heads = tuple[Tensor, Tensor, Tensor]


class HeadsInChunks(Protocol):
    """Attention of one batch whose tokens are exchanged chunk by chunk, each beside the caller's matmuls of another."""

    # Of this rank's tokens; some may be 0.
    @property
    def sizes(self) -> tuple[int, ...]: ...

    def attend(self, heads: Iterator[Heads], sinks_H: Tensor | None = None) -> Iterator[Tensor]:
        """What the tokens of each chunk see, [c, H, U]. All of ``heads`` is taken before the first is there."""
        ...


class AttentionCore(Protocol):
    def in_chunks(
        self, batch: Batch, *, scale: float, window: int | None, chunk: int | None = None
    ) -> HeadsInChunks | None:
        """None: all tokens of a batch are exchanged at once, by a call."""
        ...

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
        """[S, H, U]: causal attention of each token within its own document, or within its chunk of it."""
        ...


class AllTokensAtOnce:
    """No exchange, or one that cannot be taken apart by tokens."""

    def in_chunks(
        self, batch: Batch, *, scale: float, window: int | None, chunk: int | None = None
    ) -> HeadsInChunks | None:
        return None


class LocalCore(AllTokensAtOnce):
    """Whole sequences are on this rank; its heads need no communication."""

    def __init__(self, attention: VarlenAttention | None = None) -> None:
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
        lengths = chunk_lengths(batch.lengths, chunk)
        return self.attention.attend(q_SHC, k_SJC, v_SJU, lengths, scale, window, sinks_H)
