"""How tokens look at each other: grouped-query or multi-head latent attention, and how positions are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class GQAConfig:
    """Heads share keys and values in groups; one key/value head per query head is plain multi-head attention."""

    __pydantic_config__: ClassVar = STRICT

    kind: Literal["gqa"] = "gqa"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    # "head" normalises each head's vector, "full" the whole projection before it is split into heads.
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    # A learned logit per head that takes part in the softmax and carries no value.
    sinks: bool = False
    # Tokens see at most this many positions back (themselves included); None means all of them.
    window: int | None = None
    # Layer i uses the window when i % window_every == 0; every other layer sees everything.
    window_every: int = 1


@dataclass(frozen=True)
class MLAConfig:
    """Keys and values are rebuilt from one small latent vector per token; a separate slice carries the rotation."""

    __pydantic_config__: ClassVar = STRICT

    kind: Literal["mla"] = "mla"
    num_heads: int = 4
    # None means queries are projected directly, without a latent of their own.
    q_latent: int | None = 24
    kv_latent: int = 16
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 16


@dataclass(frozen=True)
class YarnConfig:
    """Stretch the rotation to contexts longer than those seen in training."""

    __pydantic_config__: ClassVar = STRICT

    factor: float = 4.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Two temperatures of the attention logits; 0 means the one given by the factor alone.
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions."""

    __pydantic_config__: ClassVar = STRICT

    theta: float = 10_000.0
    # Rotate neighbouring pairs (2i, 2i+1) instead of halves (i, i + d/2).
    interleaved: bool = False
    yarn: YarnConfig | None = None


AttentionConfig = GQAConfig | MLAConfig
