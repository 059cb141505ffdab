"""Every parameter of a model: its name, global shape and kind, before anything is built.

Names and shapes are those of the built model's `named_parameters()`; weights are [out, in]. All experts of a layer are
one stacked tensor, so the list of a 61-layer model with 256 experts has about a thousand entries.

Blocks are listed from their shape (`blueprint/model_shape.py`), so that layers which moefold cannot build, of published
runs, are counted by the same rows.

The std of a parameter's init follows from its name alone (`init_std`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Literal

from moefold.blueprint.lora_adapters import adapters_of
from moefold.blueprint.model_shape import Attention, DeltaNet, Dense, Layer, MoE, Recurrence, layer_shape
from moefold.config.model import ModelConfig

Kind = Literal[
    "embedding",
    "head",
    "norm",
    "centred_norm",
    "matrix",
    "bias",
    "router",
    "expert",
    "sink",
    "lora_a",
    "lora_b",
    "conv",
    "log_decay",
    "decay_bias",
]

# Of a delta net's output, per head.
GATED_NORM = "norm.weight"


@dataclass(frozen=True)
class ParameterSpec:
    """`kind` says what the tensor is for: an expert's bias is a "bias", and lives with the experts by its name."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    # A norm over all heads' dims at once, which tensor parallelism cuts with the heads; its name alone cannot tell.
    spans_heads: bool = False
    # Of an adapter: the number of dims of its weight.
    weight_dims: int = 0

    @property
    def size(self) -> int:
        return prod(self.shape)


