"""Keys of config.json by which layers and heads differ: partial RoPE, norms of queries, which layers are MoE layers.

As in `config_converters.py`, each is a pair of functions, one for each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
PARTIAL_ROPE_OF_QUARTER = _partial_rope(0.25)


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
    return {"rope.theta": theta * alpha ** (dim / (dim - 2)), "rope.yarn": None, "rope.llama3": None}


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


def _every(config: HfValues, key: str, default: int) -> int:
    value = config.get(key, default)
    if type(value) is not int or value < 1:
        raise UnsupportedValueError(key, f"{str(value)[:40]} is not a positive whole number")
    return value


def _read_llama4_layers(config: HfValues) -> Values:
    """Lists with an entry per layer must be what the two intervals say, which transformers fills them in by."""
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        return {}
    every = _every(config, "interleave_moe_layer_step", 1)
    _must_be(config, "moe_layers", [layer for layer in range(layers) if (layer + 1) % every == 0])
    nope = _every(config, "no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")
    if isinstance(given, list) and len(given) == layers and all(given):
        nope = layers + 1
    # 1 where a layer has RoPE.
    rotated = [int((layer + 1) % nope != 0) for layer in range(layers)]
    if given:
        _must_be(config, "no_rope_layers", rotated)
    chunk = config.get("attention_chunk_size", 8192)
    local = "chunked_attention" if chunk is not None else "full_attention"
    kinds = [local if has_rope else "full_attention" for has_rope in rotated]
    if config.get("layer_types") is not None and chunk is not None:
        _must_be(config, "layer_types", kinds)
    tuned = bool(config.get("attn_temperature_tuning", True)) and not all(rotated)
    return {
        "moe_every": every,
        "attention.nope_every": None if all(rotated) else nope,
        "attention.chunk": chunk,
        "attention.nope_temperature": config.get("attn_scale", 0.1) if tuned else 0.0,
        "attention.nope_floor": config.get("floor_scale", 8192),
    }


def _must_be(config: HfValues, key: str, expected: Sequence[object]) -> None:
    given = config.get(key)
    if given is not None and given != expected:
        raise UnsupportedValueError(key, f"{str(given)[:60]} is not {str(expected)[:60]}")


def _write_llama4_layers(model: ModelConfig) -> Values:
    attention, layers = gqa_of(model), range(model.num_layers)
    rotated = [int(attention.has_rope(layer)) for layer in layers]
    local = "chunked_attention" if attention.chunk is not None else "full_attention"
    return {
        "interleave_moe_layer_step": model.moe_every,
        "moe_layers": [layer for layer in layers if model.is_moe_layer(layer)],
        "no_rope_layer_interval": attention.nope_every or model.num_layers + 1,
        "no_rope_layers": rotated,
        "layer_types": [local if has_rope else "full_attention" for has_rope in rotated],
        "attention_chunk_size": attention.chunk,
        "attn_temperature_tuning": attention.nope_temperature != 0,
        "attn_scale": attention.nope_temperature,
        "floor_scale": attention.nope_floor,
    }


LLAMA4_LAYERS = ConfigConverter(
    (
        *("interleave_moe_layer_step", "moe_layers", "no_rope_layers", "no_rope_layer_interval", "layer_types"),
        *("attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale"),
    ),
    _read_llama4_layers,
    _write_llama4_layers,
)


def _read_llama4_sizes(config: HfValues) -> Values:
    hidden = config.get("intermediate_size")
    norm = "unit" if config.get("use_qk_norm", True) else "none"
    return {
        "moe.expert_hidden_dim": hidden,
        "moe.shared_hidden_dim": hidden,
        "attention.qk_norm": norm,
        "attention.qk_norm_when": "after_rope" if norm == "unit" else "before_rope",
    }


LLAMA4_SIZES = ConfigConverter(
    ("intermediate_size", "use_qk_norm"),
    _read_llama4_sizes,
    lambda model: {
        "intermediate_size": moe_of(model).expert_hidden_dim,
        "use_qk_norm": gqa_of(model).qk_norm == "unit",
    },
)


def _linear_layers(layers: int, every: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _read_linear_layers(config: HfValues) -> Values:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    every = config.get("full_attention_interval", 4)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UnsupportedValueError("layer_types", f"must have num_hidden_layers ({layers}) entries")
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
        if kinds != _linear_layers(len(kinds), every):
            raise UnsupportedValueError("layer_types", "the layers with full attention are not every n-th one")
    return {"linear_attention.full_attention_every": every}


def _write_linear_layers(model: ModelConfig) -> Values:
    if model.linear_attention is None:
        raise AttributeError("model.linear_attention is null")
    every = model.linear_attention.full_attention_every
    return {"layer_types": _linear_layers(model.num_layers, every), "full_attention_interval": every}


LINEAR_LAYERS = ConfigConverter(("layer_types", "full_attention_interval"), _read_linear_layers, _write_linear_layers)
