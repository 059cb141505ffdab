"""One table per model family: the keys of its config.json and the names of its tensors, each read in both directions.

`config_keys.py` says what a table is made of. `families_2025.py` has the families that were published in 2025.
"""

from __future__ import annotations

from dataclasses import replace

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
)
from moefold.checkpoint.hf.config_keys import (
    DECODER,
    EXPERTS,
    LOCAL_EXPERTS,
    NO_BIAS,
    PLAIN,
    SILU,
    TOP_K,
    HfFamily,
    Key,
    latent_keys,
    moe_base,
)
from moefold.checkpoint.hf.families_2025 import (
    DOTS1,
    ERNIE4_5_MOE,
    GLM4_MOE,
    HUNYUAN_MOE,
    LLAMA4,
    LLAMA4_TEXT,
    MINIMAX_M2,
    QWEN3_NEXT,
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
    NORMED_HEAD_NAMES,
    mtp_names,
)
from moefold.checkpoint.hf.name_rules import CopyRule, NameRule
from moefold.config.attention import MLAConfig, RopeConfig
from moefold.config.model import ModelConfig
from moefold.errors import UnknownNameError

_MIXTRAL = HfFamily(
    "mixtral",
    "MixtralForCausalLM",
    ModelConfig(attention=PLAIN, moe=moe_base(score_when="after_topk")),
    (
        *DECODER,
        TOP_K,
        LOCAL_EXPERTS,
        Key("intermediate_size", "moe.expert_hidden_dim"),
        Key("sliding_window", "attention.window", None),
    ),
    (*DECODER_NAMES, *HEAD_NAMES, *MIXTRAL_EXPERT_NAMES),
    (ROPE, HEADS),
    SILU,
)

_QWEN3_MOE = HfFamily(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ModelConfig(attention=replace(PLAIN, qk_norm="head"), moe=moe_base()),
    (
        *DECODER,
        TOP_K,
        EXPERTS,
        Key("intermediate_size", "dense_hidden_dim"),
        Key("moe_intermediate_size", "moe.expert_hidden_dim"),
        Key("norm_topk_prob", "moe.router.normalize", False),
    ),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *DENSE_NAMES, *EXPERT_NAMES),
    (ROPE, HEADS, DENSE_FIRST, FULL_LAYERS),
    {**SILU, **NO_BIAS, "decoder_sparse_step": (1,), "use_sliding_window": (False,), "sliding_window": (None,)},
)

_OLMOE = HfFamily(
    "olmoe",
    "OlmoeForCausalLM",
    ModelConfig(attention=replace(PLAIN, qk_norm="full"), moe=moe_base()),
    (
        *DECODER,
        TOP_K,
        EXPERTS,
        Key("intermediate_size", "moe.expert_hidden_dim"),
        Key("norm_topk_prob", "moe.router.normalize", False),
    ),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *EXPERT_NAMES),
    (ROPE, HEADS),
    {**SILU, **NO_BIAS, "clip_qkv": (None,)},
)

_GPT_OSS = HfFamily(
    "gpt_oss",
    "GptOssForCausalLM",
    ModelConfig(
        attention=replace(PLAIN, qkv_bias=True, out_bias=True, sinks=True),
        moe=replace(
            moe_base(score_when="after_topk", logit_bias=True), activation="clamped_swiglu", expert_mlp_bias=True
        ),
    ),
    (
        *DECODER,
        TOP_K,
        LOCAL_EXPERTS,
        Key("intermediate_size", "moe.expert_hidden_dim"),
        Key("sliding_window", "attention.window", 128),
    ),
    (*DECODER_NAMES, *HEAD_NAMES, *GPT_OSS_MOE_NAMES),
    (ROPE, HEADS, WINDOWS),
    {**SILU, "attention_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
)

_DEEPSEEK_V2 = HfFamily(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    ModelConfig(attention=MLAConfig(), rope=RopeConfig(interleaved=True), moe=moe_base()),
    latent_keys(),
    (*DECODER_NAMES, *LATENT_NAMES, *DEEPSEEK_MOE_NAMES),
    (ROPE, LATENT, SHARED_EXPERTS, V2_GROUPS),
    {
        **SILU,
        **NO_BIAS,
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
        moe=moe_base(score="sigmoid", group_score="topk_sum", expert_bias=True),
    ),
    (
        *latent_keys(),
        Key("norm_topk_prob", "moe.router.normalize", True),
        Key("n_group", "moe.router.num_groups", 1),
        Key("topk_group", "moe.router.top_groups", 1),
        Key("rope_interleave", "rope.interleaved", True),
        Key("num_nextn_predict_layers", "num_mtp", 0, aliases=("num_mtp_layers",)),
    ),
    (*DECODER_NAMES, *LATENT_NAMES, *DEEPSEEK_MOE_NAMES, *mtp_names(*LATENT_NAMES, *DEEPSEEK_MOE_NAMES)),
    (ROPE, LATENT, SHARED_EXPERTS, V3_GROUPS),
    {
        **SILU,
        **NO_BIAS,
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
    ModelConfig(attention=PLAIN, moe=None),
    (*DECODER, Key("intermediate_size", "dense_hidden_dim")),
    (*DECODER_NAMES, *HEAD_NAMES, *DENSE_NAMES),
    (ROPE, HEADS),
    {**SILU, **NO_BIAS, "mlp_bias": (False,)},
)

_QWEN3 = HfFamily(
    "qwen3",
    "Qwen3ForCausalLM",
    ModelConfig(attention=replace(PLAIN, qk_norm="head"), moe=None),
    (*DECODER, Key("intermediate_size", "dense_hidden_dim")),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *DENSE_NAMES),
    (ROPE, HEADS, FULL_LAYERS),
    {**SILU, **NO_BIAS, "use_sliding_window": (False,), "sliding_window": (None,)},
)

# Add a family to this tuple. Kimi-K2 is stored like DeepSeek-V3, and Llama 4 beside a vision model; they are read, and
# written as DeepSeek-V3 and as Llama 4's text model.
FAMILIES = {
    family.model_type: family
    for family in (
        *(_MIXTRAL, _QWEN3_MOE, _OLMOE, _DEEPSEEK_V3, _GPT_OSS, _DEEPSEEK_V2, _LLAMA, _QWEN3),
        *(DOTS1, GLM4_MOE, MINIMAX_M2, ERNIE4_5_MOE, HUNYUAN_MOE, LLAMA4_TEXT, QWEN3_NEXT),
    )
}
READABLE_FAMILIES = {**FAMILIES, "kimi_k2": replace(_DEEPSEEK_V3, model_type="kimi_k2"), "llama4": LLAMA4}


def family_rules(model_type: str) -> tuple[NameRule, ...]:
    return _family(model_type).name_rules


def family_copies(model_type: str) -> tuple[CopyRule, ...]:
    """HF tensors that repeat others."""
    return _family(model_type).copy_rules


def _family(model_type: str) -> HfFamily:
    if model_type not in READABLE_FAMILIES:
        raise UnknownNameError("Hugging Face family", model_type, READABLE_FAMILIES)
    return READABLE_FAMILIES[model_type]
