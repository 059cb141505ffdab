"""What `calibrate` measures: matmuls and attention of usual shapes, and small runs that contain one of everything.

Large enough to resemble training on a computer, small enough for all of them to be measured in a minute.
"""

from __future__ import annotations

from typing import NamedTuple

from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.run import RunConfig


class DenseShape(NamedTuple):
    """The two matmuls of a gated feed-forward layer."""

    tokens: int
    dim: int
    hidden: int


class ExpertsShape(NamedTuple):
    """The same for experts with equally many rows each."""

    rows: int
    experts: int
    dim: int
    hidden: int


class AttentionShape(NamedTuple):
    tokens: int
    length: int
    heads: int
    kv_heads: int
    dim: int


class RoutedShape(NamedTuple):
    experts: int
    top_k: int
    dim: int


DENSE = (
    DenseShape(64, 256, 512),
    DenseShape(256, 256, 384),
    DenseShape(512, 256, 768),
    DenseShape(1024, 128, 256),
    DenseShape(512, 512, 1024),
)
EXPERTS = (
    ExpertsShape(256, 16, 256, 384),
    ExpertsShape(1024, 16, 256, 384),
    ExpertsShape(1024, 4, 256, 384),
    ExpertsShape(2048, 8, 512, 256),
)
ATTENTION = (
    AttentionShape(512, 256, 8, 4, 32),
    AttentionShape(512, 512, 4, 2, 64),
    AttentionShape(1024, 128, 8, 4, 32),
)


def _run(name: str, tokens: int, moe: bool) -> RunConfig:
    length = min(tokens, 256)
    moe_config = MoEConfig(
        num_experts=8,
        top_k=2,
        expert_hidden_dim=256,
        shared_hidden_dim=256,
        router=RouterConfig(normalize=True),
        balance=BalanceConfig(microbatch=0.01),
    )
    return RunConfig(
        name=name,
        model=ModelConfig(
            vocab_size=512,
            dim=256,
            num_layers=2,
            num_dense_layers=0 if moe else 2,
            dense_hidden_dim=512,
            attention=GQAConfig(num_heads=8, num_kv_heads=4, head_dim=32),
            moe=moe_config if moe else None,
        ),
        data=DataConfig(seq_len=length, global_batch=tokens // length, micro_batch=tokens // length),
    )


# One microbatch each. Few tokens show the cost of an operation, many the cost of its bytes.
RUNS = {
    run.name: run
    for run in (
        _run("dense, few tokens", 64, False),
        _run("dense, many tokens", 1024, False),
        _run("MoE, few tokens", 64, True),
        _run("MoE, some tokens", 512, True),
        _run("MoE, many tokens", 1536, True),
    )
}
# The run that several ranks execute at once, to measure how they slow each other down.
CROWDED = "MoE, some tokens"
# Bytes of a message: of all ranks of the group together.
MESSAGES = (1 << 12, 1 << 18, 1 << 21)
# The same of sharded parameters, which are larger because of a layer's experts.
PARAMETERS = (1 << 12, 1 << 20, 1 << 24)
# Documents per rank under context parallelism.
DOCUMENTS = (1, 4)
# Tokens per rank under expert parallelism.
TOKENS = (64, 1024)
CONTEXT = AttentionShape(256, 256, 8, 4, 32)
ROUTED = RoutedShape(16, 2, 256)
# Repetitions of (work, message) in one trial.
REPETITIONS = 2
