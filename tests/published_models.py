"""config.json of published models, by family: what the files say, without special tokens and tokenizer keys.

`small(name)` is the same file with small sizes, for models that run. Keys that say which variant of a layer a model
has are as published.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moefold.checkpoint.hf.hf_config import read_config
from moefold.config.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Config = dict[str, Any]

PUBLISHED: dict[str, Config] = {
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 5120,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "dots.llm1": {
        "model_type": "dots1",
        "vocab_size": 152064,
        "hidden_size": 4096,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "attention_bias": False,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 32768,
        "max_window_layers": 62,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "mlp_intermediate_size": 8192,
        "shared_intermediate_size": 0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "rotary_dim": 64,
        "rope_theta": 5000000,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 196608,
        "num_mtp_modules": 3,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "ERNIE-4.5-21B-A3B": {
        "model_type": "ernie4_5_moe",
        "vocab_size": 103424,
        "hidden_size": 2560,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_use_aux_free": True,
        "use_bias": False,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    # The instruct model's; the base model's says rope_scaling factor 8, high_freq_factor 4, and 262144 positions.
    "Llama-4-Scout": {
        "model_type": "llama4_text",
        "vocab_size": 202048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "use_qk_norm": True,
        "attention_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 10485760,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "Llama-4-Maverick": {
        "model_type": "llama4_text",
        "vocab_size": 202048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [],
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "use_qk_norm": False,
        "attention_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 1048576,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "attention_bias": False,
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "Hunyuan-A13B": {
        "model_type": "hunyuan_v1_moe",
        "vocab_size": 128167,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "moe_intermediate_size": [3072] * 32,
        "num_experts": 64,
        "num_shared_expert": [1] * 32,
        "moe_topk": [8] * 32,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": False,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 262144,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "router_aux_loss_coef": 0.001,
    },
}

# H != I, so that a transposed matrix shows.
_SMALL: Config = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_k": 3,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "rotary_dim": 8,
    "max_position_embeddings": 64,
}
_SMALL_OF: dict[str, Config] = {
    "qwen3_next": {
        "num_hidden_layers": 5,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "hunyuan_v1_moe": {"moe_intermediate_size": [40] * 3, "num_shared_expert": [1] * 3, "moe_topk": [3] * 3},
    "minimax_m2": {"intermediate_size": 24},
    # The fourth layer has no RoPE; documents are longer than a chunk, and than the first step of the temperature.
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 5,
        "floor_scale": 6,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
}
# What comparisons need: no special tokens outside a small vocabulary, and plain implementations.
PLAIN: Config = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def small(name: str) -> Config:
    published = PUBLISHED[name]
    sizes = {**_SMALL, **_SMALL_OF.get(published["model_type"], {})}
    return published | {key: value for key, value in sizes.items() if key in published}


def model_of(config: Config) -> ModelConfig:
    """The model that `config` describes, without MTP modules, which transformers leaves out."""
    return read_config({key: value for key, value in config.items() if "num_nextn" not in key}).model


def hf_model(config: Config) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, rest = config["model_type"], {key: value for key, value in config.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest, **PLAIN))


@contextmanager
def transformers_in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Where transformers' code of this family asks for float32, it gets float64.

    A delta net norms outputs that may be nearly zero, which makes rounding a thousand times larger: two float32 models
    of the same weights, theirs and ours, are both some 1e-4 from the float64 one.
    """

    class Wide:
        def __getattr__(self, name: str) -> Any:
            return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    code = sys.modules[type(model).__module__]
    before = torch.Tensor.float
    code.torch, torch.Tensor.float = Wide(), torch.Tensor.double  # type: ignore[assignment, attr-defined, method-assign]
    try:
        yield
    finally:
        code.torch, torch.Tensor.float = torch, before  # type: ignore[attr-defined, method-assign]


class Documented(NamedTuple):
    """A row of the table in docs/hugging-face.md."""

    model_type: str
    parameters: int
    largest_difference: float


def documented() -> dict[str, Documented]:
    """By model: the published ones here, and recipes."""
    page = (Path(__file__).parent.parent / "docs" / "hugging-face.md").read_text()
    rows = re.findall(r"^\| (\S+) \| `(\w+)` \| ([\d,]+) \| ([\de.-]+) \|", page, flags=re.MULTILINE)
    return {name.strip("`"): Documented(kind, int(num.replace(",", "")), float(most)) for name, kind, num, most in rows}
