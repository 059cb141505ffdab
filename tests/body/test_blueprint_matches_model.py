"""The blueprint lists exactly what the built model has, for every recipe at full size, looking ahead or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.blueprint.parameters import buffers, parameters
from moefold.config.attention import GatedDeltaNetConfig, GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.recipes.catalog import RECIPES

SHARED = MoEConfig(shared_hidden_dim=24, shared_gate=True, latent_dim=20)
MODELS = {
    "defaults": ModelConfig(),
    "no experts": ModelConfig(moe=None),
    "dense first": ModelConfig(num_layers=3, num_dense_layers=2),
    "tied": ModelConfig(tied_embeddings=True),
    "every bias": ModelConfig(
        attention=GQAConfig(qkv_bias=True, out_bias=True, sinks=True, qk_norm="head"),
        moe=MoEConfig(expert_mlp_bias=True, router=RouterConfig(logit_bias=True, expert_bias=True)),
    ),
    "full norm": ModelConfig(attention=GQAConfig(qk_norm="full")),
    "gated attention": ModelConfig(attention=GQAConfig(output_gate=True, qkv_bias=True, qk_norm="head")),
    "hybrid": ModelConfig(
        num_layers=4, linear_attention=GatedDeltaNetConfig(), norm_scale="one_plus_weight", moe=SHARED
    ),
    "latent attention": ModelConfig(attention=MLAConfig(), moe=SHARED),
    "direct queries": ModelConfig(attention=MLAConfig(q_latent=None), moe=replace(SHARED, expert_mlp_bias=True)),
    **{name: recipe().model for name, recipe in RECIPES.items()},
}


@pytest.mark.parametrize("num_mtp", [0, 1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_names_and_shapes(model: ModelConfig, num_mtp: int) -> None:
    model = replace(model, num_mtp=num_mtp)
    with torch.device("meta"):
        built = build_decoder(model, torch.bfloat16, local_interfaces("grouped"))
    assert {name: tuple(value.shape) for name, value in built.named_parameters()} == {
        spec.name: spec.shape for spec in parameters(model)
    }
    assert {name: tuple(value.shape) for name, value in built.named_buffers()} == {
        spec.name: spec.shape for spec in buffers(model)
    }
