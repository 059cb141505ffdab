"""A model as a row of layers with their sizes: what parameters, FLOPs, stages and the planner are counted from.

It covers more than moefold trains. Published runs also use state-space layers, layers without a feed-forward part, and
ungated activations; the planner predicts those too. `shape_of` describes a moefold model,
`plan/published/record_model.py` a published one, and both are counted by the same functions:
`blueprint/parameters.py` lists the parameters of a shape, `blueprint/matmuls.py` its matmuls, `blueprint/stages.py` its
pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from moefold.config.attention import MLAConfig
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
    # Entries of a head that RoPE rotates without a latent; None is all of them.
    rotated: int | None = None
    # Positions a token attends to; 0 is all of them.
    window: int = 0
    # Positions of a chunk, within which a token attends; 0 is no chunks.
    chunk: int = 0
    # "head" normalises each head's vector of queries and keys, "full" the whole projection, "unit" has no weight.
    qk_norm: Literal["none", "head", "full", "unit"] = "none"
    # A learned logit per head takes part in the softmax.
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    # Queries have a gate of the same size beside them, which multiplies the output.
    output_gate: bool = False

    @property
    def is_latent(self) -> bool:
        return self.kv_latent > 0


@dataclass(frozen=True)
class Recurrence:
    """A state-space or linear-attention mixer: projections and a scan whose cost is linear in the length."""

    heads: int
    head_dim: int
    state: int
    groups: int


@dataclass(frozen=True)
class DeltaNet(Recurrence):
    """moefold's own linear attention: `heads` of values of `head_dim`, `groups` of keys of `state`, a convolution."""

    conv: int = 4
    chunk: int = 64

    @property
    def channels(self) -> int:
        """Queries, keys and values, which the convolution reads."""
        return 2 * self.groups * self.state + self.heads * self.head_dim


@dataclass(frozen=True)
class Dense:
    """A feed-forward part; gated ones have three matrices, others two."""

    dim: int
    gated: bool = True


@dataclass(frozen=True)
class MoE:
    """Routed experts, and a shared one of `shared_hidden_dim` (0: none)."""

    experts: int
    top_k: int
    dim: int
    shared_hidden_dim: int = 0
    # Dim in which tokens travel and are computed; 0 is the model's own.
    latent: int = 0
    gated: bool = True
    # Experts add biases, and clamp what enters their activation.
    biased: bool = False
    # The router adds a learned bias to its logits; the shared expert's output is scaled by a learned sigmoid.
    logit_bias: bool = False
    shared_gate: bool = False
    # Auxiliary-loss-free balancing: a bias takes part in the choice of experts.
    aux_free: bool = False


@dataclass(frozen=True)
class Layer:
    """Either part may be missing: hybrid models alternate them."""

    mixer: Attention | Recurrence | None
    feed: Dense | MoE | None

    def __hash__(self) -> int:
        # As of models below.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mixer, self.feed))


@dataclass(frozen=True)
class ModelShape:
    dim: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = False
    # The block of each MTP module, which also has a join of two rows and uses the head once more.
    mtp_layers: tuple[Layer, ...] = ()

    def __hash__(self) -> int:
        # Models are keys of caches that a search asks a hundred thousand times; their layers are hashed once.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dim, self.vocab, self.layers, self.tied, self.mtp_layers))

    @property
    def mtp(self) -> int:
        return len(self.mtp_layers)

    @cached_property
    def narrowest_head(self) -> int | None:
        """Of all layers: dimensions of a query. None where nothing attends."""
        return min((layer.mixer.qk_dim for layer in self.layers if isinstance(layer.mixer, Attention)), default=None)

    @cached_property
    def is_moe(self) -> bool:
        return any(isinstance(layer.feed, MoE) for layer in self.layers)


@lru_cache(maxsize=64)
def shape_of(model: ModelConfig) -> ModelShape:
    """The shape of a model that moefold can train."""
    layers = tuple(layer_shape(model, index) for index in range(model.num_layers))
    ahead = tuple(layer_shape(model, model.num_layers + module) for module in range(model.num_mtp))
    return ModelShape(model.dim, model.vocab_size, layers, model.tied_embeddings, ahead)


def layer_shape(model: ModelConfig, index: int) -> Layer:
    """Of one block; numbers from `num_layers` on are those of MTP modules."""
    linear = model.linear_attention
    if linear is None or not model.is_linear_layer(index):
        return Layer(_attention(model, index), _feed(model, index))
    mixer = DeltaNet(
        linear.num_value_heads,
        linear.value_dim,
        linear.key_dim,
        linear.num_key_heads,
        linear.conv_size,
        linear.chunk_size,
    )
    return Layer(mixer, _feed(model, index))


def _attention(model: ModelConfig, index: int) -> Attention:
    config = model.attention
    if isinstance(config, MLAConfig):
        qk_dim = config.nope_dim + config.rope_dim
        heads = config.num_heads
        return Attention(
            heads, heads, qk_dim, config.value_dim, config.q_latent or 0, config.kv_latent, config.rope_dim
        )
    has_rope = config.has_rope(index)
    return Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.head_dim,
        rotated=config.rope_dim if has_rope else 0,
        window=config.window_of(index) or 0,
        chunk=config.chunk_of(index) or 0,
        qk_norm="none" if config.qk_norm == "unit" and not has_rope else config.qk_norm,
        sinks=config.sinks,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        output_gate=config.output_gate,
    )


def _feed(model: ModelConfig, index: int) -> Dense | MoE:
    if model.moe is None or not model.is_moe_layer(index):
        return Dense(model.dense_hidden_dim)
    moe = model.moe
    return MoE(
        moe.num_experts,
        moe.top_k,
        moe.expert_hidden_dim,
        moe.shared_hidden_dim,
        moe.latent_dim or 0,
        biased=moe.expert_mlp_bias,
        logit_bias=moe.router.logit_bias,
        shared_gate=moe.shared_gate,
        aux_free=moe.router.expert_bias,
    )
