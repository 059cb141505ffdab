"""`moefold bench step`: one training step of a recipe, beside a matmul that runs just before it.

M microbatches, b sequences of a microbatch, n tokens of a sequence.

A step is forward, backward, gradient norm, clipping, AdamW and dropping the gradients, by the path that `moefold train`
takes. Parameters, gradients and moments are float32; activations and matmuls have the format that was asked for. The
matmul says how many FLOP/s this machine reaches at best, so the report can say what part of it the step's model FLOPs
(`blueprint/flops.py`) reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from moefold.bench.clock import Progress, Timing, alternate
from moefold.bench.layer_bench import multiplied_dtype
from moefold.bench.single_rank import single_rank_model
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch, whole_batch
from moefold.pipeline.pipeline_state import StepSums
from moefold.pipeline.step import StepResult, make_optimizer, run_step
from moefold.recipes.catalog import recipe

RECIPE = "debug_50m"
STEP, MATMUL = "moefold", "matmul"
# Rows, columns and inner size of the matmul: large enough for its best FLOP/s on a CPU core.
MATMUL_SIZE = 2048


def run_for_bench(
    dtype: str,
    changes: Mapping[str, str] | None = None,
    name: str = RECIPE,
    experts: str = "fused",
    device: str = "cpu",
) -> RunConfig:
    """The recipe in this format; ``changes`` are dotted keys and their values.

    On a CPU with its fastest kernels; on a GPU with torch's, because Triton's have not been run on one: change
    kernels.backend to time them.
    """
    fixed = {
        "precision.compute": dtype,
        "kernels.experts": experts if device == "cpu" else "auto",
        "kernels.backend": "native" if device == "cpu" and experts == "fused" else "torch",
    }
    run: RunConfig = override(recipe(name), fixed | dict(changes or {}))
    return run


def step_tokens(run: RunConfig, seed: int) -> Tensor:
    """[M, b, n + 1]: inputs, and labels one position later."""
    data = run.data
    shape = (data.global_batch // data.micro_batch, data.micro_batch, data.seq_len + 1)
    return torch.randint(run.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


class TrainStep:
    """A model on one rank with its optimizer, and one step of both."""

    def __init__(self, run: RunConfig, device: str = "cpu") -> None:
        self.run_config, self.device = run, device
        self.local_model = single_rank_model(run, device)
        self.optimizer = make_optimizer(self.local_model)
        self.last: StepResult | None = None

    def prepare(self, seed: int) -> list[Batch]:
        tokens = step_tokens(self.run_config, seed).to(self.device)
        total = tokens[..., 1:].numel()
        return [
            whole_batch(
                microbatch[:, :-1].flatten(),
                microbatch[:, 1:].flatten(),
                (self.run_config.data.seq_len,) * microbatch.shape[0],
                step_labels=total,
                step_tokens=total,
                step_sequences=tokens.shape[0] * tokens.shape[1],
            )
            for microbatch in tokens
        ]

    def run(self, batches: list[Batch]) -> None:
        self.last = run_step(self.local_model, self.optimizer, batches, skip_reason=_read_sums)


def _read_sums(sums: StepSums, norm: Tensor) -> None:
    """Reads the numbers that the trainer reads at every step."""
    float(sums.loss), float(norm), [float(each) for each in sums.balance]


def bench_step(
    run: RunConfig,
    rounds: int,
    warm: int,
    progress: Progress | None = None,
    device: str = "cpu",
    budget: float = inf,
) -> dict[str, Timing]:
    """Every round has a new batch, so that the routing changes as in training."""
    step = TrainStep(run, device)
    size, dtype = (MATMUL_SIZE, MATMUL_SIZE), multiplied_dtype(run.precision.compute, device)
    a, b, out = (torch.randn(size).to(device, dtype) for _ in range(3))
    trials = {
        STEP: (step.prepare, step.run),
        MATMUL: (lambda seed: None, lambda nothing: torch.mm(a, b, out=out)),
    }
    return alternate(trials, rounds, warm, "rounds", progress, device, budget)
