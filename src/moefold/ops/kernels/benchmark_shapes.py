"""The published models whose layers kernels are compiled for: few large experts and many small ones."""

from __future__ import annotations

from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.recipes.catalog import recipe

# By the name under which a build is listed.
_RECIPES = {"DeepSeek-V3": "deepseek_v3", "Qwen3-235B": "qwen3_235b_a22b", "Mixtral-8x7B": "mixtral_8x7b"}

MODELS: dict[str, ModelConfig] = {name: recipe(known).model for name, known in _RECIPES.items()}


def moe_of(model: ModelConfig) -> MoEConfig:
    assert model.moe is not None, "kernels are compiled for MoE models"
    return model.moe
