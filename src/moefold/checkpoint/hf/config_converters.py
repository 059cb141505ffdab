"""The parts of a config.json that a table of keys cannot say: rotation, heads, windows, groups, which layers are dense.

Each is a pair of functions, from their keys to our places and from our model to their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig

Values = dict[str, Any]


class Unreadable(ValueError):
    """What a section of a config.json says cannot be; the first argument is the key."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class Section:
    """Keys that only mean something together: theirs -> dotted places of ours, and a model -> theirs."""

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Values]
    write: Callable[[ModelConfig], Values]


_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
_YARN_REQUIRED = ("factor", "original_max_position_embeddings")
_ROPE_FIXED = {"attention_factor": (None,), "partial_rotary_factor": (1.0, None)}


def _read_rope(config: Mapping[str, Any]) -> Values:
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise Unreadable(key, "must be a section of keys or null")
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise Unreadable("rope_theta", "is missing")
    if kind not in ("default", "yarn"):
        raise Unreadable(key, f"rope type {str(kind)[:40]!r} is not one of default, yarn")
    values: Values = {"rope.theta": theta, "rope.yarn": None if kind == "default" else {}}
    for name, value in found.items():
        if name in _ROPE_FIXED and value in _ROPE_FIXED[name]:
            continue
        if kind == "yarn" and name in _YARN:
            if value is not None:
                values["rope.yarn"][_YARN[name]] = value
        elif name not in ("rope_type", "type", "rope_theta"):
            raise Unreadable(f"{key}.{name[:60]}", f"{str(value)[:40]} is not understood for rope type {kind}")
    missing = [name for name in _YARN_REQUIRED if kind == "yarn" and _YARN[name] not in values["rope.yarn"]]
    if missing:
        raise Unreadable(f"{key}.{missing[0]}", "is missing")
    return values


def _write_rope(model: ModelConfig) -> Values:
    """In the older spelling, which every version reads."""
    yarn = model.rope.yarn
    if yarn is None:
        return {"rope_theta": model.rope.theta, "rope_scaling": None}
    scaling = {theirs: getattr(yarn, ours) for theirs, ours in _YARN.items()}
    # Zero means "not given" here, but would be a number there.
    given = {key: value for key, value in scaling.items() if value or key not in ("mscale", "mscale_all_dim")}
    return {"rope_theta": model.rope.theta, "rope_scaling": {"rope_type": "yarn", **given}}


ROPE = Section(("rope_theta", "rope_scaling", "rope_parameters"), _read_rope, _write_rope)


def _read_head_dim(config: Mapping[str, Any]) -> Values:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    dim = config.get("head_dim")
    if dim is None:
        if not (isinstance(heads, int) and isinstance(width, int) and heads > 0):
            raise Unreadable("head_dim", "is missing, and hidden_size / num_attention_heads cannot be formed")
        dim = width // heads
    groups = config.get("num_key_value_heads")
    return {"attention.head_dim": dim, "attention.num_kv_heads": heads if groups is None else groups}


HEADS = Section(
    ("head_dim", "num_key_value_heads"),
    _read_head_dim,
    lambda model: {"head_dim": _gqa(model).head_dim, "num_key_value_heads": _gqa(model).num_kv_heads},
)


def _read_v3_groups(config: Mapping[str, Any]) -> Values:
    """No values, as each number has a key: transformers adds two scores of a group whatever the numbers say."""
    top_k, groups, chosen = (config.get(key) for key in ("num_experts_per_tok", "n_group", "topk_group"))
    if not (isinstance(top_k, int) and isinstance(groups, int) and isinstance(chosen, int)):
        return {}
    if chosen < groups and top_k != 2 * chosen:
        raise Unreadable(
            "topk_group",
            f"transformers scores a group by its best two experts, but num_experts_per_tok / topk_group, which "
            f"is their number here, is {top_k} / {chosen}; use {top_k / 2:g} of {groups} groups, or n_group 1",
        )
    return {}


V3_GROUPS = Section((), _read_v3_groups, lambda model: {})


