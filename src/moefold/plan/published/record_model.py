"""Models of published records: their shape, and the configuration that comes nearest to it.

Some published models have layers that `ModelConfig` cannot describe: recurrences (Mamba, linear attention), layers with
a mixer or a feed-forward part alone, ungated activations, MoE in every second layer, windows in the first layers only.
The workload of such a record has the shape beside the run, and `run.model` says what it can. Where the configuration
describes the model exactly, there is no second description.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moefold.blueprint.model_shape import Attention, Dense, Layer, ModelShape, MoE, Recurrence
from moefold.config.attention import AttentionConfig, GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import CapacityConfig, MoEConfig, RouterConfig

Record = Mapping[str, Any]


def shape_of_record(model: Record) -> ModelShape:
    """Every layer of a published model."""
    vocab = model.get("vocab") or 51200
    layers, mtp = _layers(model)
    return ModelShape(model["hidden"], vocab, tuple(layers), bool(model.get("tied")), (layers[-1],) * mtp)


def _layers(model: Record) -> tuple[list[Layer], int]:
    pattern = model.get("hybrid")
    mtp = int(model.get("mtp") or 0)
    if pattern:
        main, *ahead = pattern.split("/")
        return [_hybrid_layer(model, letter) for letter in main], len(ahead) or mtp
    counts = model.get("hybrid_counts")
    if counts:
        letters = "M" * counts["mamba"] + "*" * counts["attn"] + "-" * counts["mlp"]
        return [_hybrid_layer(model, letter) for letter in letters], mtp
    return [_plain_layer(model, index) for index in range(model["layers"])], mtp


def _hybrid_layer(model: Record, letter: str) -> Layer:
    if letter == "M":
        mamba = model["mamba"] if model.get("mamba") else {"heads": 64, "head_dim": 64, "state": 128, "groups": 8}
        return Layer(Recurrence(mamba["heads"], mamba["head_dim"], mamba["state"], mamba["groups"]), None)
    if letter == "*":
        return Layer(_attention(model, 0), None)
    return Layer(None, _moe(model) if letter == "E" else _dense(model))


def _plain_layer(model: Record, index: int) -> Layer:
    every = model.get("full_attn_every")
    mixer: Attention | Recurrence
    if every and (index + 1) % every:
        delta = model["gdn"]
        mixer = Recurrence(delta["value_heads"], delta["value_dim"], delta["key_dim"], delta["key_heads"])
    else:
        windowed = index < (model.get("window_layers") or 0)
        mixer = _attention(model, model["window"] if windowed else 0)
    first = model.get("dense_first_layers") or 0
    frequency = model.get("moe_layer_freq") or 1
    is_moe = model["moe"] and index >= first and (index + 1) % frequency == 0
    return Layer(mixer, _moe(model) if is_moe else _dense(model))


def _attention(model: Record, window: int) -> Attention:
    heads = model["heads"]
    if model.get("kv_lora"):
        qk_dim = model["qk_nope"] + model["qk_rope"]
        return Attention(
            heads, heads, qk_dim, model["v_head"], model.get("q_lora") or 0, model["kv_lora"], model["qk_rope"]
        )
    if model["attn"] == "dsv4_hybrid":
        # One key and value of the head's dim for all heads; tokens look at a window and a few compressed blocks.
        dim = model["qk_nope"] + model["qk_rope"]
        return Attention(heads, 1, dim, dim, model["q_lora"], window=model["csa_window"] + model["idx_topk"])
    dim = model.get("head_dim") or model["hidden"] // heads
    return Attention(heads, model.get("kv_heads") or heads, dim, dim, window=window)


def _is_gated(model: Record) -> bool:
    return model.get("act", "swiglu") not in ("gelu", "relu2")


def _dense(model: Record) -> Dense:
    return Dense(model.get("ffn") or 4 * model["hidden"], _is_gated(model))


# Families whose routers balance without an auxiliary loss.
_AUX_FREE = frozenset({"deepseek_v3", "deepseek_v4", "kimi_k2", "ling_mini", "mlm_ci_moe", "moonlight"})
_AUX_FREE |= {"nemotron3_nano", "nemotron3_super", "nemotron3_ultra"}


def _moe(model: Record) -> MoE:
    shared = model.get("shared_ffn") or 0
    return MoE(
        model["experts"],
        model["topk"],
        model["moe_ffn"],
        shared,
        model.get("moe_latent") or 0,
        _is_gated(model),
        biased=bool(model.get("bias")),
        aux_free=model.get("family") in _AUX_FREE,
    )


def nearest_config(shape: ModelShape, *, drops: bool) -> ModelConfig:
    """The model's sizes as a configuration: exact if layers differ only as those of `ModelConfig` do."""
    moe_layers = [index for index, layer in enumerate(shape.layers) if isinstance(layer.feed, MoE)]
    mixers = [layer.mixer for layer in shape.layers if isinstance(layer.mixer, Attention)]
    feeds = [layer.feed for layer in shape.layers]
    dense = next((feed.dim for feed in feeds if isinstance(feed, Dense)), shape.dim)
    return ModelConfig(
        vocab_size=shape.vocab,
        dim=shape.dim,
        num_layers=len(shape.layers),
        attention=_attention_config(mixers[0]) if mixers else GQAConfig(),
        moe=next((_moe_config(feed, drops) for feed in feeds if isinstance(feed, MoE)), None),
        num_dense_layers=moe_layers[0] if moe_layers else 0,
        dense_hidden_dim=dense,
        tied_embeddings=shape.tied,
        num_mtp=shape.mtp,
    )


def _attention_config(a: Attention) -> AttentionConfig:
    if a.is_latent:
        return MLAConfig("mla", a.heads, a.q_latent or None, a.kv_latent, a.qk_dim - a.rope_dim, a.rope_dim, a.v_dim)
    return GQAConfig("gqa", a.heads, a.kv_heads, a.qk_dim, window=a.window or None)


def _moe_config(moe: MoE, drops: bool) -> MoEConfig:
    return MoEConfig(
        moe.experts,
        moe.top_k,
        moe.dim,
        capacity=CapacityConfig() if drops else None,
        shared_hidden_dim=moe.shared_hidden_dim,
        latent_dim=moe.latent or None,
        expert_mlp_bias=moe.biased,
        router=RouterConfig(expert_bias=moe.aux_free),
    )
