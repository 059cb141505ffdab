"""What every contestant of `bench step` does: one optimizer step of the same model, from the same start, on the same
tokens.

M microbatches, b sequences of a microbatch, n tokens of a sequence.

Forward, backward, the gradient's norm, its bound, AdamW, and gradients dropped. Parameters, their gradients and their
moments are float32; activations and products are in the format that was asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.bench.runner import Options
from moefold.blueprint.init_std import init_std
from moefold.blueprint.parameters import parameters
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.nn.init import init_values
from moefold.recipes.catalog import recipe

RECIPE = "debug_50m"


def run_of(options: Options) -> RunConfig:
    """The recipe in the asked format, with the fastest that a CPU has; "set" in the options has dotted changes."""
    experts = options.get("experts", "fused")
    kernels = "native" if experts == "fused" else "torch"
    changes = {
        "precision.compute": options["dtype"],
        "kernels.experts": experts,
        "kernels.backend": options.get("kernels", kernels),
    }
    run: RunConfig = override(recipe(options.get("recipe", RECIPE)), changes | options.get("set", {}))
    return run


def step_tokens(run: RunConfig, seed: int) -> Tensor:
    """[M, b, n + 1]: inputs and, one place on, labels."""
    data = run.data
    shape = (data.global_batch // data.micro_batch, data.micro_batch, data.seq_len + 1)
    return torch.randint(run.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def first_parameters(run: RunConfig) -> dict[str, Tensor]:
    """Every parameter's first value, by moefold's name."""
    values = {}
    for spec in parameters(run.model):
        values[spec.name] = torch.empty(spec.shape)
        whole = tuple(slice(0, size) for size in spec.shape)
        init_values(
            spec.kind, run.seed, spec.name, spec.shape, whole, init_std(run.model, spec.name), values[spec.name]
        )
    return values
