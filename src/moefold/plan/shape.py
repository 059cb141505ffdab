"""A model as the planner sees it: a row of layers with their sizes, nothing else.

It is wider than what moefold trains. Published runs also use layers that mix tokens by a state-space model or a linear
recurrence, layers without a feed-forward part, and ungated activations; to be held against them the planner must be
able to say their sizes. `from_config` describes a moefold model, `plan/published/records.py` a published one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig


@dataclass(frozen=True)
class Attention:
    """Softmax attention; `latent` sizes are those of MLA, 0 where there is none."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    q_latent: int = 0
    kv_latent: int = 0
    # The rotated part of an MLA key, shared by all heads; part of qk_dim.
    rope_dim: int = 0
    # Positions a token looks back at; 0 is all of them.
    window: int = 0
    # Queries and keys go through a norm of their own.
    normed: bool = False
    # A learned logit per head takes part in the softmax.
    sinks: bool = False

    @property
    def is_latent(self) -> bool:
        return self.kv_latent > 0


@dataclass(frozen=True)
class Recurrence:
    """A state-space or linear-attention mixer: projections and a scan whose cost grows with the length."""

    heads: int
    head_dim: int
    state: int
    groups: int


@dataclass(frozen=True)
class Dense:
    """A feed-forward part; gated ones have three matrices, others two."""

    dim: int
    gated: bool = True


@dataclass(frozen=True)
class Mixture:
    """Routed experts, and a shared one of `shared_hidden_dim` (0: none)."""

    experts: int
    top_k: int
    dim: int
    shared_hidden_dim: int = 0
    # Width in which tokens travel and are computed; 0 is the model's own.
    latent: int = 0
    gated: bool = True
    # Experts add biases, and bound what enters their activation.
    biased: bool = False
    clamped: bool = False


@dataclass(frozen=True)
class Layer:
    """Either part may be missing: hybrid models alternate them."""

    mixer: Attention | Recurrence | None
    feed: Dense | Mixture | None


@dataclass(frozen=True)
class ModelShape:
    dim: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = False
    # Modules that predict further ahead: one more layer like the last, and the head once more, each.
    mtp: int = 0

    def __hash__(self) -> int:
        # Models are keys of caches that a search asks a hundred thousand times; their layers are hashed once.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dim, self.vocab, self.layers, self.tied, self.mtp))

    @cached_property
    def is_mixture(self) -> bool:
        return any(isinstance(layer.feed, Mixture) for layer in self.layers)


def from_config(model: ModelConfig) -> ModelShape:
    """The shape of a model that moefold can train."""
    layers = tuple(_layer(model, index) for index in range(model.num_layers))
    return ModelShape(model.dim, model.vocab_size, layers, model.tied_embeddings, model.num_mtp)


def _layer(model: ModelConfig, index: int) -> Layer:
    return Layer(_attention(model.attention, index), _feed(model, index))


def _attention(config: GQAConfig | MLAConfig, index: int) -> Attention:
    if isinstance(config, MLAConfig):
        qk_dim = config.nope_dim + config.rope_dim
        heads = config.num_heads
        return Attention(
            heads, heads, qk_dim, config.value_dim, config.q_latent or 0, config.kv_latent, config.rope_dim
        )
    window = config.window if config.window is not None and index % config.window_every == 0 else 0
    return Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.head_dim,
        window=window,
        normed=config.qk_norm != "none",
        sinks=config.sinks,
    )


def _feed(model: ModelConfig, index: int) -> Dense | Mixture:
    if model.moe is None or not model.is_moe_layer(index):
        return Dense(model.dense_hidden_dim)
    moe = model.moe
    return Mixture(
        moe.num_experts,
        moe.top_k,
        moe.expert_hidden_dim,
        moe.shared_hidden_dim,
        moe.latent_dim or 0,
        biased=moe.expert_mlp_bias,
        clamped=moe.activation == "clamped_swiglu",
    )