def parameters(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All trained parameters, in the order of the forward pass."""
    specs = _parameters(model)
    return tuple(specs if model.norm_scale == "weight" else map(_centred, specs))


def buffers(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Saved but not trained: the loss-free bias of every router that has one."""
    moe = model.moe
    if moe is None or not moe.router.expert_bias:
        return ()
    return tuple(
        ParameterSpec(f"{block}.feed_forward.router.expert_bias", (moe.num_experts,), "bias")
        for block in moe_block_names(model)
    )


def moe_block_names(model: ModelConfig) -> tuple[str, ...]:
    """Which blocks have experts, in the order of the forward pass: the rows of all state that is kept per MoE layer."""
    return tuple(name for layer, name in enumerate(block_names(model)) if model.is_moe_layer(layer))


def block_names(model: ModelConfig) -> tuple[str, ...]:
    """Every block, in the order of the forward pass; those of MTP modules count on after the last layer."""
    layers = (f"layers.{layer}" for layer in range(model.num_layers))
    return *layers, *(f"mtp.{module}.block" for module in range(model.num_mtp))


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts: sharded over ep and etp, replicated over edp."""
    return ".experts." in name


def is_mtp(name: str) -> bool:
    """Whether a parameter belongs to an MTP module; inference of one token at a time does not need it."""
    return name.startswith(("mtp.", "mtp_norms."))


def _centred(spec: ParameterSpec) -> ParameterSpec:
    """The norm's weight is what is added to one, so it starts at zero. The gated norm of a delta net stays as it is."""
    is_gated = spec.name.endswith(".attention." + GATED_NORM)
    return replace(spec, kind="centred_norm") if spec.kind == "norm" and not is_gated else spec


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
    """Those of an MTP module, without the norm before the head, which the stage of the loss holds."""
    specs = module_parameters(f"mtp.{module}.", layer_shape(model, model.num_layers + module), model.dim)
    yield from with_adapters(specs, model)


def layer_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    """Of one block; numbers from `num_layers` on are those of MTP modules."""
    ahead = layer - model.num_layers
    prefix = f"layers.{layer}." if ahead < 0 else f"mtp.{ahead}.block."
    yield from with_adapters(block_parameters(prefix, layer_shape(model, layer), model.dim), model)


def with_adapters(specs: Iterable[ParameterSpec], model: ModelConfig) -> Iterator[ParameterSpec]:
    """Each followed by its adapters, if it has any (`model.lora`)."""
    for spec in specs:
        yield spec
        for adapter in adapters_of(spec.name, spec.shape, spec.kind, model.lora):
            yield ParameterSpec(adapter.name, adapter.shape, adapter.kind, weight_dims=len(spec.shape))


# ---- of any shape ----


def module_parameters(prefix: str, block: Layer, D: int) -> Iterator[ParameterSpec]:
    """An MTP module: two norms, the join of two rows into one, and a block."""
    yield ParameterSpec(prefix + "token_norm.weight", (D,), "norm")
    yield ParameterSpec(prefix + "hidden_norm.weight", (D,), "norm")
    yield join_parameter(prefix, D)
    yield from block_parameters(prefix + "block.", block, D)


def join_parameter(prefix: str, D: int) -> ParameterSpec:
    return ParameterSpec(prefix + "join.weight", (D, 2 * D), "matrix")


def block_parameters(prefix: str, layer: Layer, D: int) -> Iterator[ParameterSpec]:
    if layer.mixer is not None:
        yield ParameterSpec(prefix + "attention_norm.weight", (D,), "norm")
    if isinstance(layer.mixer, DeltaNet):
        yield from _delta_net(prefix + "attention.", layer.mixer, D)
    elif isinstance(layer.mixer, Recurrence):
        yield from _recurrence(prefix + "recurrence.", layer.mixer, D)
    elif isinstance(layer.mixer, Attention):
        attention = _mla if layer.mixer.is_latent else _gqa
        yield from attention(prefix + "attention.", layer.mixer, D)
    if layer.feed is not None:
        yield ParameterSpec(prefix + "feed_forward_norm.weight", (D,), "norm")
    if isinstance(layer.feed, MoE):
        yield from _moe(prefix + "feed_forward.", layer.feed, D)
    elif isinstance(layer.feed, Dense):
        yield from _feed_forward(prefix + "feed_forward.", layer.feed.dim, D, gated=layer.feed.gated)


def _gqa(prefix: str, a: Attention, D: int) -> Iterator[ParameterSpec]:
    HC, JC = a.heads * a.qk_dim, a.kv_heads * a.qk_dim
    q_rows = HC * (1 + a.output_gate)
    if a.q_latent:
        yield from _query_latent(prefix, a, D)
    for name, rows in (("q", q_rows), ("k", JC), ("v", a.kv_heads * a.v_dim))[1 if a.q_latent else 0 :]:
        yield ParameterSpec(f"{prefix}{name}.weight", (rows, D), "matrix")
        if a.qkv_bias:
            yield ParameterSpec(f"{prefix}{name}.bias", (rows,), "bias")
    if a.qk_norm in ("head", "full"):
        full = a.qk_norm == "full"
        yield ParameterSpec(prefix + "q_norm.weight", (HC if full else a.qk_dim,), "norm", full)
        yield ParameterSpec(prefix + "k_norm.weight", (JC if full else a.qk_dim,), "norm", full)
    if a.sinks:
        yield ParameterSpec(prefix + "sinks", (a.heads,), "sink")
    yield ParameterSpec(prefix + "out.weight", (D, a.heads * a.v_dim), "matrix")
    if a.out_bias:
        yield ParameterSpec(prefix + "out.bias", (D,), "bias")


def _mla(prefix: str, a: Attention, D: int) -> Iterator[ParameterSpec]:
    if a.q_latent:
        yield from _query_latent(prefix, a, D)
    else:
        yield ParameterSpec(prefix + "q.weight", (a.heads * a.qk_dim, D), "matrix")
    # One matrix gives the latent and the rotated slice of the key that all heads share.
    yield ParameterSpec(prefix + "kv_down.weight", (a.kv_latent + a.rope_dim, D), "matrix")
    yield ParameterSpec(prefix + "kv_norm.weight", (a.kv_latent,), "norm")
    rebuilt = a.heads * (a.qk_dim - a.rope_dim + a.v_dim)
    yield ParameterSpec(prefix + "kv_up.weight", (rebuilt, a.kv_latent), "matrix")
    yield ParameterSpec(prefix + "out.weight", (D, a.heads * a.v_dim), "matrix")


def _query_latent(prefix: str, a: Attention, D: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(prefix + "q_down.weight", (a.q_latent, D), "matrix")
    yield ParameterSpec(prefix + "q_norm.weight", (a.q_latent,), "norm")
    yield ParameterSpec(prefix + "q_up.weight", (a.heads * a.qk_dim, a.q_latent), "matrix")


def _delta_net(prefix: str, r: DeltaNet, D: int) -> Iterator[ParameterSpec]:
    """Queries, keys, values and the output's gate; step sizes and decays; the convolution of the first three."""
    values = r.heads * r.head_dim
    yield ParameterSpec(prefix + "qkvz.weight", (r.channels + values, D), "matrix")
    yield ParameterSpec(prefix + "ba.weight", (2 * r.heads, D), "matrix")
    yield ParameterSpec(prefix + "conv", (r.channels, r.conv), "conv")
    yield ParameterSpec(prefix + "A_log", (r.heads,), "log_decay")
    yield ParameterSpec(prefix + "dt_bias", (r.heads,), "decay_bias")
    yield ParameterSpec(prefix + GATED_NORM, (r.head_dim,), "norm")
    # Not `out`: families name it otherwise than the output of softmax attention.
    yield ParameterSpec(prefix + "linear_out.weight", (D, values), "matrix")


def _recurrence(prefix: str, r: Recurrence, D: int) -> Iterator[ParameterSpec]:
    """Of published models that moefold only plans: one projection for input, gate, state and step size, one back."""
    inner = r.heads * r.head_dim
    yield ParameterSpec(prefix + "in.weight", (2 * inner + 2 * r.groups * r.state + r.heads, D), "matrix")
    yield ParameterSpec(prefix + "out.weight", (D, inner), "matrix")


def _moe(prefix: str, moe: MoE, D: int) -> Iterator[ParameterSpec]:
    E, F, L = moe.experts, moe.dim, moe.latent or D
    yield ParameterSpec(prefix + "router.weight", (E, D), "router")
    if moe.logit_bias:
        yield ParameterSpec(prefix + "router.bias", (E,), "bias")
    inputs = 2 if moe.gated else 1
    yield ParameterSpec(prefix + "experts.gate_up", (E, inputs, F, L), "expert")
    yield ParameterSpec(prefix + "experts.down", (E, L, F), "expert")
    if moe.biased:
        yield ParameterSpec(prefix + "experts.gate_up_bias", (E, inputs, F), "bias")
        yield ParameterSpec(prefix + "experts.down_bias", (E, L), "bias")
    if moe.shared_hidden_dim:
        yield from _feed_forward(prefix + "shared.", moe.shared_hidden_dim, D, gated=moe.gated)
    if moe.shared_gate:
        yield ParameterSpec(prefix + "shared_gate.weight", (1, D), "matrix")
    if moe.latent:
        yield ParameterSpec(prefix + "latent_down.weight", (L, D), "matrix")
        yield ParameterSpec(prefix + "latent_up.weight", (D, L), "matrix")


def _feed_forward(prefix: str, F: int, D: int, *, gated: bool) -> Iterator[ParameterSpec]:
    """Gate and up are stacked, so that sharding F gives a rank both halves; an ungated one has up alone."""
    yield ParameterSpec(prefix + "gate_up", (2 if gated else 1, F, D), "matrix")
    yield ParameterSpec(prefix + "down", (D, F), "matrix")


OUTPUT_PROJECTIONS = (
    ".attention.out.weight",
    ".attention.linear_out.weight",
    ".feed_forward.down",
    ".feed_forward.experts.down",
    ".feed_forward.shared.down",
    ".feed_forward.latent_up.weight",
)


def is_output_projection(name: str) -> bool:
    """Whether a parameter is the last matrix of a block's attention or feed-forward."""
    return name.endswith(OUTPUT_PROJECTIONS)


def init_std(model: ModelConfig, name: str) -> float:
    """Of the normal distribution that the parameter is drawn from.

    Every block adds two outputs to the hidden state, attention's and the feed-forward's, so its variance grows with
    depth. With `model.init_output_scale: depth` the output projections start smaller and the sum of the 2 * num_layers
    outputs has about the variance of one: std = init_std / sqrt(2 * num_layers).

    This is GPT-2's rule, and what Megatron calls `output_layer_init_method`. As there, it covers attention's output,
    the down projection of dense, shared and routed experts, and the projection out of a latent; blocks of MTP modules
    use the model's own number of layers. Where experts compute in a latent, two scaled matrices follow each other.
    """
    if model.init_output_scale == "depth" and is_output_projection(name):
        return model.init_std / sqrt(2 * model.num_layers)
    return model.init_std
