"""Small runs for development: seconds per run on one core, with every part that a large run has.

Only these train on the builtin corpus and for a number of steps; every other run must say both.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.config.attention import GQAConfig, MLAConfig, RopeConfig
from moefold.config.data import BUILTIN, DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.config.train import TrainConfig

# Fused on a CPU; on a GPU grouped in bfloat16, else sequential.
ANY_DEVICE = KernelsConfig(experts="auto")
_BYTES = DataConfig(train=BUILTIN, validation=BUILTIN)
_SHORT = TrainConfig(steps=200)


def debug_tiny() -> RunConfig:
    """Two layers and eight experts: the smallest MoE run."""
    return RunConfig(
        name="debug_tiny",
        kernels=ANY_DEVICE,
        model=ModelConfig(moe=MoEConfig(router=RouterConfig(normalize=True), balance=BalanceConfig(microbatch=0.01))),
        data=_BYTES,
        train=_SHORT,
    )


def debug_small() -> RunConfig:
    """A few million parameters: large enough to learn something on a laptop."""
    return RunConfig(
        name="debug_small",
        kernels=ANY_DEVICE,
        model=ModelConfig(
            vocab_size=512,
            dim=128,
            num_layers=4,
            attention=GQAConfig(num_heads=8, num_kv_heads=4, head_dim=24),
            moe=MoEConfig(
                num_experts=16,
                top_k=4,
                expert_hidden_dim=96,
                router=RouterConfig(normalize=True),
                balance=BalanceConfig(microbatch=0.01, z=1e-3),
            ),
        ),
        data=replace(_BYTES, seq_len=128, global_batch=16, micro_batch=4),
        optim=OptimConfig(lr=2e-3, lr_schedule=LRScheduleConfig(kind="cosine", warmup=20, floor=0.1)),
        train=_SHORT,
    )


def debug_10m() -> RunConfig:
    """Ten million parameters on the builtin corpus: learns Python's bytes in minutes on two cores.

    For comparing losses between layouts step by step. Layouts round differently, so a token whose top experts score
    equally may be assigned differently. With top-1 of few experts, a small router scale beside a shared expert and a
    low lr, such a flip changes the loss little.
    """
    return RunConfig(
        name="debug_10m",
        kernels=ANY_DEVICE,
        model=ModelConfig(
            dim=192,
            num_layers=4,
            attention=GQAConfig(num_heads=6, num_kv_heads=2, head_dim=32),
            moe=MoEConfig(
                num_experts=8,
                top_k=1,
                expert_hidden_dim=1024,
                shared_hidden_dim=512,
                router=RouterConfig(scale=0.02),
                balance=BalanceConfig(microbatch=0.02, z=1e-3),
            ),
            num_dense_layers=2,
            dense_hidden_dim=512,
            init_std=0.06,
        ),
        data=replace(_BYTES, seq_len=64, global_batch=8, micro_batch=2),
        optim=OptimConfig(lr=1.5e-4, lr_schedule=LRScheduleConfig(kind="cosine", warmup=20, floor=0.1)),
        train=TrainConfig(steps=300, validate_every=150),
    )


def debug_50m() -> RunConfig:
    """Fifty million parameters, a third of them active, in the shape of Qwen3-MoE: for timing a step."""
    return RunConfig(
        name="debug_50m",
        model=ModelConfig(
            vocab_size=10_240,
            dim=384,
            num_layers=8,
            attention=GQAConfig(num_heads=8, num_kv_heads=2, head_dim=64, qk_norm="head"),
            rope=RopeConfig(theta=1e6),
            moe=MoEConfig(
                num_experts=32,
                top_k=4,
                expert_hidden_dim=128,
                router=RouterConfig(normalize=True),
                balance=BalanceConfig(microbatch=1e-3),
            ),
            dense_hidden_dim=1536,
        ),
        precision=PrecisionConfig(compute="bfloat16"),
        kernels=ANY_DEVICE,
        data=replace(_BYTES, seq_len=512, global_batch=4, micro_batch=4),
        optim=OptimConfig(lr=1e-3, lr_schedule=LRScheduleConfig(kind="cosine", warmup=20, floor=0.1)),
        train=_SHORT,
    )


def debug_mla() -> RunConfig:
    """MLA, a dense layer, a shared expert, expert groups and the loss-free bias, at the smallest size."""
    return RunConfig(
        name="debug_mla",
        kernels=ANY_DEVICE,
        model=ModelConfig(
            num_layers=3,
            attention=MLAConfig(),
            rope=RopeConfig(interleaved=True),
            moe=MoEConfig(
                shared_hidden_dim=32,
                router=RouterConfig(
                    score="sigmoid",
                    normalize=True,
                    num_groups=2,
                    top_groups=1,
                    group_score="topk_sum",
                    expert_bias=True,
                ),
                balance=BalanceConfig(sequence=1e-4),
            ),
            num_dense_layers=1,
        ),
        data=_BYTES,
        train=_SHORT,
    )
