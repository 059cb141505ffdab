"""Mixtral: eight large experts per layer, top 2, softmax over the two selected logits."""

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


def mixtral_8x7b() -> RunConfig:
    """Four query heads per key/value head; expert hidden dim 3.5 times the model dim."""
    return RunConfig(
        name="mixtral_8x7b",
        model=_mixtral(
            vocab=32_000,
            dim=4096,
            layers=32,
            attention=GQAConfig(num_heads=32, num_kv_heads=8, head_dim=128),
            expert_hidden_dim=14_336,
        ),
        parallel=ParallelConfig(pp=4, ep=8),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=256),
        optim=_UNPUBLISHED,
    )


def mixtral_8x22b() -> RunConfig:
    """Six query heads per key/value head; the first release's vocabulary of 32,000."""
    return RunConfig(
        name="mixtral_8x22b",
        model=_mixtral(
            vocab=32_000,
            dim=6144,
            layers=56,
            attention=GQAConfig(num_heads=48, num_kv_heads=8, head_dim=128),
            expert_hidden_dim=16_384,
        ),
        parallel=ParallelConfig(tp=2, pp=8, ep=8),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=256),
        optim=_UNPUBLISHED,
    )


def mixtral_8x7b_proxy() -> RunConfig:
    """8x7B's shape: four query heads per key/value head."""
    return RunConfig(
        name="mixtral_8x7b_proxy",
        model=_mixtral(
            vocab=256,
            dim=64,
            layers=2,
            attention=GQAConfig(num_heads=8, num_kv_heads=2, head_dim=12),
            expert_hidden_dim=112,
        ),
    )


def mixtral_8x22b_proxy() -> RunConfig:
    """8x22B's shape: six query heads per key/value head."""
    return RunConfig(
        name="mixtral_8x22b_proxy",
        model=_mixtral(
            vocab=256,
            dim=96,
            layers=3,
            attention=GQAConfig(num_heads=12, num_kv_heads=2, head_dim=10),
            expert_hidden_dim=128,
        ),
    )


def _mixtral(*, vocab: int, dim: int, layers: int, attention: GQAConfig, expert_hidden_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        attention=attention,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            expert_hidden_dim=expert_hidden_dim,
            router=RouterConfig(score_when="after_topk"),
            # The coefficient of its training was not published: this is the one of Megatron's example. The value in
            # config.json (0.02, and 0.001 for 8x22B) is in transformers' units: times top-k, divided by the layers.
            balance=BalanceConfig(microbatch=0.01),
        ),
        norm_eps=1e-5,
        # The default initializer_range of transformers' config class.
        init_std=0.02,
    )
