"""Validation loss of a 10M-parameter MoE after the same steps, with optimizer states in each format."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.paired_losses import Comparison, compare
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.recipes.catalog import recipe

BASE = "float32"
FORMATS: dict[str, dict[str, object]] = {
    BASE: {},
    "bfloat16 moments, stochastic": {"precision.moments": "bfloat16", "precision.moments_rounding": "stochastic"},
    "remainder": {"parallel.sharding": "flat", "precision.master": "remainder"},
    "float8 moments, stochastic": {"precision.moments": "float8", "precision.moments_rounding": "stochastic"},
}
# Matmuls in bfloat16, so that weights kept in bfloat16 are what every format computes with.
RUN = {
    "precision.compute": "bfloat16",
    "data.seq_len": 32,
    "data.global_batch": 4,
    "data.micro_batch": 4,
    "optim.lr": 1e-3,
    "optim.lr_schedule.kind": "cosine",
    "optim.lr_schedule.warmup": 50,
    "optim.lr_schedule.floor": 0.1,
}


def run_of(name: str, seed: int, steps: int) -> RunConfig:
    changes: Mapping[str, object] = RUN | FORMATS[name] | {"seed": seed, "train.steps": steps}
    return override(recipe("debug_10m"), changes)


COMPARISON = Comparison(
    "python -m benchmarks.optimizer_formats",
    __doc__,
    BASE,
    tuple(FORMATS),
    run_of,
    Path("runs/optimizer_formats.json"),
)

if __name__ == "__main__":
    sys.exit(compare(COMPARISON, sys.argv[1:]))
