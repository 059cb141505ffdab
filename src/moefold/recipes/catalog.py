"""All recipes by name. A recipe is a function without arguments that returns a run; its name is the function's.

NAME@GPUxN is the same with the layout that the planner chose for N such GPUs (`tuned_layouts.json`, written by
`python -m benchmarks.tuned_layouts`): deepseek_v3@H100x1024.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.errors import UnknownNameError
from moefold.recipes import debug, deepseek, gpt_oss, mixtral, olmoe, qwen3_moe

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


class TunedLayout(NamedTuple):
    """Keys of the run that the layout changes, and what is predicted for it."""

    changes: Mapping[str, str]
    step_seconds: float
    gib: float


def recipe(name: str) -> RunConfig:
    """The run of that name; dashes and capitals are accepted, so DeepSeek-V3 is deepseek_v3."""
    base, _, cluster = recipe_name(name).partition("@")
    run = RECIPES[base]()
    return override(run, tuned_layouts()[base][cluster].changes) if cluster else run


def recipe_name(name: str) -> str:
    """As the catalog has it."""
    base, at, cluster = name.lower().replace("-", "_").partition("@")
    if base not in RECIPES:
        raise UnknownNameError("recipe", base, RECIPES)
    if at and cluster not in (known := tuned_layouts().get(base, {})):
        raise UnknownNameError(f"layout of {base}", cluster, known)
    return base + at + cluster


@cache
def tuned_layouts() -> dict[str, dict[str, TunedLayout]]:
    """By recipe and GPUxN."""
    data = json.loads(files("moefold.recipes").joinpath("tuned_layouts.json").read_text())
    return {name: {where: TunedLayout(**row) for where, row in rows.items()} for name, rows in data.items()}
