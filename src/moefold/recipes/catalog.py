"""All recipes by name. A recipe is a function without arguments that returns a run; its name is the function's.

NAME+PRESET is its latent form (`recipes/latent_moe.py`): qwen3_30b_a3b+latent_accuracy. NAME@GPUxN is the same with the
layout that the planner chose for N such GPUs (`tuned_layouts.json`, written by `python -m benchmarks.tuned_layouts`),
beside the nearest run that somebody has measured and published: deepseek_v3@H100x1024.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.errors import UnknownNameError
from moefold.recipes import debug, deepseek, gpt_oss, mixtral, olmoe, qwen3_moe
from moefold.recipes.latent_moe import PRESETS, with_latent_experts

Recipe = Callable[[], RunConfig]

RECIPES: dict[str, Recipe] = {
    "debug_tiny": debug.debug_tiny,
    "debug_small": debug.debug_small,
    "debug_10m": debug.debug_10m,
    "debug_50m": debug.debug_50m,
    "debug_mla": debug.debug_mla,
    "mixtral_8x7b": mixtral.mixtral_8x7b,
    "mixtral_8x7b_proxy": mixtral.mixtral_8x7b_proxy,
    "mixtral_8x22b": mixtral.mixtral_8x22b,
    "mixtral_8x22b_proxy": mixtral.mixtral_8x22b_proxy,
    "qwen3_30b_a3b": qwen3_moe.qwen3_30b_a3b,
    "qwen3_30b_a3b_proxy": qwen3_moe.qwen3_30b_a3b_proxy,
    "qwen3_235b_a22b": qwen3_moe.qwen3_235b_a22b,
    "qwen3_235b_a22b_proxy": qwen3_moe.qwen3_235b_a22b_proxy,
    "deepseek_v2_lite": deepseek.deepseek_v2_lite,
    "deepseek_v2_lite_proxy": deepseek.deepseek_v2_lite_proxy,
    "deepseek_v3": deepseek.deepseek_v3,
    "deepseek_v3_proxy": deepseek.deepseek_v3_proxy,
    "olmoe_1b_7b": olmoe.olmoe_1b_7b,
    "olmoe_1b_7b_proxy": olmoe.olmoe_1b_7b_proxy,
    "gpt_oss_20b": gpt_oss.gpt_oss_20b,
    "gpt_oss_20b_proxy": gpt_oss.gpt_oss_20b_proxy,
    "gpt_oss_120b": gpt_oss.gpt_oss_120b,
    "gpt_oss_120b_proxy": gpt_oss.gpt_oss_120b_proxy,
    "kimi_k2": deepseek.kimi_k2,
    "kimi_k2_proxy": deepseek.kimi_k2_proxy,
}


class PublishedRun(NamedTuple):
    """A run that somebody else measured; ``what`` says the model, the GPUs, the number format and the layout."""

    id: str
    what: str
    source: str
    tokens_per_gpu_second: float


class TunedLayout(NamedTuple):
    """Keys of the run that the layout changes, what is predicted for it, and the nearest published run."""

    changes: Mapping[str, str]
    step_seconds: float
    gib: float
    nearest: PublishedRun | None = None


def recipe(name: str) -> RunConfig:
    """The run of that name; dashes and capitals are accepted, so DeepSeek-V3 is deepseek_v3."""
    known, _, cluster = recipe_name(name).partition("@")
    base, _, preset = known.partition("+")
    run = with_latent_experts(RECIPES[base](), preset) if preset else RECIPES[base]()
    return override(run, tuned_layouts()[known][cluster].changes) if cluster else run


def recipe_name(name: str) -> str:
    """As the catalog has it."""
    known, at, cluster = name.lower().replace("-", "_").partition("@")
    base, plus, preset = known.partition("+")
    if base not in RECIPES:
        raise UnknownNameError("recipe", base, RECIPES)
    if plus and preset not in PRESETS:
        raise UnknownNameError(f"preset of {base}", preset, PRESETS)
    if at and cluster not in (layouts := tuned_layouts().get(known, {})):
        raise UnknownNameError(f"layout of {known}", cluster, layouts)
    return known + at + cluster


@cache
def tuned_layouts() -> dict[str, dict[str, TunedLayout]]:
    """By recipe, with its preset if it has one, and GPUxN."""
    data = json.loads(files("moefold.recipes").joinpath("tuned_layouts.json").read_text())
    return {name: {where: _tuned(**row) for where, row in rows.items()} for name, rows in data.items()}


def _tuned(nearest: dict[str, Any] | None = None, **row: Any) -> TunedLayout:
    return TunedLayout(**row, nearest=PublishedRun(**nearest) if nearest else None)
