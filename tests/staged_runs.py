"""A small model with one of everything, cut into stages, and microbatches of any shapes for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from moefold.comm.spawn import spawn_ranks
from moefold.config.memory import MemoryConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import ExpertBackend, KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.nn.batch import IGNORED, Batch, whole_batch
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.prove.proof_inputs import proof_init

# A dense layer, an MoE layer with a shared expert, a latent dim and a balance loss, and an MTP module.
MODEL = ModelConfig(
    vocab_size=64,
    dim=32,
    num_layers=2,
    num_dense_layers=1,
    dense_hidden_dim=48,
    moe=MoEConfig(
        num_experts=4,
        top_k=2,
        expert_hidden_dim=16,
        shared_hidden_dim=24,
        shared_gate=True,
        latent_dim=20,
        router=RouterConfig(normalize=True, expert_bias=True),
        balance=BalanceConfig(sequence=1e-2, microbatch=1e-2),
    ),
    num_mtp=1,
    init_std=0.2,
)
EXACT = PrecisionConfig("float64", "float64")

# The documents of a microbatch.
Lengths = tuple[int, ...]


def staged_run(
    model: ModelConfig = MODEL,
    precision: PrecisionConfig = EXACT,
    experts: ExpertBackend = "sequential",
    recompute: tuple[Any, ...] = (),
    **parallel: Any,
) -> RunConfig:
    return RunConfig(
        name="staged",
        model=model,
        precision=precision,
        # As in the references of tests, on every CPU.
        kernels=KernelsConfig(experts=experts, cpu_matmul="compute"),
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(recompute=recompute),
    )


def share_on(run: RunConfig, world: int = 1, rank: int = 0) -> LocalModel:
    groups = groups_of(run, world, rank, timedelta(seconds=120))
    return build_local_model(run, groups, torch.device("cpu"), proof_init)


def on_shares(run: RunConfig, world: int, work: Callable[[LocalModel], Any]) -> list[Any]:
    """Run ``work`` on every rank's share of the run."""
    return spawn_ranks(lambda rank: work(share_on(run, world, rank)), world, seconds=300)


def microbatches(run: RunConfig, shapes: Sequence[Lengths], *, seed: int = 0) -> list[Batch]:
    """Random documents; the last token of each has no label."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(map(sum, shapes))
    made = []
    for lengths in shapes:
        tokens = [torch.randint(run.model.vocab_size, (length + 1,), generator=generator) for length in lengths]
        labels = [torch.cat((document[1:-1], torch.tensor([IGNORED]))) for document in tokens]
        made.append(
            whole_batch(
                torch.cat([document[:-1] for document in tokens]),
                torch.cat(labels),
                lengths,
                tensor_size=run.parallel.tp,
                step_labels=num_tokens - sum(map(len, shapes)),
                step_tokens=num_tokens,
                step_sequences=sum(map(len, shapes)),
                num_ahead=run.model.num_mtp,
                step_labels_ahead=tuple(
                    sum(max(length - 1 - by, 0) for lengths in shapes for length in lengths)
                    for by in range(1, 1 + run.model.num_mtp)
                ),
            )
        )
    return made
