"""The tensor names of model families in files of `save_pretrained`.

Blocks of rules that families share; `config_maps.py` combines them in each family's table. Dims in the rules: E
experts, F expert hidden dim, D model dim.

MTP modules of DeepSeek-V3 and GLM-4.5 are stored as layers after the last one, `model.layers.61`: the names of a layer
for the block, four more tensors around it, and copies of the embedding and the head. `eh_proj` multiplies
[enorm(token); hnorm(hidden state)]; moefold's `join` has the same order, so it is the same matrix.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.checkpoint.hf.name_rules import CopyRule, NameRule


def _layer(moefold_name: str, hf_name: str, dims: str = "") -> NameRule:
    return NameRule(f"layers.{{i}}.{moefold_name}", f"model.layers.{{i}}.{hf_name}", dims)


def _gated(moefold_name: str, hf_name: str) -> tuple[NameRule, ...]:
    return (
        _layer(f"feed_forward.{moefold_name}gate_up[0]", f"mlp.{hf_name}gate_proj.weight"),
        _layer(f"feed_forward.{moefold_name}gate_up[1]", f"mlp.{hf_name}up_proj.weight"),
        _layer(f"feed_forward.{moefold_name}down", f"mlp.{hf_name}down_proj.weight"),
    )


def _experts(block: str, gate: str, up: str, down: str) -> tuple[NameRule, ...]:
    """A router, and three matrices per expert."""
    return (
        _layer("feed_forward.router.weight", f"{block}.gate.weight"),
        _layer("feed_forward.experts.gate_up[{e}, 0]", f"{block}.experts.{{e}}.{gate}.weight"),
        _layer("feed_forward.experts.gate_up[{e}, 1]", f"{block}.experts.{{e}}.{up}.weight"),
        _layer("feed_forward.experts.down[{e}]", f"{block}.experts.{{e}}.{down}.weight"),
    )


DECODER_NAMES = (
    NameRule("embedding.weight", "model.embed_tokens.weight"),
    NameRule("final_norm.weight", "model.norm.weight"),
    NameRule("head.weight", "lm_head.weight"),
    _layer("attention_norm.weight", "input_layernorm.weight"),
    _layer("feed_forward_norm.weight", "post_attention_layernorm.weight"),
)

HEAD_NAMES = tuple(
    _layer(f"attention.{moefold_name}.{leaf}", f"self_attn.{hf_name}.{leaf}")
    for moefold_name, hf_name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj"))
    for leaf in ("weight", "bias")
)
NORMED_HEAD_NAMES = (
    *HEAD_NAMES,
    _layer("attention.q_norm.weight", "self_attn.q_norm.weight"),
    _layer("attention.k_norm.weight", "self_attn.k_norm.weight"),
)
LATENT_NAMES = tuple(
    _layer(f"attention.{moefold_name}.weight", f"self_attn.{hf_name}.weight")
    for moefold_name, hf_name in (
        ("q", "q_proj"),
        ("q_down", "q_a_proj"),
        ("q_norm", "q_a_layernorm"),
        ("q_up", "q_b_proj"),
        ("kv_down", "kv_a_proj_with_mqa"),
        ("kv_norm", "kv_a_layernorm"),
        ("kv_up", "kv_b_proj"),
        ("out", "o_proj"),
    )
)

EXPERT_NAMES = _experts("mlp", "gate_proj", "up_proj", "down_proj")
DENSE_NAMES = _gated("", "")
# Dense layers, routed and shared experts, and the loss-free bias.
DEEPSEEK_MOE_NAMES = (
    *DENSE_NAMES,
    *EXPERT_NAMES,
    *_gated("shared.", "shared_experts."),
    _layer("feed_forward.router.expert_bias", "mlp.gate.e_score_correction_bias"),
)
MIXTRAL_EXPERT_NAMES = _experts("block_sparse_moe", "w1", "w3", "w2")
MINIMAX_MOE_NAMES = (
    *MIXTRAL_EXPERT_NAMES,
    _layer("feed_forward.router.expert_bias", "block_sparse_moe.e_score_correction_bias"),
)
ERNIE_MOE_NAMES = (
    *DENSE_NAMES,
    *EXPERT_NAMES,
    *_gated("shared.", "shared_experts."),
    _layer("feed_forward.router.expert_bias", "mlp.moe_statics.e_score_correction_bias", "E = () E"),
)
HUNYUAN_NAMES = (
    *HEAD_NAMES,
    _layer("attention.q_norm.weight", "self_attn.query_layernorm.weight"),
    _layer("attention.k_norm.weight", "self_attn.key_layernorm.weight"),
    *(replace(rule, hf_name=rule.hf_name.replace("gate.weight", "gate.wg.weight")) for rule in EXPERT_NAMES),
    *_gated("shared.", "shared_mlp."),
)
# Llama 4 stores experts as [in, out], gate and up side by side.
LLAMA4_NAMES = (
    *HEAD_NAMES,
    *(
        replace(rule, hf_name=rule.hf_name.replace(".mlp.", ".feed_forward."))
        for rule in (*DENSE_NAMES, *_gated("shared.", "shared_expert."))
    ),
    _layer("feed_forward.router.weight", "feed_forward.router.weight"),
    _layer("feed_forward.experts.gate_up", "feed_forward.experts.gate_up_proj", "E 2 F D = E D (2 F)"),
    _layer("feed_forward.experts.down", "feed_forward.experts.down_proj", "E D F = E F D"),
)
# Linear attention of Qwen3-Next, whose projections are grouped by key head as moefold's are.
DELTA_NET_NAMES = (
    _layer("attention.qkvz.weight", "linear_attn.in_proj_qkvz.weight"),
    _layer("attention.ba.weight", "linear_attn.in_proj_ba.weight"),
    _layer("attention.conv", "linear_attn.conv1d.weight", "X Y = X () Y"),
    _layer("attention.A_log", "linear_attn.A_log"),
    _layer("attention.dt_bias", "linear_attn.dt_bias"),
    _layer("attention.norm.weight", "linear_attn.norm.weight"),
    _layer("attention.linear_out.weight", "linear_attn.out_proj.weight"),
)
GATED_SHARED_NAMES = (
    *_gated("shared.", "shared_expert."),
    _layer("feed_forward.shared_gate.weight", "mlp.shared_expert_gate.weight"),
)
# Attention sinks, router and experts of gpt-oss, which stores [in, out], gate and up rows alternating.
GPT_OSS_MOE_NAMES = (
    _layer("attention.sinks", "self_attn.sinks"),
    _layer("feed_forward.router.weight", "mlp.router.weight"),
    _layer("feed_forward.router.bias", "mlp.router.bias"),
    _layer("feed_forward.experts.gate_up", "mlp.experts.gate_up_proj", "E 2 F D = E D (F 2)"),
    _layer("feed_forward.experts.gate_up_bias", "mlp.experts.gate_up_proj_bias", "E 2 F = E (F 2)"),
    _layer("feed_forward.experts.down", "mlp.experts.down_proj", "E D F = E F D"),
    _layer("feed_forward.experts.down_bias", "mlp.experts.down_proj_bias"),
)


def mtp_names(*layer: NameRule) -> tuple[NameRule, ...]:
    """An MTP module: every tensor of a layer, and the four around its block."""
    return (
        *(
            replace(
                rule,
                moefold_name=rule.moefold_name.replace("layers.{i}", "mtp.{k}.block"),
                hf_name=rule.hf_name.replace("{i}", "{after}"),
            )
            for rule in (*DECODER_NAMES, *layer)
            if rule.moefold_name.startswith("layers.{i}.")
        ),
        NameRule("mtp.{k}.token_norm.weight", "model.layers.{after}.enorm.weight"),
        NameRule("mtp.{k}.hidden_norm.weight", "model.layers.{after}.hnorm.weight"),
        NameRule("mtp.{k}.join.weight", "model.layers.{after}.eh_proj.weight"),
        NameRule("mtp_norms.{k}.weight", "model.layers.{after}.shared_head.norm.weight"),
    )


# The embedding and the head, which DeepSeek-V3 and GLM-4.5 store a second time with each MTP module.
MTP_COPIES = (
    CopyRule("embedding.weight", "model.layers.{after}.embed_tokens.weight"),
    CopyRule("head.weight", "model.layers.{after}.shared_head.head.weight"),
)
