"""Every parameter of a model: its name, global shape and kind, before anything is built.

    D width, V vocabulary, H heads, G key/value heads, d head dim, E experts, F (expert) width, L latent width or D

Names and shapes are those of the built model's `named_parameters()`; weights are [out, in]. All experts of a layer are
one stacked tensor, so the list of a 61-layer model with 256 experts has about a thousand entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig

Kind = Literal["embedding", "head", "norm", "matrix", "bias", "router", "expert", "sink"]


@dataclass(frozen=True)
class ParameterSpec:
    """`kind` says what the tensor is for: an expert's bias is a "bias", and lives with the experts by its name."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    # A norm over all heads' dims at once, which tensor parallelism cuts with the heads; its name alone cannot tell.
    spans_heads: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)


def parameters(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Everything that is trained, in the order of the forward pass."""
    return tuple(_parameters(model))


def buffers(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """What is saved but not trained: the loss-free bias of every router that has one."""
    moe = model.moe
    if moe is None or not moe.router.expert_bias:
        return ()
    return tuple(
        ParameterSpec(f"{block}.feed_forward.router.expert_bias", (moe.num_experts,), "bias")
        for block in mixture_names(model)
    )


def mixture_names(model: ModelConfig) -> tuple[str, ...]:
    """Which blocks are mixtures, in the order of the forward pass: the rows of everything kept per mixture."""
    return tuple(name for layer, name in enumerate(block_names(model)) if model.is_moe_layer(layer))


def block_names(model: ModelConfig) -> tuple[str, ...]:
    """Every block, in the order of the forward pass; those of MTP modules count on after the last layer."""
    layers = (f"layers.{layer}" for layer in range(model.num_layers))
    return *layers, *(f"mtp.{module}.block" for module in range(model.num_mtp))


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts: cut over ep and etp, replicated over edp."""
    return ".experts." in name


def is_mtp(name: str) -> bool:
    """Whether a parameter belongs to a module that predicts further ahead: of no use to one who predicts one token."""
    return name.startswith(("mtp.", "mtp_norms."))


def _parameters(model: ModelConfig) -> Iterator[ParameterSpec]:
    D = model.dim
    yield ParameterSpec("embedding.weight", (model.vocab_size, D), "embedding")
    for layer in range(model.num_layers):
        yield from layer_parameters(model, layer)
    for module in range(model.num_mtp):
        yield from mtp_parameters(model, module)
    yield ParameterSpec("final_norm.weight", (D,), "norm")
    for module in range(model.num_mtp):
        yield ParameterSpec(f"mtp_norms.{module}.weight", (D,), "norm")
    if not model.tied_embeddings:
        yield ParameterSpec("head.weight", (model.vocab_size, D), "head")


def mtp_parameters(model: ModelConfig, module: int) -> Iterator[ParameterSpec]:
    """What a look-ahead module has of its own, but for the norm before the head, which is with the loss."""
    prefix, D = f"mtp.{module}.", model.dim
    yield ParameterSpec(prefix + "token_norm.weight", (D,), "norm")
    yield ParameterSpec(prefix + "hidden_norm.weight", (D,), "norm")
    yield ParameterSpec(prefix + "join.weight", (D, 2 * D), "matrix")
    yield from layer_parameters(model, model.num_layers + module)


def layer_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    """Of one block; numbers from `num_layers` on are those of MTP modules."""
    ahead = layer - model.num_layers
    prefix = f"layers.{layer}." if ahead < 0 else f"mtp.{ahead}.block."
    yield ParameterSpec(prefix + "attention_norm.weight", (model.dim,), "norm")
    attention = model.attention
    if isinstance(attention, MLAConfig):
        yield from _mla(prefix + "attention.", attention, model.dim)
    else:
        yield from _gqa(prefix + "attention.", attention, model.dim)
    yield ParameterSpec(prefix + "feed_forward_norm.weight", (model.dim,), "norm")
    if model.moe is not None and model.is_moe_layer(layer):
        yield from _moe(prefix + "feed_forward.", model.moe, model.dim)
    else:
        yield from _gated(prefix + "feed_forward.", model.dense_hidden_dim, model.dim)


def _gqa(prefix: str, attention: GQAConfig, D: int) -> Iterator[ParameterSpec]:
    Hd, Gd = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    for name, rows in (("q", Hd), ("k", Gd), ("v", Gd)):
        yield ParameterSpec(f"{prefix}{name}.weight", (rows, D), "matrix")
        if attention.qkv_bias:
            yield ParameterSpec(f"{prefix}{name}.bias", (rows,), "bias")
    if attention.qk_norm != "none":
        full = attention.qk_norm == "full"
        yield ParameterSpec(prefix + "q_norm.weight", (Hd if full else attention.head_dim,), "norm", full)
        yield ParameterSpec(prefix + "k_norm.weight", (Gd if full else attention.head_dim,), "norm", full)
    if attention.sinks:
        yield ParameterSpec(prefix + "sinks", (attention.num_heads,), "sink")
    yield ParameterSpec(prefix + "out.weight", (D, Hd), "matrix")
    if attention.out_bias:
        yield ParameterSpec(prefix + "out.bias", (D,), "bias")


def _mla(prefix: str, attention: MLAConfig, D: int) -> Iterator[ParameterSpec]:
    H, query_dim = attention.num_heads, attention.nope_dim + attention.rope_dim
    if attention.q_latent is None:
        yield ParameterSpec(prefix + "q.weight", (H * query_dim, D), "matrix")
    else:
        yield ParameterSpec(prefix + "q_down.weight", (attention.q_latent, D), "matrix")
        yield ParameterSpec(prefix + "q_norm.weight", (attention.q_latent,), "norm")
        yield ParameterSpec(prefix + "q_up.weight", (H * query_dim, attention.q_latent), "matrix")
    # One matrix gives the latent and the rotated slice of the key that all heads share.
    yield ParameterSpec(prefix + "kv_down.weight", (attention.kv_latent + attention.rope_dim, D), "matrix")
    yield ParameterSpec(prefix + "kv_norm.weight", (attention.kv_latent,), "norm")
    rebuilt = H * (attention.nope_dim + attention.value_dim)
    yield ParameterSpec(prefix + "kv_up.weight", (rebuilt, attention.kv_latent), "matrix")
    yield ParameterSpec(prefix + "out.weight", (D, H * attention.value_dim), "matrix")


def _moe(prefix: str, moe: MoEConfig, D: int) -> Iterator[ParameterSpec]:
    E, F, L = moe.num_experts, moe.expert_hidden_dim, moe.latent_dim or D
    yield ParameterSpec(prefix + "router.weight", (E, D), "router")
    if moe.router.logit_bias:
        yield ParameterSpec(prefix + "router.bias", (E,), "bias")
    yield ParameterSpec(prefix + "experts.gate_up", (E, 2, F, L), "expert")
    yield ParameterSpec(prefix + "experts.down", (E, L, F), "expert")
    if moe.expert_mlp_bias:
        yield ParameterSpec(prefix + "experts.gate_up_bias", (E, 2, F), "bias")
        yield ParameterSpec(prefix + "experts.down_bias", (E, L), "bias")
    if moe.shared_hidden_dim:
        yield from _gated(prefix + "shared.", moe.shared_hidden_dim, D)
    if moe.shared_gate:
        yield ParameterSpec(prefix + "shared_gate.weight", (1, D), "matrix")
    if moe.latent_dim is not None:
        yield ParameterSpec(prefix + "latent_down.weight", (L, D), "matrix")
        yield ParameterSpec(prefix + "latent_up.weight", (D, L), "matrix")


def _gated(prefix: str, F: int, D: int) -> Iterator[ParameterSpec]:
    """A SwiGLU's two projections; gate and up are stacked so that a cut over F gives a rank both halves."""
    yield ParameterSpec(prefix + "gate_up", (2, F, D), "matrix")
    yield ParameterSpec(prefix + "down", (D, F), "matrix")
