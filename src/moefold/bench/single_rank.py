"""Measurements of one rank with one thread: matmuls, attention, small runs, and the optimizer.

Everything runs as in training, with moefold's own operations and with gradients that accumulate in place. The shapes
are usual ones and the small runs contain one of everything: large enough to resemble training on a computer, small
enough for all of them to be measured in a minute. Several ranks (`bench/multi_rank.py`) measure the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.attention.sdpa import attend
from moefold.bench.clock import Progress, Reference, Trial, ratios
from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.precision import KernelsConfig
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch, whole_batch
from moefold.nn.matmul_kernels import GROUPED_MATMULS
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.optim.optimizer import clip_gradients, grad_norm_of
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.parallel.param_shards import finish_gradients
from moefold.pipeline.runtime import run_schedule
from moefold.pipeline.step import make_optimizer, primary_shards


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


def measure_alone(rounds: int, progress: Progress | None) -> dict[str, float]:
    """In units of the reference, by name: "dense 0 forward", "attention 1 backward", "run MoE, few tokens", "update..."

    "reference" itself is in seconds.
    """
    reference = Reference()
    found = {"reference": median(reference.seconds() for _ in range(10 * rounds))}
    found |= ratios(_parts(), rounds, "matmuls and attention", progress)
    found |= ratios(_whole_runs(), rounds, "small runs", progress)
    return found


# ---- matmuls and attention ----


def _parts() -> dict[str, Trial]:
    trials: dict[str, Trial] = {}
    for number, shape in enumerate(DENSE):
        trials |= _forward_and_backward(f"dense {number}", _dense(shape))
    for number, experts in enumerate(EXPERTS):
        trials |= _forward_and_backward(f"experts {number}", _experts(experts))
    for number, attention in enumerate(ATTENTION):
        trials |= _forward_and_backward(f"attention {number}", _attention(attention))
    return trials


def _forward_and_backward(name: str, forward: Callable[[], list[Tensor]]) -> dict[str, Trial]:
    """The backward trial keeps its own autograd graph and repeats it; weight gradients accumulate in place."""
    outputs = forward()
    gradients = [torch.randn_like(output) for output in outputs]
    return {
        f"{name} forward": forward,
        f"{name} backward": lambda: torch.autograd.backward(outputs, gradients, retain_graph=True),
    }


def _dense(shape: DenseShape) -> Callable[[], list[Tensor]]:
    policy = ParameterMatmul()
    up, down = _weights(2, shape.hidden, shape.dim), _weights(shape.dim, shape.hidden)
    x, hidden = _inputs(shape.tokens, shape.dim), _inputs(shape.tokens, shape.hidden)
    return lambda: [policy.linear(x.view_as(x), up), policy.linear(hidden.view_as(hidden), down)]


def _experts(shape: ExpertsShape) -> Callable[[], list[Tensor]]:
    policy, matmul = ParameterMatmul(), GROUPED_MATMULS[KernelsConfig().experts]
    host = [shape.rows // shape.experts] * shape.experts
    counts_e = torch.tensor(host)
    up = _weights(shape.experts, 2, shape.hidden, shape.dim)
    down = _weights(shape.experts, shape.dim, shape.hidden)
    x, hidden = _inputs(shape.rows, shape.dim), _inputs(shape.rows, shape.hidden)
    return lambda: [
        policy.grouped(matmul, x, up, counts_e, host),
        policy.grouped(matmul, hidden, down, counts_e, host),
    ]


def _attention(shape: AttentionShape) -> Callable[[], list[Tensor]]:
    q = _inputs(shape.tokens, shape.heads, shape.dim)
    k, v = (_inputs(shape.tokens, shape.kv_heads, shape.dim) for _ in range(2))
    lengths = (shape.length,) * (shape.tokens // shape.length)
    return lambda: [attend(q, k, v, lengths, shape.dim**-0.5)]


def _weights(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape) * 0.02)


def _inputs(*shape: int) -> Tensor:
    """Not a leaf: as inside a model, its gradient is computed and not stored."""
    return torch.randn(shape).requires_grad_().view(shape)


# ---- small runs ----


def _whole_runs() -> dict[str, Trial]:
    trials: dict[str, Trial] = {}
    for name, run in RUNS.items():
        local_model = single_rank_model(run)
        trials[f"run {name}"] = partial(run_schedule, local_model, [random_batch(run)])
        trials[f"update {name}"] = _update(local_model, make_optimizer(local_model))
    return trials


def single_rank_model(run: RunConfig, device: str = "cpu") -> LocalModel:
    """The whole model on one rank."""
    return build_local_model(run, groups_of(run, 1, 0, timedelta(seconds=60)), torch.device(device))


def random_batch(run: RunConfig) -> Batch:
    """One microbatch of random tokens."""
    lengths = (run.data.seq_len,) * run.data.micro_batch
    tokens, labels = torch.randint(run.model.vocab_size, (2, sum(lengths)))
    return whole_batch(
        tokens, labels, lengths, step_labels=sum(lengths), step_tokens=sum(lengths), step_sequences=len(lengths)
    )


def _update(local_model: LocalModel, optimizer: Optimizer) -> Trial:
    """The end of a step: gradient norm, clipping, optimizer."""

    def update() -> None:
        gradients = local_model.sharding.reduce_gradients()
        finish_gradients(gradients, local_model.param_shards, local_model.groups["pp"], local_model.bucket_bytes)
        primary = primary_shards(gradients, local_model.param_shards)
        norm = grad_norm_of(primary, local_model.groups["world"], local_model.device)
        clip_gradients(gradients.values(), norm, local_model.run.optim.clip_norm)
        optimizer.step()

    return update
