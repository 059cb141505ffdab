"""Real training steps of a small MoE model under many layouts, timed against a reference matmul."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import mean, median
from typing import Any

import torch

from moefold.bench.clock import Reference, barrier
from moefold.comm.process_groups import Groups
from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GQAConfig
from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch, context_shard, whole_batch
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.pipeline.step import make_optimizer, run_step

MODEL = ModelConfig(
    vocab_size=512,
    dim=256,
    num_layers=4,
    num_dense_layers=1,
    dense_hidden_dim=768,
    attention=GQAConfig(num_heads=8, num_kv_heads=4, head_dim=32),
    moe=MoEConfig(
        num_experts=16,
        top_k=2,
        expert_hidden_dim=384,
        shared_hidden_dim=384,
        router=RouterConfig(normalize=True),
        balance=BalanceConfig(microbatch=0.01),
    ),
)


@dataclass(frozen=True)
class Timed:
    """A layout of the run: 16 sequences of 256 tokens per step."""

    world: int
    micro_batch: int = 2
    parallel: dict[str, Any] = field(default_factory=dict)
    recompute: tuple[Any, ...] = ()

    @property
    def run(self) -> RunConfig:
        return RunConfig(
            name="timed",
            model=MODEL,
            data=DataConfig(seq_len=256, global_batch=16, micro_batch=self.micro_batch),
            parallel=ParallelConfig(**self.parallel),
            memory=MemoryConfig(recompute=self.recompute),
        )

    @property
    def name(self) -> str:
        cut = ", ".join(f"{name} {value}" for name, value in self.parallel.items()) or "data parallel"
        again = ", recompute" if self.recompute else ""
        return f"{self.world} rank{'s' * (self.world > 1)}, {cut}, {self.micro_batch} sequences at a time{again}"


LAYOUTS = (
    Timed(1),
    Timed(1, micro_batch=8),
    Timed(1, recompute=("attention", "feed_forward", "experts")),
    Timed(2),
    Timed(2, micro_batch=4, parallel={"ep": 2}),
    Timed(2, parallel={"tp": 2}),
    Timed(2, parallel={"pp": 2}),
    Timed(2, parallel={"cp": 2}),
    Timed(4),
    Timed(4, parallel={"ep": 4}),
    Timed(4, parallel={"tp": 2, "ep": 2}),
    Timed(4, parallel={"pp": 2, "vpp": 2, "schedule": "interleaved", "ep": 2}),
)


@dataclass(frozen=True)
class Taken:
    """Medians over steps: seconds, steps in references, and the busiest expert-parallel rank's rows over the mean."""

    seconds: float
    references: float
    imbalance: float


def time_steps(layout: Timed, steps: int = 7, warm: int = 2) -> Taken:
    """Each step stands between two references, which all ranks compute at once."""
    answers = spawn_ranks(lambda rank: _live(layout, rank, warm + steps), layout.world, seconds=600)
    each = [[answer[number] for answer in answers] for number in range(warm, warm + steps)]
    return Taken(
        seconds=median(mean(rank["step"] for rank in ranks) for ranks in each),
        references=median(
            mean(rank["step"] for rank in ranks) / mean(rank["reference"] for rank in ranks) for ranks in each
        ),
        imbalance=mean(ranks[0]["imbalance"] for ranks in each),
    )


def _live(layout: Timed, rank: int, steps: int) -> list[dict[str, float]]:
    run = layout.run
    groups = groups_of(run, layout.world, rank, timedelta(seconds=120))
    local_model = build_local_model(run, groups, torch.device("cpu"))
    optimizer, reference = make_optimizer(local_model), Reference()
    found = []
    for number in range(steps):
        batches = random_batches(run, groups, number)
        before = reference.seconds()
        began = time.perf_counter()
        sums = run_step(local_model, optimizer, batches).sums
        barrier()
        taken = time.perf_counter() - began
        after = reference.seconds()
        rows_MP = sums.counts_ME.double().view(len(sums.counts_ME), run.parallel.ep, -1).sum(-1)
        imbalance = float((rows_MP.max(1).values / rows_MP.mean(1)).mean())
        found.append({"step": taken, "reference": (before + after) / 2, "imbalance": imbalance})
    return found


def random_batches(run: RunConfig, groups: Groups, step: int) -> list[Batch]:
    """This rank's microbatches. Random tokens choose experts about evenly."""
    data, dp, cp = run.data, groups["dp"], groups["cp"]
    total = data.global_batch * data.seq_len
    made = []
    for number in range(data.global_batch // (data.micro_batch * dp.size)):
        generator = torch.Generator().manual_seed((step * 1000 + number) * dp.size + dp.index)
        shape = (2, data.micro_batch * data.seq_len)
        tokens, labels = torch.randint(run.model.vocab_size, shape, generator=generator)
        whole = whole_batch(
            tokens,
            labels,
            (data.seq_len,) * data.micro_batch,
            context_size=cp.size,
            tensor_size=run.parallel.tp,
            step_labels=total,
            step_tokens=total,
            step_sequences=data.global_batch,
        )
        made.append(context_shard(whole, cp.index))
    return made
