"""Kimi-K2: DeepSeek-V3's shape with half the heads, 1.5 times the experts, one dense layer, no expert groups."""

from __future__ import annotations

from moefold.config.attention import MLAConfig, RopeConfig, YarnConfig
from moefold.config.data import DataConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.recipes.deepseek import v3_shape

# Not looked up: the default of the other families.
INIT_STD = 0.02


def kimi_k2() -> RunConfig:
    """384 experts, 64 heads, one dense layer; the layout is a starting point, not tuned."""
    return RunConfig(
        name="kimi_k2",
        model=v3_shape(
            vocab=163_840,
            dim=7168,
            layers=61,
            dense_layers=1,
            attention=MLAConfig(num_heads=64, q_latent=1536, kv_latent=512, nope_dim=128, rope_dim=64, value_dim=128),
            rope=_rope(original_context=4096),
            experts=384,
            top_k=8,
            expert_hidden_dim=2048,
            dense_hidden_dim=18_432,
            groups=(1, 1),
            scale=2.827,
            init_std=INIT_STD,
        ),
        parallel=ParallelConfig(pp=16, ep=16),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=16_384),
    )


def kimi_k2_proxy() -> RunConfig:
    """Kimi-K2's shape: 12 experts, so that code that assumes a power of two fails."""
    return RunConfig(
        name="kimi_k2_proxy",
        model=v3_shape(
            vocab=256,
            dim=64,
            layers=3,
            dense_layers=1,
            attention=MLAConfig(num_heads=2, q_latent=48, kv_latent=32, nope_dim=16, rope_dim=8, value_dim=20),
            rope=_rope(original_context=64),
            experts=12,
            top_k=3,
            expert_hidden_dim=24,
            dense_hidden_dim=160,
            groups=(1, 1),
            scale=2.827,
            init_std=INIT_STD,
        ),
    )


def _rope(*, original_context: int) -> RopeConfig:
    yarn = YarnConfig(
        factor=32.0, original_context=original_context, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
    )
    return RopeConfig(theta=50_000.0, interleaved=True, yarn=yarn)
