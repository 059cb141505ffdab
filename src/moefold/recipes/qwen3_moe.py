"""Qwen3-MoE: many small experts, QK-norm per head, top-k probs normalised to sum to one."""

from __future__ import annotations

from moefold.config.attention import GQAConfig, RopeConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig

# Its learning rate and its length were not published: a run has to say them.
_UNPUBLISHED = OptimConfig(lr=0.0, lr_schedule=LRScheduleConfig(kind="cosine", floor=0.1))


def qwen3_30b_a3b() -> RunConfig:
    """128 experts, top 8; eight query heads per key/value head."""
    return RunConfig(
        name="qwen3_30b_a3b",
        model=_qwen3(
            vocab=151_936,
            dim=2048,
            layers=48,
            attention=GQAConfig(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="head"),
            experts=128,
            top_k=8,
            expert_hidden_dim=768,
            dense_hidden_dim=6144,
        ),
        parallel=ParallelConfig(ep=8),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=512),
        optim=_UNPUBLISHED,
    )


def qwen3_235b_a22b() -> RunConfig:
    """128 experts of twice the hidden dim, top 8; sixteen query heads per key/value head."""
    return RunConfig(
        name="qwen3_235b_a22b",
        model=_qwen3(
            vocab=151_936,
            dim=4096,
            layers=94,
            attention=GQAConfig(num_heads=64, num_kv_heads=4, head_dim=128, qk_norm="head"),
            experts=128,
            top_k=8,
            expert_hidden_dim=1536,
            dense_hidden_dim=12_288,
        ),
        parallel=ParallelConfig(tp=2, pp=8, ep=32),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=2048),
        optim=_UNPUBLISHED,
    )


def qwen3_30b_a3b_proxy() -> RunConfig:
    """30B-A3B's shape: num_heads * head_dim is larger than the model dim."""
    return RunConfig(
        name="qwen3_30b_a3b_proxy",
        model=_qwen3(
            vocab=256,
            dim=64,
            layers=2,
            attention=GQAConfig(num_heads=16, num_kv_heads=2, head_dim=8, qk_norm="head"),
            experts=16,
            top_k=4,
            expert_hidden_dim=24,
            dense_hidden_dim=192,
        ),
    )


def qwen3_235b_a22b_proxy() -> RunConfig:
    """235B-A22B's shape: sixteen query heads per key/value head."""
    return RunConfig(
        name="qwen3_235b_a22b_proxy",
        model=_qwen3(
            vocab=256,
            dim=96,
            layers=3,
            attention=GQAConfig(num_heads=32, num_kv_heads=2, head_dim=6, qk_norm="head"),
            experts=16,
            top_k=4,
            expert_hidden_dim=40,
            dense_hidden_dim=288,
        ),
    )


def _qwen3(
    *,
    vocab: int,
    dim: int,
    layers: int,
    attention: GQAConfig,
    experts: int,
    top_k: int,
    expert_hidden_dim: int,
    dense_hidden_dim: int,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        attention=attention,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(
            num_experts=experts,
            top_k=top_k,
            expert_hidden_dim=expert_hidden_dim,
            router=RouterConfig(normalize=True),
            # The report names the loss (of the global batch), config.json the coefficient.
            balance=BalanceConfig(global_batch=1e-3),
        ),
        # Every layer is an MoE layer; the published configuration has a dense hidden dim all the same.
        dense_hidden_dim=dense_hidden_dim,
        norm_eps=1e-6,
        # The default initializer_range of transformers' config class.
        init_std=0.02,
    )
