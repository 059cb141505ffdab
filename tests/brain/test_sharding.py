"""Cuts tile every parameter exactly, and each parameter knows over which axes its gradient must be summed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from moefold.blueprint.model_shape import Layer, Recurrence
from moefold.blueprint.parameters import ParameterSpec, block_parameters, parameters
from moefold.blueprint.sharding import (
    RULES,
    cuts,
    grid_of,
    local_shape,
    local_slices,
    partial_axes,
    rules_for,
    shard_dim,
)
from moefold.config.attention import GatedDeltaNetConfig, GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.config.parallel import ParallelConfig
from moefold.recipes.catalog import RECIPES, recipe
from moefold.topology.folded_layout import fold

EVERYTHING = ModelConfig(
    vocab_size=32,
    dim=16,
    num_layers=2,
    num_dense_layers=1,
    dense_hidden_dim=12,
    attention=GQAConfig(
        num_heads=8, num_kv_heads=4, head_dim=6, qk_norm="full", qkv_bias=True, out_bias=True, sinks=True
    ),
    moe=MoEConfig(
        num_experts=4,
        expert_hidden_dim=8,
        router=RouterConfig(logit_bias=True),
        shared_hidden_dim=8,
        shared_gate=True,
        latent_dim=10,
        expert_mlp_bias=True,
    ),
)
MODELS = {
    "everything": EVERYTHING,
    "latent attention": replace(recipe("deepseek_v3_proxy").model, num_mtp=1),
    "heads normalised one by one": recipe("qwen3_30b_a3b_proxy").model,
    "linear attention": replace(EVERYTHING, linear_attention=GatedDeltaNetConfig(4, 8, full_attention_every=2)),
}
LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tp=2),
    ParallelConfig(ep=4),
    ParallelConfig(tp=2, ep=2, etp=2),
    ParallelConfig(tp=2, ep=4),
    ParallelConfig(etp=4, ep=2),
    ParallelConfig(tp=2, etp=4),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_slices_of_all_ranks_tile_the_parameter(model: ModelConfig, parallel: ParallelConfig) -> None:
    layout = fold(parallel, world=8)
    for spec in parameters(model):
        copies: Counter[tuple[int, ...]] = Counter()
        for rank in range(layout.world):
            copies.update(product(*(range(part.start, part.stop) for part in local_slices(spec, layout, rank))))
        ways = prod(layout.size(cut.axis) for cut in cuts(spec))
        assert prod(local_shape(spec, layout)) * ways == spec.size
        assert len(copies) == spec.size
        assert set(copies.values()) == {layout.world // ways}


@pytest.mark.parametrize("name", RECIPES)
def test_no_parameter_is_cut_twice_along_a_dim(name: str) -> None:
    for spec in parameters(RECIPES[name]().model):
        dims = [cut.dim for cut in cuts(spec)]
        assert len(set(dims)) == len(dims) and all(dim < len(spec.shape) for dim in dims), spec.name


def test_every_rule_has_a_parameter() -> None:
    specs = [spec for model in MODELS.values() for spec in parameters(model)]
    # moefold plans recurrent layers, but trains no model that has one.
    specs += block_parameters("layers.0.", Layer(Recurrence(4, 16, 8, 2), None), 64)
    assert {rule for spec in specs for rule in rules_for(spec.name)} == set(RULES)


def test_which_gradients_are_summed_beyond_data_parallelism() -> None:
    axes = {re.sub(r"^layers\.\d+\.", "", spec.name): partial_axes(spec) for spec in parameters(EVERYTHING)}
    over_tp = {name for name, found in axes.items() if found == ("tp",)}
    assert over_tp == {
        "attention_norm.weight",
        "attention.out.bias",
        "feed_forward_norm.weight",
        "feed_forward.router.weight",
        "feed_forward.router.bias",
        "feed_forward.shared_gate.weight",
        "feed_forward.latent_down.weight",
        "feed_forward.latent_up.weight",
        "final_norm.weight",
    }
    assert {name for name, found in axes.items() if found == ("etp",)} == {"feed_forward.experts.down_bias"}


def test_a_norm_is_cut_with_the_heads_only_when_it_spans_them() -> None:
    for model, spans in ((EVERYTHING, True), (MODELS["heads normalised one by one"], False)):
        norm = next(spec for spec in parameters(model) if spec.name == "layers.0.attention.q_norm.weight")
        assert bool(cuts(norm)) is spans
        assert partial_axes(norm) == (() if spans else ("tp",))
    latent = [spec for spec in parameters(MODELS["latent attention"]) if spec.name.endswith("_norm.weight")]
    assert all(partial_axes(spec) == ("tp",) for spec in latent)


def test_the_block_of_a_module_is_cut_like_a_layer() -> None:
    model = replace(EVERYTHING, num_mtp=2)
    specs = {spec.name: spec for spec in parameters(model)}
    for name, spec in specs.items():
        if name.startswith("mtp.1.block."):
            layer = specs[name.replace("mtp.1.block.", "layers.1.")]
            assert (cuts(spec), partial_axes(spec), grid_of(name)) == (
                cuts(layer),
                partial_axes(layer),
                grid_of(layer.name),
            )
    own = {name: spec for name, spec in specs.items() if name.startswith("mtp") and ".block." not in name}
    assert sorted({name.partition(".")[2][2:] for name in own}) == [
        "hidden_norm.weight",
        "join.weight",
        "token_norm.weight",
        "weight",
    ]
    assert all(cuts(spec) == () and partial_axes(spec) == ("tp",) for spec in own.values())


def test_grids() -> None:
    assert grid_of("layers.3.feed_forward.experts.down_bias") == "expert"
    assert grid_of("layers.3.feed_forward.shared.down") == "attention"


def test_deepseek_v3_on_two_thousand_ranks() -> None:
    layout = fold(ParallelConfig(tp=2, pp=16, ep=64), world=2048)
    shapes = {spec.name: local_shape(spec, layout) for spec in parameters(recipe("deepseek_v3").model)}
    assert shapes["layers.60.feed_forward.experts.gate_up"] == (4, 2, 2048, 7168)
    assert shapes["layers.0.attention.kv_up.weight"] == (128 * 256 // 2, 512)


def test_uneven_cuts_are_refused() -> None:
    with pytest.raises(AssertionError, match="does not divide over tp=4"):
        local_shape(ParameterSpec("head.weight", (10, 4), "head"), fold(ParallelConfig(tp=4), world=4))


@pytest.mark.parametrize(
    ("shape", "ways", "dim"), [((8, 6), 4, 0), ((6, 8), 4, 1), ((3, 5, 4), 4, 2), ((3, 5), 4, 0), ((5,), 1, 0)]
)
def test_shard_dim_is_the_first_that_divides(shape: tuple[int, ...], ways: int, dim: int) -> None:
    assert shard_dim(shape, ways) == dim
