"""The list of parameters, and counts that can be checked by hand or against published numbers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from moefold.blueprint.param_counts import count_parameters
from moefold.blueprint.parameters import block_names, buffers, moe_block_names, parameters
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.recipes.catalog import RECIPES, recipe

# Counts of published runs, which leave out every vector: norms, biases, sinks.
PUBLISHED = {
    "deepseek_v3": (671_025_397_760, 37_551_276_032),
    "kimi_k2": (1_026_407_202_816, 32_860_471_296),
    "qwen3_30b_a3b": (30_531_911_680, 3_352_821_760),
    "qwen3_235b_a22b": (235_092_836_352, 22_189_965_312),
    "mixtral_8x22b": (140_619_939_840, 39_151_337_472),
    "gpt_oss_20b": (20_907_786_240, 4_186_275_840),
    "gpt_oss_120b": (116_788_838_400, 5_710_233_600),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_matrices_equal_published_counts(name: str) -> None:
    counts = count_parameters(recipe(name).model)
    assert (counts.matrices, counts.active_matrices) == PUBLISHED[name]


def test_deepseek_v3_to_the_digit() -> None:
    model = recipe("deepseek_v3").model
    counts = count_parameters(model)
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    loss_free_bias = 58 * 256
    assert (counts.by_kind["norm"], sum(spec.size for spec in buffers(model))) == (norms, loss_free_bias)
    assert (norms, loss_free_bias) == (1_006_592, 14_848)
    assert counts.total == counts.matrices + norms == 671_026_404_352
    assert counts.total + loss_free_bias == 671_026_419_200
    assert counts.active == counts.active_matrices + norms == 37_552_282_624
    assert counts.total - counts.active == 58 * (256 - 8) * 3 * 7168 * 2048


def test_deepseek_v3_with_its_module_to_the_digit() -> None:
    """Published files hold 3,918,786,560 elements in BF16 and 680,571,043,840 in FP8."""
    plain = recipe("deepseek_v3").model
    model = replace(plain, num_mtp=1)
    without, counts = count_parameters(plain), count_parameters(model)
    assert (without.mtp, without.active_mtp) == (0, 0)
    assert counts.mtp == counts.total - without.total == 11_610_067_968
    assert counts.active_mtp == counts.active - without.active == 688_100_352
    stored_again = 2 * 129_280 * 7168
    assert counts.total + stored_again == 3_918_786_560 + 680_571_043_840
    assert sum(spec.size for spec in buffers(model)) == 59 * 256


def test_modules_that_look_ahead_come_after_the_layers() -> None:
    bias = MoEConfig(router=RouterConfig(expert_bias=True))
    model = ModelConfig(num_layers=3, num_dense_layers=1, num_mtp=2, moe=bias, tied_embeddings=True)
    assert block_names(model) == ("layers.0", "layers.1", "layers.2", "mtp.0.block", "mtp.1.block")
    assert moe_block_names(model) == ("layers.1", "layers.2", "mtp.0.block", "mtp.1.block")
    assert [spec.name for spec in buffers(model)] == [
        f"{name}.feed_forward.router.expert_bias" for name in moe_block_names(model)
    ]
    specs = {spec.name: spec for spec in parameters(model)}
    ahead = [name.removeprefix("mtp.1.") for name in specs if name.startswith("mtp.1.")]
    assert ahead[:4] == ["token_norm.weight", "hidden_norm.weight", "join.weight", "block.attention_norm.weight"]
    assert specs["mtp.0.join.weight"].shape == (64, 128)
    assert [name for name in specs if name.count(".") == 1] == ["embedding.weight", "final_norm.weight"]
    assert list(specs)[-3:] == ["final_norm.weight", "mtp_norms.0.weight", "mtp_norms.1.weight"]
    layer = {name.removeprefix("layers.2."): spec.shape for name, spec in specs.items() if name.startswith("layers.2.")}
    inside = {
        name.removeprefix("mtp.0.block."): s.shape for name, s in specs.items() if name.startswith("mtp.0.block.")
    }
    assert inside == layer


def test_without_experts_a_module_is_dense() -> None:
    model = ModelConfig(moe=None, num_mtp=1)
    assert moe_block_names(model) == () and buffers(model) == ()
    assert "mtp.0.block.feed_forward.gate_up" in {spec.name for spec in parameters(model)}


@pytest.mark.timing
def test_listing_a_large_model_is_instant() -> None:
    model = recipe("deepseek_v3").model
    started = time.perf_counter()
    listed = parameters(model)
    assert time.perf_counter() - started < 0.1
    assert len(listed) < 1000


@pytest.mark.parametrize("name", RECIPES)
def test_names_are_unique_and_layers_complete(name: str) -> None:
    model = RECIPES[name]().model
    names = [spec.name for spec in parameters(model)]
    assert len(set(names)) == len(names)
    assert {int(n.split(".")[1]) for n in names if n.startswith("layers.")} == set(range(model.num_layers))


def test_gqa_with_every_option() -> None:
    attention = GQAConfig(
        num_heads=4, num_kv_heads=2, head_dim=6, qk_norm="full", qkv_bias=True, out_bias=True, sinks=True
    )
    expert = MoEConfig(
        num_experts=3,
        top_k=1,
        expert_hidden_dim=5,
        router=RouterConfig(logit_bias=True, expert_bias=True),
        shared_hidden_dim=7,
        shared_gate=True,
        latent_dim=11,
    )
    model = ModelConfig(
        vocab_size=32,
        dim=16,
        num_layers=1,
        attention=attention,
        moe=replace(expert, expert_mlp_bias=True),
        tied_embeddings=True,
    )
    assert {spec.name: spec.shape for spec in parameters(model)} == {
        "embedding.weight": (32, 16),
        "layers.0.attention_norm.weight": (16,),
        "layers.0.attention.q.weight": (24, 16),
        "layers.0.attention.q.bias": (24,),
        "layers.0.attention.k.weight": (12, 16),
        "layers.0.attention.k.bias": (12,),
        "layers.0.attention.v.weight": (12, 16),
        "layers.0.attention.v.bias": (12,),
        "layers.0.attention.q_norm.weight": (24,),
        "layers.0.attention.k_norm.weight": (12,),
        "layers.0.attention.sinks": (4,),
        "layers.0.attention.out.weight": (16, 24),
        "layers.0.attention.out.bias": (16,),
        "layers.0.feed_forward_norm.weight": (16,),
        "layers.0.feed_forward.router.weight": (3, 16),
        "layers.0.feed_forward.router.bias": (3,),
        "layers.0.feed_forward.experts.gate_up": (3, 2, 5, 11),
        "layers.0.feed_forward.experts.down": (3, 11, 5),
        "layers.0.feed_forward.experts.gate_up_bias": (3, 2, 5),
        "layers.0.feed_forward.experts.down_bias": (3, 11),
        "layers.0.feed_forward.shared.gate_up": (2, 7, 16),
        "layers.0.feed_forward.shared.down": (16, 7),
        "layers.0.feed_forward.shared_gate.weight": (1, 16),
        "layers.0.feed_forward.latent_down.weight": (11, 16),
        "layers.0.feed_forward.latent_up.weight": (16, 11),
        "final_norm.weight": (16,),
    }
    assert [(spec.name, spec.shape) for spec in buffers(model)] == [("layers.0.feed_forward.router.expert_bias", (3,))]


def test_mla_and_a_dense_layer() -> None:
    attention = MLAConfig(num_heads=2, q_latent=10, kv_latent=9, nope_dim=6, rope_dim=4, value_dim=5)
    model = ModelConfig(
        vocab_size=32, dim=16, num_layers=1, attention=attention, num_dense_layers=1, dense_hidden_dim=24
    )
    shapes = {spec.name.removeprefix("layers.0."): spec.shape for spec in parameters(model)}
    assert shapes["attention.q_down.weight"] == (10, 16)
    assert shapes["attention.q_norm.weight"] == (10,)
    assert shapes["attention.q_up.weight"] == (20, 10)
    assert shapes["attention.kv_down.weight"] == (13, 16)
    assert shapes["attention.kv_norm.weight"] == (9,)
    assert shapes["attention.kv_up.weight"] == (22, 9)
    assert shapes["attention.out.weight"] == (16, 10)
    assert shapes["feed_forward.gate_up"] == (2, 24, 16)
    assert shapes["feed_forward.down"] == (16, 24)
    direct = replace(model, attention=replace(attention, q_latent=None))
    assert "layers.0.attention.q.weight" in {spec.name for spec in parameters(direct)}
