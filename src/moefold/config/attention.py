"""Attention: grouped-query, multi-head latent, or linear (gated delta net), and rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention; with one key/value head per query head it is plain multi-head attention."""

    __pydantic_config__: ClassVar = STRICT

    kind: Literal["gqa"] = "gqa"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    # RMSNorm of queries and keys. head: per head. full: over the whole projection, before it is split into heads. unit:
    # per head without a weight, in layers that have RoPE (Llama 4).
    qk_norm: Literal["none", "head", "full", "unit"] = "none"
    # Whether heads are normalized before RoPE or after it (HunYuan, Llama 4).
    qk_norm_when: Literal["before_rope", "after_rope"] = "before_rope"
    # Partial RoPE: rotate only this many entries of a head, its first ones (GLM-4.5, MiniMax-M2); None is all of them.
    rope_dim: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    # Multiply the heads' output by a sigmoid gate per entry. The gate is projected together with the queries: `q` has
    # twice the rows, of each head first its query and then its gate (Qwen3-Next).
    output_gate: bool = False
    # Attention sinks: a learned logit per head in the softmax that has no value vector (gpt-oss).
    sinks: bool = False
    # Sliding window: a token attends to at most this many positions, itself included; None is full attention.
    window: int | None = None
    # Layer i has the window when i % window_every == 0; other layers have full attention.
    window_every: int = 1
    # Chunked attention: positions are cut into chunks of this many, and a token attends within its own; None is full
    # attention. Layers without RoPE have full attention (Llama 4).
    chunk: int | None = None
    # Layer i has no RoPE when (i + 1) % nope_every == 0; None is RoPE in every layer.
    nope_every: int | None = None
    # Queries of layers without RoPE are multiplied by 1 + nope_temperature * log(1 + (position + 1) // nope_floor).
    nope_temperature: float = 0.0
    nope_floor: int = 8192

    def has_rope(self, layer: int) -> bool:
        return self.nope_every is None or (layer + 1) % max(self.nope_every, 1) != 0

    def window_of(self, layer: int) -> int | None:
        return self.window if layer % max(self.window_every, 1) == 0 else None

    def chunk_of(self, layer: int) -> int | None:
        return self.chunk if self.has_rope(layer) else None


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: keys and values are projected from one latent per token; RoPE has its own dims."""

    __pydantic_config__: ClassVar = STRICT

    kind: Literal["mla"] = "mla"
    num_heads: int = 4
    # Rank of the query projection; None projects queries directly.
    q_latent: int | None = 24
    kv_latent: int = 16
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 16


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated delta net: linear attention with one matrix of state per value head, updated by the gated delta rule."""

    __pydantic_config__: ClassVar = STRICT

    # Heads of queries and keys; several value heads may share one.
    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    # Tokens that the causal convolution of queries, keys and values spans, the token itself included.
    conv_size: int = 4
    # Layer i has full attention (model.attention) when (i + 1) % full_attention_every == 0; the others are linear. MTP
    # modules have full attention.
    full_attention_every: int = 4
    # Tokens that are computed together by matmuls; the result does not depend on it.
    chunk_size: int = 64


@dataclass(frozen=True)
class YarnConfig:
    """YaRN: RoPE frequencies rescaled for contexts longer than `original_context`."""

    __pydantic_config__: ClassVar = STRICT

    factor: float = 4.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Softmax temperature as in DeepSeek's configs; 0 takes the one that follows from `factor`.
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class Llama3RopeConfig:
    """Llama 3.1's rescaling by the rotations that a pair makes within `original_context`: below `low_freq_factor` it is
    slowed by `factor`, above `high_freq_factor` it stays, and a ramp joins the two."""

    __pydantic_config__: ClassVar = STRICT

    factor: float = 8.0
    original_context: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embeddings (RoPE)."""

    __pydantic_config__: ClassVar = STRICT

    theta: float = 10_000.0
    # Rotate pairs (2i, 2i + 1) instead of (i, i + dim / 2).
    interleaved: bool = False
    yarn: YarnConfig | None = None
    llama3: Llama3RopeConfig | None = None


AttentionConfig = GQAConfig | MLAConfig
