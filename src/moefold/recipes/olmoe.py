"""OLMoE: 64 small experts, softmax probs that are not normalised, QK-norm over the whole projection.

Sizes, schedule and coefficients are those of its published configuration (allenai/OLMoE, OLMoE-1B-7B-0924.yml). Two
things differ: theirs decays norms as well, and cuts its normal distribution off at three standard deviations.

Its trainer divides balance losses otherwise than moefold, which adds up the losses of layers: megablocks takes the mean
over layers, and the branch of it that trained OLMoE divides the z loss by top-k as well. The coefficients here are
theirs in moefold's units.
"""

from __future__ import annotations

from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig
from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.config.train import TrainConfig


def olmoe_1b_7b() -> RunConfig:
    """16 heads without grouping, 64 experts, top 8."""
    return RunConfig(
        name="olmoe_1b_7b",
        model=_olmoe(vocab=50_304, dim=2048, layers=16, heads=16, experts=64, top_k=8, expert_hidden_dim=1024),
        parallel=ParallelConfig(ep=8),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=1024),
        # 10.5B tokens of warmup, then a cosine up to 5T.
        optim=OptimConfig(lr=4e-4, lr_schedule=LRScheduleConfig(kind="cosine", warmup=2500, floor=0.1)),
        train=TrainConfig(steps=round(5e12 / (1024 * 4096))),
    )


def olmoe_1b_7b_proxy() -> RunConfig:
    """OLMoE's shape: one key/value head per query head, top 2 of 16 experts."""
    return RunConfig(
        name="olmoe_1b_7b_proxy",
        model=_olmoe(vocab=256, dim=64, layers=2, heads=4, experts=16, top_k=2, expert_hidden_dim=40),
    )


def _olmoe(
    *, vocab: int, dim: int, layers: int, heads: int, experts: int, top_k: int, expert_hidden_dim: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        attention=GQAConfig(num_heads=heads, num_kv_heads=heads, head_dim=dim // heads, qk_norm="full"),
        moe=MoEConfig(
            num_experts=experts,
            top_k=top_k,
            expert_hidden_dim=expert_hidden_dim,
            balance=BalanceConfig(microbatch=0.01 / layers, z=1e-3 / (layers * top_k)),
        ),
        norm_eps=1e-5,
        init_std=0.02,
    )
