"""How each family writes a model on disk: one table per family of config.json's keys and of tensor names.

Both are read in both directions.

A `Key` says that one key of theirs and one place of ours mean the same. What a family has by nature (its router, its
norms) is in `base`. What a key may say but our model does not do is in `fixed`: any other value is refused. A `Section`
is for the few things that are spelled too differently for a table. Everything else in a file must be on the list of
keys that change no number, or it is refused by name.
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
    Section,
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
    return _family(model_type).names


def family_copies(model_type: str) -> tuple[CopyRule, ...]:
    """Tensors of theirs that repeat others."""
    return _family(model_type).copies


def _family(model_type: str) -> Dialect:
    if model_type not in READABLE:
        raise UnknownNameError("Hugging Face family", model_type, READABLE)
    return READABLE[model_type]


@dataclass(frozen=True)
class Key:
    """`default` is what transformers takes when the key is absent; other `names` are older or newer spellings."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialect:
    model_type: str
    architecture: str
    base: ModelConfig
    keys: tuple[Key, ...]
    # Which tensor of theirs is which of ours.
    names: tuple[NameRule, ...]
    sections: tuple[Section, ...]
    # The first value is written; the others are accepted.
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Tensors beside the model itself, as the start of a name with {layers} for the number of layers.
    beside: tuple[str, ...] = ()
    # Tensors of theirs that repeat others.
    copies: tuple[CopyRule, ...] = ()


# Change no number that the model computes: bookkeeping, special tokens, training-time regularisation, other loaders.
# fmt: off
HARMLESS = frozenset((
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits",
    "output_attentions", "output_hidden_states", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "aux_loss_alpha", "seq_aux", "attention_dropout", "ep_size", "pretraining_tp", "max_window_layers",
    "initial_context_length", "num_nextn_predict_layers", "num_mtp_layers", "_name_or_path",
))
# fmt: on
# Would make a loader run code or pick another implementation; here they are never more than a line in a report.
NEVER_HONOURED = ("auto_map", "trust_remote_code", "custom_pipelines", "code_revision", "_commit_hash")
NEVER_HONOURED_STARTS = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implement")


_DECODER = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "dim"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "attention.num_heads"),
    Key("rms_norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "tied_embeddings", False),
    Key("initializer_range", "init_std", 0.02),
)
_TOP_K = Key("num_experts_per_tok", "moe.top_k", names=("experts_per_token",))
_EXPERTS = Key("num_experts", "moe.num_experts", names=("num_local_experts",))
_LOCAL_EXPERTS = Key("num_local_experts", "moe.num_experts", names=("num_experts",))
_SILU = {"hidden_act": ("silu",)}
_NO_BIAS = {"attention_bias": (False,)}
_PLAIN = GQAConfig()


def _mixture(**router: Any) -> MoEConfig:
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
        Key("n_routed_experts", "moe.num_experts", names=("num_local_experts",)),
        Key("routed_scaling_factor", "moe.router.scale", 1.0),
    )


_MIXTRAL = Dialect(
    "mixtral",
    "MixtralForCausalLM",
    ModelConfig(attention=_PLAIN, moe=_mixture(score_when="after_topk")),
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

_QWEN3_MOE = Dialect(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ModelConfig(attention=replace(_PLAIN, qk_norm="head"), moe=_mixture()),
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

_OLMOE = Dialect(
    "olmoe",
    "OlmoeForCausalLM",
    ModelConfig(attention=replace(_PLAIN, qk_norm="full"), moe=_mixture()),
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

_GPT_OSS = Dialect(
    "gpt_oss",
    "GptOssForCausalLM",
    ModelConfig(
        attention=replace(_PLAIN, qkv_bias=True, out_bias=True, sinks=True),
        moe=replace(
            _mixture(score_when="after_topk", logit_bias=True), activation="clamped_swiglu", expert_mlp_bias=True
        ),
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

_DEEPSEEK_V2 = Dialect(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    ModelConfig(attention=MLAConfig(), rope=RopeConfig(interleaved=True), moe=_mixture()),
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

_DEEPSEEK_V3 = Dialect(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    ModelConfig(
        attention=MLAConfig(),
        rope=RopeConfig(interleaved=True),
        moe=_mixture(score="sigmoid", group_score="topk_sum", expert_bias=True),
    ),
    (
        *_latent_keys(),
        Key("norm_topk_prob", "moe.router.normalize", True),
        Key("n_group", "moe.router.num_groups", 1),
        Key("topk_group", "moe.router.top_groups", 1),
        Key("rope_interleave", "rope.interleaved", True),
        Key("num_nextn_predict_layers", "num_mtp", 0, names=("num_mtp_layers",)),
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
    # The MTP module, where config.json does not mention it.
    beside=("model.layers.{layers}.",),
    copies=MTP_COPIES,
)

_LLAMA = Dialect(
    "llama",
    "LlamaForCausalLM",
    ModelConfig(attention=_PLAIN, moe=None),
    (*_DECODER, Key("intermediate_size", "dense_hidden_dim")),
    (*DECODER_NAMES, *HEAD_NAMES, *DENSE_NAMES),
    (ROPE, HEADS),
    {**_SILU, **_NO_BIAS, "mlp_bias": (False,)},
)

_QWEN3 = Dialect(
    "qwen3",
    "Qwen3ForCausalLM",
    ModelConfig(attention=replace(_PLAIN, qk_norm="head"), moe=None),
    (*_DECODER, Key("intermediate_size", "dense_hidden_dim")),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *DENSE_NAMES),
    (ROPE, HEADS, FULL_LAYERS),
    {**_SILU, **_NO_BIAS, "use_sliding_window": (False,), "sliding_window": (None,)},
)

# A family is added to this list. Reading knows one name more than writing: Kimi-K2 is stored as DeepSeek-V3.
DIALECTS = {
    dialect.model_type: dialect
    for dialect in (_MIXTRAL, _QWEN3_MOE, _OLMOE, _DEEPSEEK_V3, _GPT_OSS, _DEEPSEEK_V2, _LLAMA, _QWEN3)
}
READABLE = {**DIALECTS, "kimi_k2": replace(_DEEPSEEK_V3, model_type="kimi_k2")}
