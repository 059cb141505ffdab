"""What a family's table of config.json is made of, and the keys that families share.

A `Key` maps a key of config.json to a field of ModelConfig. `base` has the values that all models of a family share
(its router, its norms). `fixed_values` has the keys of which moefold supports one value only; any other value is
refused. A `ConfigConverter` is for keys that do not map one to one. Every other key of a file must be in
`IGNORED_KEYS` or in the family's own `ignored_keys`, or it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moefold.checkpoint.hf.config_converters import ConfigConverter
from moefold.checkpoint.hf.name_rules import CopyRule, NameRule
from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig

REQUIRED = object()


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
    # As fixed values, for keys that transformers does not have: published files carry them, and they are not written.
    accepted_values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # The key of config.json that has the language model, where a model has other parts too.
    section: str = ""
    # Further keys of published files that do not change what the model computes.
    ignored_keys: frozenset[str] = frozenset()
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


DECODER = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "dim"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "attention.num_heads"),
    Key("rms_norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "tied_embeddings", False),
    Key("initializer_range", "init_std", 0.02),
)
TOP_K = Key("num_experts_per_tok", "moe.top_k", aliases=("experts_per_token",))
EXPERTS = Key("num_experts", "moe.num_experts", aliases=("num_local_experts",))
LOCAL_EXPERTS = Key("num_local_experts", "moe.num_experts", aliases=("num_experts",))
SILU = {"hidden_act": ("silu",)}
NO_BIAS = {"attention_bias": (False,)}
PLAIN = GQAConfig()


def moe_base(**router: Any) -> MoEConfig:
    return MoEConfig(router=RouterConfig(**router))


def latent_keys() -> tuple[Key, ...]:
    return (
        *DECODER,
        TOP_K,
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
