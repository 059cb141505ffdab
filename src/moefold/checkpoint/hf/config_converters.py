"""Keys of config.json that do not map one to one: RoPE, heads, windows, expert groups, dense layers.

Each converter is a pair of functions: from config.json to fields of ModelConfig, and from a ModelConfig to keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig

# A config.json.
HfValues = Mapping[str, object]
# Dotted fields of ModelConfig, or keys of a config.json, and their values.
Values = dict[str, object]


class UnsupportedValueError(ValueError):
    """A key of config.json has a value that is not supported."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class ConfigConverter:
    """`from_hf`: config.json -> dotted fields of ModelConfig; `to_hf`: a model -> keys of config.json."""

    keys: tuple[str, ...]
    from_hf: Callable[[HfValues], Values]
    to_hf: Callable[[ModelConfig], Values]


_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
_LLAMA3 = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
# Per rope type: its keys, the field of RopeConfig that they fill, and those that must be there.
_RESCALED = {
    "yarn": (_YARN, "rope.yarn", ("factor", "original_max_position_embeddings")),
    "llama3": (_LLAMA3, "rope.llama3", tuple(_LLAMA3)),
}
_ROPE_FIXED = {"attention_factor": (None,), "partial_rotary_factor": (1.0, None)}


def rope_section(config: HfValues) -> tuple[str, Mapping[str, object]]:
    """The key of the object that describes RoPE, and the object."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise UnsupportedValueError(key, "must be an object or null")
    return key, found


def _read_rope(config: HfValues) -> Values:
    key, found = rope_section(config)
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UnsupportedValueError("rope_theta", "is missing")
    if kind not in ("default", *_RESCALED):
        raise UnsupportedValueError(key, f"rope type {str(kind)[:40]!r} is not one of default, {', '.join(_RESCALED)}")
    fields, path, required = _RESCALED.get(str(kind), ({}, "", ()))
    rescaled: Values = {}
    for name, value in found.items():
        if name in _ROPE_FIXED and value in _ROPE_FIXED[name]:
            continue
        if name in fields:
            if value is not None:
                rescaled[fields[name]] = value
        elif name not in ("rope_type", "type", "rope_theta"):
            raise UnsupportedValueError(
                f"{key}.{name[:60]}", f"{str(value)[:40]} is not supported for rope type {kind}"
            )
    missing = [name for name in required if fields[name] not in rescaled]
    if missing:
        raise UnsupportedValueError(f"{key}.{missing[0]}", "is missing")
    return {"rope.theta": theta, "rope.yarn": None, "rope.llama3": None} | ({path: rescaled} if path else {})


def _write_rope(model: ModelConfig) -> Values:
    """With the older key names, which every version of transformers reads."""
    yarn, llama3 = model.rope.yarn, model.rope.llama3
    if llama3 is not None:
        given = {hf_key: getattr(llama3, field) for hf_key, field in _LLAMA3.items()}
        return {"rope_theta": model.rope.theta, "rope_scaling": {"rope_type": "llama3", **given}}
    if yarn is None:
        return {"rope_theta": model.rope.theta, "rope_scaling": None}
    scaling = {hf_key: getattr(yarn, field) for hf_key, field in _YARN.items()}
    # moefold's zero means "not given"; transformers would use it as a number.
    given = {key: value for key, value in scaling.items() if value or key not in ("mscale", "mscale_all_dim")}
    return {"rope_theta": model.rope.theta, "rope_scaling": {"rope_type": "yarn", **given}}


ROPE = ConfigConverter(("rope_theta", "rope_scaling", "rope_parameters"), _read_rope, _write_rope)


def head_dim_of(config: HfValues) -> int:
    heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    dim = config.get("head_dim")
    if dim is None and isinstance(heads, int) and isinstance(hidden_size, int) and heads > 0:
        return hidden_size // heads
    if not isinstance(dim, int):
        raise UnsupportedValueError(
            "head_dim", "is missing, and cannot be computed as hidden_size / num_attention_heads"
        )
    return dim


def _read_head_dim(config: HfValues) -> Values:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return {"attention.head_dim": head_dim_of(config), "attention.num_kv_heads": heads if groups is None else groups}


HEADS = ConfigConverter(
    ("head_dim", "num_key_value_heads"),
    _read_head_dim,
    lambda model: {"head_dim": gqa_of(model).head_dim, "num_key_value_heads": gqa_of(model).num_kv_heads},
)


def _read_v3_groups(config: HfValues) -> Values:
    """A check only: transformers scores a group by its best two experts, moefold by its best top_k / topk_group."""
    top_k, groups, chosen = (config.get(key) for key in ("num_experts_per_tok", "n_group", "topk_group"))
    if not (isinstance(top_k, int) and isinstance(groups, int) and isinstance(chosen, int)):
        return {}
    if chosen < groups and top_k != 2 * chosen:
        raise UnsupportedValueError(
            "topk_group",
            f"transformers scores a group by its best two experts, but num_experts_per_tok / topk_group, the "
            f"number that moefold uses, is {top_k} / {chosen}; use {top_k / 2:g} of {groups} groups, or n_group 1",
        )
    return {}


V3_GROUPS = ConfigConverter((), _read_v3_groups, lambda model: {})


def _read_latent(config: HfValues) -> Values:
    heads, nope, rope = (config.get(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    if config.get("num_key_value_heads", heads) not in (heads, None):
        raise UnsupportedValueError(
            "num_key_value_heads", f"latent attention has as many as num_attention_heads ({heads})"
        )
    if config.get("head_dim", rope) not in (rope, None):
        raise UnsupportedValueError("head_dim", f"must be qk_rope_head_dim ({rope})")
    if isinstance(nope, int) and isinstance(rope, int) and config.get("qk_head_dim", nope + rope) != nope + rope:
        raise UnsupportedValueError("qk_head_dim", f"must be qk_nope_head_dim + qk_rope_head_dim ({nope + rope})")
    return {}


LATENT = ConfigConverter(
    ("num_key_value_heads", "head_dim", "qk_head_dim"),
    _read_latent,
    lambda model: {"num_key_value_heads": model.attention.num_heads},
)


def _read_shared(config: HfValues) -> Values:
    shared, dim = config.get("n_shared_experts") or 0, config.get("moe_intermediate_size")
    if not (isinstance(shared, int) and isinstance(dim, int)):
        raise UnsupportedValueError("n_shared_experts", "must be a whole number, as must moe_intermediate_size")
    return {"moe.shared_hidden_dim": shared * dim}


def _write_shared(model: ModelConfig) -> Values:
    """If the hidden dim is not a multiple, reading it back gives another model, which is refused."""
    moe = moe_of(model)
    return {"n_shared_experts": moe.shared_hidden_dim // moe.expert_hidden_dim or None}


SHARED_EXPERTS = ConfigConverter(("n_shared_experts",), _read_shared, _write_shared)


def _read_v2_groups(config: HfValues) -> Values:
    method = config.get("topk_method", "greedy")
    if method == "greedy":
        return {"moe.router.num_groups": 1, "moe.router.top_groups": 1}
    if method != "group_limited_greedy":
        raise UnsupportedValueError("topk_method", f"{str(method)[:40]!r} is not one of greedy, group_limited_greedy")
    return {"moe.router.num_groups": config.get("n_group"), "moe.router.top_groups": config.get("topk_group")}


def _write_v2_groups(model: ModelConfig) -> Values:
    router = moe_of(model).router
    method = "group_limited_greedy" if router.num_groups > 1 else "greedy"
    return {"topk_method": method, "n_group": router.num_groups, "topk_group": router.top_groups}


V2_GROUPS = ConfigConverter(("topk_method", "n_group", "topk_group"), _read_v2_groups, _write_v2_groups)


def _read_dense_first(config: HfValues) -> Values:
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        raise UnsupportedValueError("mlp_only_layers", f"{str(layers)[:60]} are not the first layers")
    return {"num_dense_layers": len(layers)}


DENSE_FIRST = ConfigConverter(
    ("mlp_only_layers",), _read_dense_first, lambda model: {"mlp_only_layers": list(range(model.num_dense_layers))}
)


def _read_full_layers(config: HfValues) -> Values:
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedValueError("layer_types", f"{str(kinds)[:60]} is not full_attention throughout")
    return {}


FULL_LAYERS = ConfigConverter(("layer_types",), _read_full_layers, lambda model: {})


def _read_windows(config: HfValues) -> Values:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None:
        return {"attention.window_every": 2}
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UnsupportedValueError("layer_types", f"must have num_hidden_layers ({layers}) entries")
    places = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    every = places[1] if len(places) > 1 else len(kinds)
    if kinds != _windows(len(kinds), every):
        raise UnsupportedValueError("layer_types", "the sliding layers are not every n-th, starting with the first")
    return {"attention.window_every": every}


def _windows(layers: int, every: int) -> list[str]:
    return ["full_attention" if layer % every else "sliding_attention" for layer in range(layers)]


WINDOWS = ConfigConverter(
    ("layer_types",),
    _read_windows,
    lambda model: {"layer_types": _windows(model.num_layers, gqa_of(model).window_every)},
)


def gqa_of(model: ModelConfig) -> GQAConfig:
    if not isinstance(model.attention, GQAConfig):
        raise AttributeError("model.attention is not of kind gqa")
    return model.attention


def moe_of(model: ModelConfig) -> MoEConfig:
    if model.moe is None:
        raise AttributeError("model.moe is null")
    return model.moe
