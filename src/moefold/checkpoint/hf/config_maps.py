"""One table per model family: the keys of its config.json and the names of its tensors, each read in both directions.

A `Key` maps a key of config.json to a field of ModelConfig. `base` has the values that all models of a family share
(its router, its norms). `fixed_values` has the keys of which moefold supports one value only; any other value is
refused. A `ConfigConverter` is for keys that do not map one to one. Every other key of a file must be in
`IGNORED_KEYS`, or it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moefold.checkpoint.hf.config_converters import (
    DENSE_FIRST,
    FULL_LAYERS,
    HEADS,
    LATENT,
    ROPE,
    SHARED_EXPERTS,
    V2_GROUPS,
    V3_GROUPS,
    WINDOWS,
    ConfigConverter,
)
from moefold.checkpoint.hf.name_maps import (
    DECODER_NAMES,
    DEEPSEEK_MOE_NAMES,
    DENSE_NAMES,
    EXPERT_NAMES,
    GPT_OSS_MOE_NAMES,
    HEAD_NAMES,
    LATENT_NAMES,
    MIXTRAL_EXPERT_NAMES,
    MTP_COPIES,
    MTP_NAMES,
    NORMED_HEAD_NAMES,
)
from moefold.checkpoint.hf.name_rules import CopyRule, NameRule
from moefold.config.attention import GQAConfig, MLAConfig, RopeConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.errors import UnknownNameError

REQUIRED = object()


def family_rules(model_type: str) -> tuple[NameRule, ...]:
    return _family(model_type).name_rules


def family_copies(model_type: str) -> tuple[CopyRule, ...]:
    """HF tensors that repeat others."""
    return _family(model_type).copy_rules


def _family(model_type: str) -> HfFamily:
    if model_type not in READABLE_FAMILIES:
        raise UnknownNameError("Hugging Face family", model_type, READABLE_FAMILIES)
    return READABLE_FAMILIES[model_type]


@dataclass(frozen=True)
class Key:
    """`path` is a field of ModelConfig; `default` is transformers' default; `aliases` are other names of the key."""

    hf_key: str
    path: str
    default: object = REQUIRED
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class HfFamily:
    model_type: str
    architecture: str
    base: ModelConfig
    keys: tuple[Key, ...]
    name_rules: tuple[NameRule, ...]
    converters: tuple[ConfigConverter, ...]
    # The first value is written; the others are accepted.
    fixed_values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # Prefixes of tensors that are not part of the model; {layers} is the number of layers.
    extra_prefixes: tuple[str, ...] = ()
    # HF tensors that repeat others.
    copy_rules: tuple[CopyRule, ...] = ()


# These do not change what the model computes: bookkeeping, special tokens, training-time regularization, other loaders.
# fmt: off
IGNORED_KEYS = frozenset((
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits",
    "output_attentions", "output_hidden_states", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "aux_loss_alpha", "seq_aux", "attention_dropout", "ep_size", "pretraining_tp", "max_window_layers",
    "initial_context_length", "num_nextn_predict_layers", "num_mtp_layers", "_name_or_path",
))
# fmt: on
# Would make a loader run code or select another implementation; here they are ignored and reported.
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines", "code_revision", "_commit_hash")
CODE_KEY_PREFIXES = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implement")


_DECODER = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "dim"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "attention.num_heads"),
    Key("rms_norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "tied_embeddings", False),
    Key("initializer_range", "init_std", 0.02),
)
_TOP_K = Key("num_experts_per_tok", "moe.top_k", aliases=("experts_per_token",))
_EXPERTS = Key("num_experts", "moe.num_experts", aliases=("num_local_experts",))
_LOCAL_EXPERTS = Key("num_local_experts", "moe.num_experts", aliases=("num_experts",))
_SILU = {"hidden_act": ("silu",)}
_NO_BIAS = {"attention_bias": (False,)}
_PLAIN = GQAConfig()


def _moe(**router: Any) -> MoEConfig:
    return MoEConfig(router=RouterConfig(**router))


def _latent_keys() -> tuple[Key, ...]:
    return (
        *_DECODER,
        _TOP_K,
        Key("q_lora_rank", "attention.q_latent"),
        Key("kv_lora_rank", "attention.kv_latent"),
        Key("qk_nope_head_dim", "attention.nope_dim"),
        Key("qk_rope_head_dim", "attention.rope_dim"),
        Key("v_head_dim", "attention.value_dim"),
        Key("intermediate_size", "dense_hidden_dim"),
        Key("first_k_dense_replace", "num_dense_layers", 0),
        Key("moe_intermediate_size", "moe.expert_hidden_dim"),
        Key("n_routed_experts", "moe.num_experts", aliases=("num_local_experts",)),
        Key("routed_scaling_factor", "moe.router.scale", 1.0),
    )


_MIXTRAL = HfFamily(
    "mixtral",
    "MixtralForCausalLM",
    ModelConfig(attention=_PLAIN, moe=_moe(score_when="after_topk")),
    (
        *_DECODER,
        _TOP_K,
        _LOCAL_EXPERTS,
        Key("intermediate_size", "moe.expert_hidden_dim"),
        Key("sliding_window", "attention.window", None),
    ),
    (*DECODER_NAMES, *HEAD_NAMES, *MIXTRAL_EXPERT_NAMES),
    (ROPE, HEADS),
    _SILU,
)

