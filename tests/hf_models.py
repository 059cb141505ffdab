"""The transformers configuration of the same hyper-parameters as one of our runs: the tests' second opinion.

One function per family, chosen by how the run's name starts. `hf_config(run)` is what tests call; building the model
from it (on the meta device for full sizes, on the CPU for proxies) is up to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.moe import MoEConfig
from moefold.config.run import RunConfig
from moefold.recipes.catalog import RECIPES


def hf_config(run: RunConfig) -> PretrainedConfig:
    """Plain implementations everywhere: eager attention, one matmul per expert, no multi-token prediction."""
    for prefix, build in _FAMILIES.items():
        if run.name.startswith(prefix):
            return build(run)
    raise KeyError(f"no transformers family for a run named {run.name!r}; known prefixes: {', '.join(_FAMILIES)}")


def mixtral(run: RunConfig) -> PretrainedConfig:
    moe = _moe(run)
    return MixtralConfig(
        **_decoder(run), **_heads(run), intermediate_size=moe.expert_hidden_dim, num_local_experts=moe.num_experts
    )


def qwen2_moe(run: RunConfig) -> PretrainedConfig:
    """Its shared expert always has a gate; a run without one has that much less."""
    moe = _moe(run)
    return Qwen2MoeConfig(
        **_decoder(run),
        **_heads(run),
        qkv_bias=_gqa(run).qkv_bias,
        intermediate_size=run.model.dense_hidden_dim,
        moe_intermediate_size=moe.expert_hidden_dim,
        shared_expert_intermediate_size=moe.shared_hidden_dim,
        num_experts=moe.num_experts,
        norm_topk_prob=moe.router.normalize,
        mlp_only_layers=list(range(run.model.num_dense_layers)),
    )


def qwen3_moe(run: RunConfig) -> PretrainedConfig:
    moe = _moe(run)
    return Qwen3MoeConfig(
        **_decoder(run),
        **_heads(run),
        intermediate_size=run.model.dense_hidden_dim,
        moe_intermediate_size=moe.expert_hidden_dim,
        num_experts=moe.num_experts,
        norm_topk_prob=moe.router.normalize,
        mlp_only_layers=list(range(run.model.num_dense_layers)),
    )


def olmoe(run: RunConfig) -> PretrainedConfig:
    moe = _moe(run)
    return OlmoeConfig(
        **_decoder(run),
        **_heads(run),
        intermediate_size=moe.expert_hidden_dim,
        num_experts=moe.num_experts,
        norm_topk_prob=moe.router.normalize,
    )


def gpt_oss(run: RunConfig) -> PretrainedConfig:
    moe, attention = _moe(run), _gqa(run)
    every = attention.window_every
    return GptOssConfig(
        **_decoder(run),
        **_heads(run),
        intermediate_size=moe.expert_hidden_dim,
        num_local_experts=moe.num_experts,
        attention_bias=attention.qkv_bias,
        sliding_window=attention.window,
        layer_types=[
            "full_attention" if layer % every else "sliding_attention" for layer in range(run.model.num_layers)
        ],
    )


def deepseek_v2(run: RunConfig) -> PretrainedConfig:
    grouped = _moe(run).router.num_groups > 1
    return DeepseekV2Config(**_latent(run), topk_method="group_limited_greedy" if grouped else "greedy")


def deepseek_v3(run: RunConfig) -> PretrainedConfig:
    return DeepseekV3Config(**_latent(run), rope_interleave=run.model.rope.interleaved, num_mtp_layers=0)


_FAMILIES: dict[str, Callable[[RunConfig], PretrainedConfig]] = {
    "mixtral": mixtral,
    "qwen3": qwen3_moe,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "debug_mla": deepseek_v3,
    "debug_10m": qwen2_moe,
    "debug_50m": qwen3_moe,
    "debug": mixtral,
}
# One recipe of CPU size per family, for tests against transformers.
FAMILY_PROXIES = tuple(
    next(name for name in RECIPES if name.startswith(prefix) and name.endswith("_proxy"))
    for prefix in _FAMILIES
    if not prefix.startswith("debug")
)


def _decoder(run: RunConfig) -> dict[str, Any]:
    """The keys that every family spells the same way."""
    model = run.model
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "num_attention_heads": model.attention.num_heads,
        "num_experts_per_tok": _moe(run).top_k,
        "rope_parameters": _rope(run),
        "max_position_embeddings": _context(run),
        # Some families' default special tokens lie outside a small vocabulary.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def _heads(run: RunConfig) -> dict[str, Any]:
    attention = _gqa(run)
    return {"num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim}


def _latent(run: RunConfig) -> dict[str, Any]:
    """Latent attention and DeepSeek's routing, shared by V2 and V3."""
    moe, attention = _moe(run), run.model.attention
    assert isinstance(attention, MLAConfig)
    return {
        **_decoder(run),
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_latent,
        "kv_lora_rank": attention.kv_latent,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "intermediate_size": run.model.dense_hidden_dim,
        "first_k_dense_replace": run.model.num_dense_layers,
        "moe_intermediate_size": moe.expert_hidden_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_hidden_dim // moe.expert_hidden_dim,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.top_groups,
        "norm_topk_prob": moe.router.normalize,
        "routed_scaling_factor": moe.router.scale,
    }


def _rope(run: RunConfig) -> dict[str, Any]:
    rope = run.model.rope
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": rope.yarn.factor,
        "original_max_position_embeddings": rope.yarn.original_context,
        "beta_fast": rope.yarn.beta_fast,
        "beta_slow": rope.yarn.beta_slow,
        "mscale": rope.yarn.mscale,
        "mscale_all_dim": rope.yarn.mscale_all_dim,
        "truncate": rope.yarn.truncate,
    }


def _context(run: RunConfig) -> int:
    yarn = run.model.rope.yarn
    return run.data.seq_len if yarn is None else int(yarn.factor * yarn.original_context)


def _moe(run: RunConfig) -> MoEConfig:
    assert run.model.moe is not None
    return run.model.moe


def _gqa(run: RunConfig) -> GQAConfig:
    assert isinstance(run.model.attention, GQAConfig)
    return run.model.attention
