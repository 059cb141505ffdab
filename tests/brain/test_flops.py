"""The FLOP count behind MFU, against the counts of published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.blueprint.flops import executed_flops_per_token, forward_flops_per_token, training_flops_per_token
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.errors import UnknownNameError
from moefold.hardware.cluster import GPUS, gpu_named, peak_flops
from moefold.recipes.catalog import recipe

# GFLOP per token at 4,096 tokens, as published runs imply; DeepSeek-V3 without multi-token prediction.
PUBLISHED = {"deepseek_v3": 249.8, "qwen3_235b_a22b": 148.03, "qwen3_30b_a3b": 23.01, "kimi_k2": 204.5}


@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_the_published_count(name: str) -> None:
    counted = training_flops_per_token(recipe(name).model, 4096) / 1e9
    assert counted == pytest.approx(PUBLISHED[name], rel=5e-4)


def test_parts_by_hand() -> None:
    moe = MoEConfig(num_experts=8, top_k=2, expert_hidden_dim=5, shared_hidden_dim=3, shared_gate=True)
    attention = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=6)
    model = ModelConfig(100, 10, 3, attention, moe=moe, num_dense_layers=1, dense_hidden_dim=7)
    parts = forward_flops_per_token(model, 16)
    assert parts.attention_projections == 3 * 2 * 10 * (24 + 12 + 12 + 24)
    assert parts.attention_core == 3 * 2 * 4 * 12 * 8
    assert parts.dense == 2 * 10 * 7 * 3
    assert parts.shared == 2 * (2 * 10 * 3 * 3)
    assert parts.routed == 2 * 2 * (2 * 10 * 5 * 3)
    assert parts.router == 2 * 2 * 10 * (8 + 1)
    assert parts.head == 2 * 10 * 100
    assert training_flops_per_token(model, 16) == 3 * (parts.total - parts.router)


def test_a_window_is_a_band() -> None:
    """As wide as the sequence it is the triangle; far narrower it is nearly the window itself."""
    model = recipe("gpt_oss_20b").model
    attention = model.attention
    assert isinstance(attention, GQAConfig) and attention.window == 128
    every = replace(model, attention=replace(attention, window_every=1))
    none = replace(model, attention=replace(attention, window=None))
    wide = replace(every, attention=replace(attention, window=4096, window_every=1))
    core = [forward_flops_per_token(each, 4096).attention_core for each in (none, wide, every, model)]
    assert core[0] == core[1]
    assert core[2] == pytest.approx(core[0] * (128 - 2) / 2048)
    assert core[3] == pytest.approx((core[0] + core[2]) / 2)


def test_a_latent_costs_its_two_projections() -> None:
    plain = ModelConfig(moe=MoEConfig(expert_hidden_dim=32))
    latent = ModelConfig(moe=MoEConfig(expert_hidden_dim=32, latent_dim=16))
    assert forward_flops_per_token(plain, 8).routed == 2 * (2 * 2 * 64 * 32 * 3)
    assert forward_flops_per_token(latent, 8).routed == 2 * (2 * 2 * 16 * 32 * 3 + 2 * 2 * 64 * 16)


def test_a_module_that_looks_ahead_is_a_layer_a_join_and_a_head() -> None:
    model = recipe("deepseek_v3").model
    deeper = replace(model, num_layers=model.num_layers + 1)
    plain, one_more, ahead = (forward_flops_per_token(m, 4096) for m in (model, deeper, replace(model, num_mtp=1)))
    assert plain.join == 0 and ahead.join == 2 * 2 * 7168 * 7168
    assert ahead.head == 2 * plain.head
    assert ahead.total - ahead.join - plain.head == pytest.approx(one_more.total, rel=1e-12)
    more = training_flops_per_token(replace(model, num_mtp=1), 4096) / training_flops_per_token(model, 4096)
    assert more == pytest.approx(1.0408, abs=1e-4)


def test_the_block_of_a_module_has_the_window_of_its_number() -> None:
    model = replace(recipe("gpt_oss_20b").model, num_mtp=1)
    assert model.num_layers % 2 == 0
    windowed = forward_flops_per_token(model, 4096).attention_core
    odd = replace(model, num_layers=model.num_layers + 1)
    full = forward_flops_per_token(odd, 4096).attention_core
    assert full - windowed > windowed - forward_flops_per_token(replace(model, num_mtp=0), 4096).attention_core


def test_a_chunk_is_a_triangle_of_its_own() -> None:
    """Pairs that see each other, counted one by one; layers without RoPE have the whole triangle."""
    length, chunk = 50, 8
    pairs = sum(min(a, b) // chunk == max(a, b) // chunk for a in range(length) for b in range(length)) / 2
    plain, chunked = (
        forward_flops_per_token(ModelConfig(attention=GQAConfig(chunk=size)), length).attention_core
        for size in (None, chunk)
    )
    assert chunked / plain == pytest.approx(pairs / (length**2 / 2), rel=1e-12)
    half = ModelConfig(attention=GQAConfig(chunk=chunk, nope_every=2))
    assert forward_flops_per_token(half, length).attention_core == pytest.approx((plain + chunked) / 2, rel=1e-12)


def test_a_dense_model_has_no_experts() -> None:
    parts = forward_flops_per_token(ModelConfig(moe=None), 8)
    assert (parts.routed, parts.shared, parts.router) == (0, 0, 0) and parts.dense > 0


def test_the_executed_count_is_never_below_the_needed_one() -> None:
    for attention in (GQAConfig(sinks=True), MLAConfig()):
        model = ModelConfig(attention=attention)
        assert executed_flops_per_token(model, 64).total > training_flops_per_token(model, 64)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA GB200", 2450),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H1000", None),
        ("CPU", None),
        ("", None),
    ],
)
def test_peaks_by_device_name(device: str, tflops: float | None) -> None:
    assert peak_flops(device) == (None if tflops is None else tflops * 1e12)


def test_peaks_are_those_of_bfloat16() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert all(100 < gpu.bf16_tflops < 3000 for gpu in GPUS.values())


def test_gpus_have_names_in_any_case() -> None:
    assert all(gpu_named(name.lower()) is gpu and gpu_named(name.upper()) is gpu for name, gpu in GPUS.items())
    with pytest.raises(UnknownNameError, match="H100"):
        gpu_named("h10")