_QWEN3_MOE = HfFamily(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ModelConfig(attention=replace(_PLAIN, qk_norm="head"), moe=_moe()),
    (
        *_DECODER,
        _TOP_K,
        _EXPERTS,
        Key("intermediate_size", "dense_hidden_dim"),
        Key("moe_intermediate_size", "moe.expert_hidden_dim"),
        Key("norm_topk_prob", "moe.router.normalize", False),
    ),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *DENSE_NAMES, *EXPERT_NAMES),
    (ROPE, HEADS, DENSE_FIRST, FULL_LAYERS),
    {**_SILU, **_NO_BIAS, "decoder_sparse_step": (1,), "use_sliding_window": (False,), "sliding_window": (None,)},
)

_OLMOE = HfFamily(
    "olmoe",
    "OlmoeForCausalLM",
    ModelConfig(attention=replace(_PLAIN, qk_norm="full"), moe=_moe()),
    (
        *_DECODER,
        _TOP_K,
        _EXPERTS,
        Key("intermediate_size", "moe.expert_hidden_dim"),
        Key("norm_topk_prob", "moe.router.normalize", False),
    ),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *EXPERT_NAMES),
    (ROPE, HEADS),
    {**_SILU, **_NO_BIAS, "clip_qkv": (None,)},
)

_GPT_OSS = HfFamily(
    "gpt_oss",
    "GptOssForCausalLM",
    ModelConfig(
        attention=replace(_PLAIN, qkv_bias=True, out_bias=True, sinks=True),
        moe=replace(_moe(score_when="after_topk", logit_bias=True), activation="clamped_swiglu", expert_mlp_bias=True),
    ),
    (
        *_DECODER,
        _TOP_K,
        _LOCAL_EXPERTS,
        Key("intermediate_size", "moe.expert_hidden_dim"),
        Key("sliding_window", "attention.window", 128),
    ),
    (*DECODER_NAMES, *HEAD_NAMES, *GPT_OSS_MOE_NAMES),
    (ROPE, HEADS, WINDOWS),
    {**_SILU, "attention_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
)

_DEEPSEEK_V2 = HfFamily(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    ModelConfig(attention=MLAConfig(), rope=RopeConfig(interleaved=True), moe=_moe()),
    _latent_keys(),
    (*DECODER_NAMES, *LATENT_NAMES, *DEEPSEEK_MOE_NAMES),
    (ROPE, LATENT, SHARED_EXPERTS, V2_GROUPS),
    {
        **_SILU,
        **_NO_BIAS,
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
    },
)

_DEEPSEEK_V3 = HfFamily(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    ModelConfig(
        attention=MLAConfig(),
        rope=RopeConfig(interleaved=True),
        moe=_moe(score="sigmoid", group_score="topk_sum", expert_bias=True),
    ),
    (
        *_latent_keys(),
        Key("norm_topk_prob", "moe.router.normalize", True),
        Key("n_group", "moe.router.num_groups", 1),
        Key("topk_group", "moe.router.top_groups", 1),
        Key("rope_interleave", "rope.interleaved", True),
        Key("num_nextn_predict_layers", "num_mtp", 0, aliases=("num_mtp_layers",)),
    ),
    (*DECODER_NAMES, *LATENT_NAMES, *DEEPSEEK_MOE_NAMES, *MTP_NAMES),
    (ROPE, LATENT, SHARED_EXPERTS, V3_GROUPS),
    {
        **_SILU,
        **_NO_BIAS,
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    # The MTP module, if config.json does not mention it.
    extra_prefixes=("model.layers.{layers}.",),
    copy_rules=MTP_COPIES,
)

_LLAMA = HfFamily(
    "llama",
    "LlamaForCausalLM",
    ModelConfig(attention=_PLAIN, moe=None),
    (*_DECODER, Key("intermediate_size", "dense_hidden_dim")),
    (*DECODER_NAMES, *HEAD_NAMES, *DENSE_NAMES),
    (ROPE, HEADS),
    {**_SILU, **_NO_BIAS, "mlp_bias": (False,)},
)

_QWEN3 = HfFamily(
    "qwen3",
    "Qwen3ForCausalLM",
    ModelConfig(attention=replace(_PLAIN, qk_norm="head"), moe=None),
    (*_DECODER, Key("intermediate_size", "dense_hidden_dim")),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *DENSE_NAMES),
    (ROPE, HEADS, FULL_LAYERS),
    {**_SILU, **_NO_BIAS, "use_sliding_window": (False,), "sliding_window": (None,)},
)

# Add a family to this tuple. Kimi-K2 is stored like DeepSeek-V3, and is read but not written under its name.
FAMILIES = {
    family.model_type: family
    for family in (_MIXTRAL, _QWEN3_MOE, _OLMOE, _DEEPSEEK_V3, _GPT_OSS, _DEEPSEEK_V2, _LLAMA, _QWEN3)
}
READABLE_FAMILIES = {**FAMILIES, "kimi_k2": replace(_DEEPSEEK_V3, model_type="kimi_k2")}
