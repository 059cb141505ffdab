"""gpt-oss: biases in all linear layers, attention sinks, a sliding window in every second layer, clamped SwiGLU."""

from __future__ import annotations

from moefold.config.attention import GQAConfig, RopeConfig, YarnConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig

# Its learning rate and its length were not published: a run has to say them.
_UNPUBLISHED = OptimConfig(lr=0.0, lr_schedule=LRScheduleConfig(kind="cosine", floor=0.1))


def gpt_oss_20b() -> RunConfig:
    """24 layers of 32 experts, top 4."""
    return RunConfig(
        name="gpt_oss_20b",
        model=_full_size(layers=24, experts=32),
        parallel=ParallelConfig(ep=8),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=512),
        optim=_UNPUBLISHED,
    )


def gpt_oss_120b() -> RunConfig:
    """36 layers of 128 experts, top 4."""
    return RunConfig(
        name="gpt_oss_120b",
        model=_full_size(layers=36, experts=128),
        parallel=ParallelConfig(pp=4, ep=16),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=512),
        optim=_UNPUBLISHED,
    )


def gpt_oss_20b_proxy() -> RunConfig:
    """gpt-oss's shape: a window shorter than the sequences, in layers 0 and 2."""
    return RunConfig(name="gpt_oss_20b_proxy", model=_proxy_size(experts=8))


def gpt_oss_120b_proxy() -> RunConfig:
    """The same with 16 experts instead of 8."""
    return RunConfig(name="gpt_oss_120b_proxy", model=_proxy_size(experts=16))


def _full_size(*, layers: int, experts: int) -> ModelConfig:
    """The two published sizes differ only in depth and number of experts."""
    return _gpt_oss(
        vocab=201_088,
        dim=2880,
        layers=layers,
        heads=(64, 8, 64),
        window=128,
        original_context=4096,
        experts=experts,
        expert_hidden_dim=2880,
    )


def _proxy_size(*, experts: int) -> ModelConfig:
    return _gpt_oss(
        vocab=256,
        dim=64,
        layers=4,
        heads=(16, 2, 8),
        window=12,
        original_context=64,
        experts=experts,
        expert_hidden_dim=48,
    )


def _gpt_oss(
    *,
    vocab: int,
    dim: int,
    layers: int,
    heads: tuple[int, int, int],
    window: int,
    original_context: int,
    experts: int,
    expert_hidden_dim: int,
) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    return ModelConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        attention=GQAConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qkv_bias=True,
            out_bias=True,
            sinks=True,
            window=window,
            window_every=2,
        ),
        rope=RopeConfig(
            theta=150_000.0, yarn=YarnConfig(factor=32.0, original_context=original_context, truncate=False)
        ),
        moe=MoEConfig(
            num_experts=experts,
            top_k=4,
            expert_hidden_dim=expert_hidden_dim,
            router=RouterConfig(score_when="after_topk", logit_bias=True),
            # Not published: the coefficient of Megatron's example. config.json says 0.9, in transformers' units.
            balance=BalanceConfig(microbatch=1e-3),
            activation="clamped_swiglu",
            expert_mlp_bias=True,
        ),
        norm_eps=1e-5,
        # The default initializer_range of transformers' config class.
        init_std=0.02,
    )