def _read_latent(config: Mapping[str, Any]) -> Values:
    heads, nope, rope = (config.get(key) for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    if config.get("num_key_value_heads", heads) not in (heads, None):
        raise Unreadable("num_key_value_heads", f"latent attention has as many as num_attention_heads ({heads})")
    if config.get("head_dim", rope) not in (rope, None):
        raise Unreadable("head_dim", f"must be qk_rope_head_dim ({rope})")
    if isinstance(nope, int) and isinstance(rope, int) and config.get("qk_head_dim", nope + rope) != nope + rope:
        raise Unreadable("qk_head_dim", f"must be qk_nope_head_dim + qk_rope_head_dim ({nope + rope})")
    return {}


LATENT = Section(
    ("num_key_value_heads", "head_dim", "qk_head_dim"),
    _read_latent,
    lambda model: {"num_key_value_heads": model.attention.num_heads},
)


def _read_shared(config: Mapping[str, Any]) -> Values:
    shared, dim = config.get("n_shared_experts") or 0, config.get("moe_intermediate_size")
    if not (isinstance(shared, int) and isinstance(dim, int)):
        raise Unreadable("n_shared_experts", "must be a whole number, as must moe_intermediate_size")
    return {"moe.shared_hidden_dim": shared * dim}


def _write_shared(model: ModelConfig) -> Values:
    """A hidden dim that is not a multiple reads back as another model, which is refused."""
    moe = _moe(model)
    return {"n_shared_experts": moe.shared_hidden_dim // moe.expert_hidden_dim or None}


SHARED_EXPERTS = Section(("n_shared_experts",), _read_shared, _write_shared)


def _read_v2_groups(config: Mapping[str, Any]) -> Values:
    method = config.get("topk_method", "greedy")
    if method == "greedy":
        return {"moe.router.num_groups": 1, "moe.router.top_groups": 1}
    if method != "group_limited_greedy":
        raise Unreadable("topk_method", f"{str(method)[:40]!r} is not one of greedy, group_limited_greedy")
    return {"moe.router.num_groups": config.get("n_group"), "moe.router.top_groups": config.get("topk_group")}


def _write_v2_groups(model: ModelConfig) -> Values:
    router = _moe(model).router
    method = "group_limited_greedy" if router.num_groups > 1 else "greedy"
    return {"topk_method": method, "n_group": router.num_groups, "topk_group": router.top_groups}


V2_GROUPS = Section(("topk_method", "n_group", "topk_group"), _read_v2_groups, _write_v2_groups)


def _read_dense_first(config: Mapping[str, Any]) -> Values:
    layers = config.get("mlp_only_layers") or []
    if layers != list(range(len(layers))):
        raise Unreadable("mlp_only_layers", f"{str(layers)[:60]} are not the first layers")
    return {"num_dense_layers": len(layers)}


DENSE_FIRST = Section(
    ("mlp_only_layers",), _read_dense_first, lambda model: {"mlp_only_layers": list(range(model.num_dense_layers))}
)


def _read_full_layers(config: Mapping[str, Any]) -> Values:
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise Unreadable("layer_types", f"{str(kinds)[:60]} is not full_attention throughout")
    return {}


FULL_LAYERS = Section(("layer_types",), _read_full_layers, lambda model: {})


def _read_windows(config: Mapping[str, Any]) -> Values:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None:
        return {"attention.window_every": 2}
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise Unreadable("layer_types", f"must have num_hidden_layers ({layers}) entries")
    places = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    every = places[1] if len(places) > 1 else len(kinds)
    if kinds != _windows(len(kinds), every):
        raise Unreadable("layer_types", "the sliding layers are not every n-th, starting with the first")
    return {"attention.window_every": every}


def _windows(layers: int, every: int) -> list[str]:
    return ["full_attention" if layer % every else "sliding_attention" for layer in range(layers)]


WINDOWS = Section(
    ("layer_types",),
    _read_windows,
    lambda model: {"layer_types": _windows(model.num_layers, _gqa(model).window_every)},
)


def _gqa(model: ModelConfig) -> GQAConfig:
    if not isinstance(model.attention, GQAConfig):
        raise AttributeError("model.attention is not of kind gqa")
    return model.attention


def _moe(model: ModelConfig) -> MoEConfig:
    if model.moe is None:
        raise AttributeError("model.moe is null")
    return model.moe
