"""Model families published in 2025, one table each: GLM-4.5, dots.llm1, MiniMax-M2, ERNIE 4.5, HunYuan, Llama 4 and
Qwen3-Next.

The first four choose experts by sigmoid or softmax scores plus a loss-free bias, as DeepSeek-V3 does, and differ in
attention and names. `config_keys.py` says what a table is made of.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.checkpoint.hf.config_converters import (
    DENSE_FIRST,
    FULL_LAYERS,
    HEADS,
    ROPE,
    SHARED_EXPERTS,
    V3_GROUPS,
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
    moe_base,
)
from moefold.checkpoint.hf.layer_converters import (
    ERNIE_LAYERS,
    ERNIE_SHARED,
    HUNYUAN_EXPERTS,
    HUNYUAN_ROPE,
    LINEAR_LAYERS,
    LLAMA4_LAYERS,
    LLAMA4_SIZES,
    ONE_KIND_OF_ATTENTION,
    PARTIAL_ROPE,
    PARTIAL_ROPE_OF_HALF,
    PARTIAL_ROPE_OF_QUARTER,
    QK_NORM,
)
from moefold.checkpoint.hf.name_maps import (
    DECODER_NAMES,
    DEEPSEEK_MOE_NAMES,
    DELTA_NET_NAMES,
    DENSE_NAMES,
    ERNIE_MOE_NAMES,
    EXPERT_NAMES,
    GATED_SHARED_NAMES,
    HEAD_NAMES,
    HUNYUAN_NAMES,
    LLAMA4_NAMES,
    MINIMAX_MOE_NAMES,
    MTP_COPIES,
    NORMED_HEAD_NAMES,
    mtp_names,
)
from moefold.config.attention import GatedDeltaNetConfig, RopeConfig
from moefold.config.model import ModelConfig

_BIASED_SIGMOID = moe_base(score="sigmoid", group_score="topk_sum", expert_bias=True)
_ROUTED_AS_DEEPSEEK = (
    *DECODER,
    TOP_K,
    Key("intermediate_size", "dense_hidden_dim"),
    Key("first_k_dense_replace", "num_dense_layers", 0),
    Key("moe_intermediate_size", "moe.expert_hidden_dim"),
    Key("n_routed_experts", "moe.num_experts", aliases=("num_local_experts",)),
    Key("routed_scaling_factor", "moe.router.scale", 1.0),
    Key("n_group", "moe.router.num_groups", 1),
    Key("topk_group", "moe.router.top_groups", 1),
)

GLM4_MOE = HfFamily(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    ModelConfig(attention=PLAIN, moe=_BIASED_SIGMOID),
    (
        *_ROUTED_AS_DEEPSEEK,
        Key("norm_topk_prob", "moe.router.normalize", True),
        Key("attention_bias", "attention.qkv_bias", False),
        Key("num_nextn_predict_layers", "num_mtp", 0, aliases=("num_mtp_layers",)),
    ),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *DEEPSEEK_MOE_NAMES, *mtp_names(*NORMED_HEAD_NAMES, *DEEPSEEK_MOE_NAMES)),
    (PARTIAL_ROPE_OF_HALF, HEADS, QK_NORM, SHARED_EXPERTS, V3_GROUPS),
    SILU,
    accepted_values={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    # The MTP module, if config.json does not mention it.
    extra_prefixes=("model.layers.{layers}.",),
    copy_rules=MTP_COPIES,
)

DOTS1 = HfFamily(
    "dots1",
    "Dots1ForCausalLM",
    ModelConfig(attention=replace(PLAIN, qk_norm="head"), moe=_BIASED_SIGMOID),
    (*_ROUTED_AS_DEEPSEEK, Key("norm_topk_prob", "moe.router.normalize", False)),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *DEEPSEEK_MOE_NAMES),
    (ROPE, HEADS, FULL_LAYERS, ONE_KIND_OF_ATTENTION, SHARED_EXPERTS, V3_GROUPS),
    {**SILU, **NO_BIAS},
    accepted_values={"scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
)

MINIMAX_M2 = HfFamily(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    ModelConfig(
        attention=replace(PLAIN, qk_norm="full"), moe=moe_base(score="sigmoid", expert_bias=True, normalize=True)
    ),
    (*DECODER, TOP_K, LOCAL_EXPERTS, Key("intermediate_size", "moe.expert_hidden_dim")),
    (*DECODER_NAMES, *NORMED_HEAD_NAMES, *MINIMAX_MOE_NAMES),
    (PARTIAL_ROPE, HEADS),
    SILU,
    accepted_values={
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
        "shared_moe_mode": ("sigmoid",),
        "sliding_window": (None,),
        "layernorm_full_attention_beta": (1.0,),
        "layernorm_linear_attention_beta": (1.0,),
        "layernorm_mlp_beta": (1.0,),
    },
    # MTP modules are counted in the published files and not part of them.
    ignored_keys=frozenset(
        ("attn_type_list", "mlp_intermediate_size", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    ),
)

ERNIE4_5_MOE = HfFamily(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ModelConfig(attention=PLAIN, rope=RopeConfig(interleaved=True), moe=moe_base(expert_bias=True, normalize=True)),
    (
        *(key for key in DECODER if key.hf_key != "tie_word_embeddings"),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("moe_k", "moe.top_k", aliases=("num_experts_per_tok",)),
        Key("moe_num_experts", "moe.num_experts", aliases=("num_experts",)),
        Key("intermediate_size", "dense_hidden_dim"),
        Key("moe_intermediate_size", "moe.expert_hidden_dim"),
    ),
    (*DECODER_NAMES, *HEAD_NAMES, *ERNIE_MOE_NAMES),
    (ROPE, HEADS, ERNIE_LAYERS, ERNIE_SHARED),
    {**SILU, "use_bias": (False,), "moe_norm_min": (1e-12,)},
    accepted_values={"moe_gate": ("topk",), "moe_use_aux_free": (True,), "use_rmsnorm": (True,)},
    # Capacities of training; transformers drops no tokens.
    ignored_keys=frozenset(
        ("moe_capacity", "moe_dropout_prob", "moe_gate_act", "moe_aux_loss_lambda", "moe_z_loss_lambda")
    ),
    extra_prefixes=("model.mtp_",),
)

HUNYUAN_MOE = HfFamily(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    ModelConfig(attention=replace(PLAIN, qk_norm="head", qk_norm_when="after_rope"), moe=moe_base(normalize=True)),
    (*DECODER, Key("num_experts", "moe.num_experts", aliases=("num_local_experts",))),
    (*DECODER_NAMES, *HUNYUAN_NAMES),
    (HUNYUAN_ROPE, HEADS, HUNYUAN_EXPERTS),
    {**SILU, **NO_BIAS},
    accepted_values={
        "use_qk_norm": (True,),
        "use_rotary_pos_emb": (True,),
        "use_mixed_mlp_moe": (True,),
        "norm_topk_prob": (True,),
        "norm_type": ("rms",),
        "mlp_bias": (False,),
        "use_cla": (False,),
        "use_mla": (False,),
        "position_embedding_xdrope": (False,),
        "group_limited_greedy": (False,),
        "add_classification_head": (False,),
        "moe_layer_num_skipped": (0,),
        "routed_scaling_factor": (1.0, None),
        "moe_drop_tokens": (False,),
        "moe_random_routing_dropped_token": (False,),
    },
    # Of vision and classification heads, of latent attention that is off, and special tokens.
    ignored_keys=frozenset(
        (
            *(
                "eod_token_id",
                "sep_token_id",
                "class_num",
                "pool_type",
                "skip_cls_token",
                "dense_list",
                "org_vocab_size",
            ),
            *("mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"),
            *("video_start_id", "video_end_id", "image_token_id", "num_media_embeds", "vit_path", "vit_type"),
            *("cla_share_factor", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("n_group", "topk_group", "sep_id", "anyres_vit_max_image_size", "anyres_vit_two_views"),
        )
    ),
)

LLAMA4_TEXT = HfFamily(
    "llama4_text",
    "Llama4ForCausalLM",
    ModelConfig(
        attention=replace(PLAIN, qk_norm="unit", qk_norm_when="after_rope"),
        rope=RopeConfig(interleaved=True),
        moe=replace(moe_base(score="sigmoid", score_when="after_topk"), weight_at="input"),
    ),
    (*DECODER, TOP_K, LOCAL_EXPERTS, Key("intermediate_size_mlp", "dense_hidden_dim")),
    (*DECODER_NAMES, *LLAMA4_NAMES),
    (ROPE, HEADS, LLAMA4_LAYERS, LLAMA4_SIZES),
    {**SILU, **NO_BIAS},
    accepted_values={"for_llm_compressor": (False,)},
)
# Published files also have a vision model, which is left out.
LLAMA4 = replace(
    LLAMA4_TEXT,
    model_type="llama4",
    section="text_config",
    name_rules=tuple(replace(rule, hf_name=f"language_model.{rule.hf_name}") for rule in LLAMA4_TEXT.name_rules),
    extra_prefixes=("vision_model.", "multi_modal_projector."),
)

QWEN3_NEXT = HfFamily(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    ModelConfig(
        attention=replace(PLAIN, qk_norm="head", output_gate=True),
        linear_attention=GatedDeltaNetConfig(),
        norm_scale="one_plus_weight",
        moe=replace(moe_base(), shared_gate=True),
    ),
    (
        *DECODER,
        TOP_K,
        EXPERTS,
        Key("intermediate_size", "dense_hidden_dim"),
        Key("moe_intermediate_size", "moe.expert_hidden_dim"),
        Key("shared_expert_intermediate_size", "moe.shared_hidden_dim"),
        Key("norm_topk_prob", "moe.router.normalize", True),
        Key("linear_num_key_heads", "linear_attention.num_key_heads"),
        Key("linear_num_value_heads", "linear_attention.num_value_heads"),
        Key("linear_key_head_dim", "linear_attention.key_dim"),
        Key("linear_value_head_dim", "linear_attention.value_dim"),
        Key("linear_conv_kernel_dim", "linear_attention.conv_size", 4),
    ),
    (
        *(*DECODER_NAMES, *NORMED_HEAD_NAMES, *DELTA_NET_NAMES),
        *(*DENSE_NAMES, *EXPERT_NAMES, *GATED_SHARED_NAMES),
    ),
    (PARTIAL_ROPE_OF_QUARTER, HEADS, DENSE_FIRST, LINEAR_LAYERS),
    {**SILU, **NO_BIAS, "decoder_sparse_step": (1,)},
    accepted_values={"use_sliding_window": (False,)},
    # Its MTP module, which transformers leaves out as well.
    extra_prefixes=("mtp.",),
)
