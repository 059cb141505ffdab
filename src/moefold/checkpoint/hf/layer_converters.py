"""Keys of config.json by which layers and heads differ: partial RoPE, norms of queries, which layers are MoE layers.

As in `config_converters.py`, each is a pair of functions, one for each direction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moefold.checkpoint.hf.config_converters import (
    ROPE,
    ConfigConverter,
    HfValues,
    UnsupportedValueError,
    Values,
    gqa_of,
    head_dim_of,
    moe_of,
    rope_section,
)
from moefold.config.model import ModelConfig

_FACTOR = "partial_rotary_factor"


def _read_partial_rope(default: float, config: HfValues) -> Values:
    key, section = rope_section(config)
    head_dim = head_dim_of(config)
    given = section.get(_FACTOR, config.get(_FACTOR))
    rotary_dim = config.get("rotary_dim")
    factor = given if given is not None else default if rotary_dim is None else None
    dim = rotary_dim if factor is None else _whole(factor, head_dim)
    if rotary_dim is not None and rotary_dim != dim:
        raise UnsupportedValueError("rotary_dim", f"is {rotary_dim}, but {_FACTOR} {factor} of {head_dim} is {dim}")
    plain = {**config, key: {name: value for name, value in section.items() if name != _FACTOR} or None}
    return {**ROPE.from_hf(plain), "attention.rope_dim": None if dim == head_dim else dim}


def _whole(factor: object, head_dim: int) -> int:
    """As transformers rounds; the other families have no fraction here."""
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise UnsupportedValueError(_FACTOR, f"{str(factor)[:40]} is not between 0 and 1")
    return int(head_dim * factor)


def _write_partial_rope(model: ModelConfig) -> Values:
    attention = gqa_of(model)
    return {**ROPE.to_hf(model), _FACTOR: (attention.rope_dim or attention.head_dim) / attention.head_dim}


def _partial_rope(default: float) -> ConfigConverter:
    read: Callable[[HfValues], Values] = partial(_read_partial_rope, default)
    return ConfigConverter((*ROPE.keys, _FACTOR, "rotary_dim"), read, _write_partial_rope)


# Where config.json does not say it, GLM-4.5 rotates half of a head and MiniMax-M2 all of it.
PARTIAL_ROPE_OF_HALF, PARTIAL_ROPE = _partial_rope(0.5), _partial_rope(1.0)


def _read_qk_norm(config: HfValues) -> Values:
    used = config.get("use_qk_norm", False)
    if not isinstance(used, bool):
        raise UnsupportedValueError("use_qk_norm", "must be true or false")
    return {"attention.qk_norm": "head" if used else "none"}


QK_NORM = ConfigConverter(
    ("use_qk_norm",), _read_qk_norm, lambda model: {"use_qk_norm": gqa_of(model).qk_norm != "none"}
)


def _read_one_kind(config: HfValues) -> Values:
    """Without `layer_types`, layers from `max_window_layers` on have the window, if there is one."""
    window, first, layers = (config.get(key) for key in ("sliding_window", "max_window_layers", "num_hidden_layers"))
    if config.get("layer_types") or window is None:
        return {}
    if not (isinstance(first, int) and isinstance(layers, int) and first >= layers):
        raise UnsupportedValueError(
            "sliding_window", f"{window} in layers from {first} on of {layers} is not supported"
        )
    return {}


ONE_KIND_OF_ATTENTION = ConfigConverter(("sliding_window",), _read_one_kind, lambda model: {"sliding_window": None})


def _read_ernie_layers(config: HfValues) -> Values:
    first, last, step = (config.get(f"moe_layer_{key}") for key in ("start_index", "end_index", "interval"))
    layers = config.get("num_hidden_layers")
    if step not in (1, None):
        raise UnsupportedValueError("moe_layer_interval", f"{step} is not supported, only 1 is")
    if isinstance(layers, int) and last not in (-1, layers - 1, None):
        raise UnsupportedValueError("moe_layer_end_index", f"is {last}; the last layer ({layers - 1}) must be MoE")
    return {"num_dense_layers": 1 if first is None else first}


ERNIE_LAYERS = ConfigConverter(
    ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    _read_ernie_layers,
    lambda model: {
        "moe_layer_start_index": model.num_dense_layers,
        "moe_layer_end_index": model.num_layers - 1,
        "moe_layer_interval": 1,
    },
)


def _read_ernie_shared(config: HfValues) -> Values:
    shared, dim = config.get("moe_num_shared_experts", 2), config.get("moe_intermediate_size")
    if not (isinstance(shared, int) and isinstance(dim, int)):
        raise UnsupportedValueError("moe_num_shared_experts", "must be a whole number, as must moe_intermediate_size")
    return {"moe.shared_hidden_dim": shared * dim}


def _write_ernie_shared(model: ModelConfig) -> Values:
    """If the hidden dim is not a multiple, reading it back gives another model, which is refused."""
    moe = moe_of(model)
    return {"moe_num_shared_experts": moe.shared_hidden_dim // moe.expert_hidden_dim}


ERNIE_SHARED = ConfigConverter(("moe_num_shared_experts",), _read_ernie_shared, _write_ernie_shared)


def _read_hunyuan_rope(config: HfValues) -> Values:
    """A fixed `alpha` is another theta. The published files call this type "dynamic", and have YaRN's keys unused."""
    key, section = rope_section(config)
    if "alpha" not in section or section.get("rope_type", section.get("type")) != "dynamic":
        return ROPE.from_hf(config)
    theta, alpha = section.get("rope_theta", config.get("rope_theta")), section["alpha"]
    if not (isinstance(theta, int | float) and isinstance(alpha, int | float) and alpha > 0):
        raise UnsupportedValueError(f"{key}.alpha", "and rope_theta must be numbers above 0")
    dim = head_dim_of(config)
    return {"rope.theta": theta * alpha ** (dim / (dim - 2)), "rope.yarn": None}


HUNYUAN_ROPE = ConfigConverter(ROPE.keys, _read_hunyuan_rope, ROPE.to_hf)


def _of_all_layers(config: HfValues, key: str, default: object = None) -> object:
    """HunYuan has lists with a number for each layer; they must be the same."""
    value = config.get(key, default)
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    if isinstance(value, list):
        raise UnsupportedValueError(key, f"{str(value)[:60]} differ between layers")
    return value


def _read_hunyuan_experts(config: HfValues) -> Values:
    hidden, shared = config.get("intermediate_size"), _of_all_layers(config, "num_shared_expert", 1)
    if _of_all_layers(config, "moe_intermediate_size", hidden) not in (hidden, None):
        raise UnsupportedValueError("moe_intermediate_size", f"must be intermediate_size ({hidden})")
    if shared != 1:
        raise UnsupportedValueError("num_shared_expert", f"is {shared}; transformers has exactly 1")
    if config.get("attention_head_dim") not in (head_dim_of(config), None):
        raise UnsupportedValueError("attention_head_dim", f"must be the head dim ({head_dim_of(config)})")
    top_k = _of_all_layers(config, "moe_topk", config.get("num_experts_per_tok", 1))
    return {"moe.expert_hidden_dim": hidden, "moe.shared_hidden_dim": hidden, "moe.top_k": top_k}


HUNYUAN_EXPERTS = ConfigConverter(
    (
        *("intermediate_size", "moe_intermediate_size", "num_shared_expert", "attention_head_dim"),
        *("moe_topk", "num_experts_per_tok"),
    ),
    _read_hunyuan_experts,
    lambda model: {"intermediate_size": moe_of(model).expert_hidden_dim, "moe_topk": moe_of(model).top_k},
)
