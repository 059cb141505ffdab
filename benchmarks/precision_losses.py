"""Validation loss of a small MoE after the same steps under each precision recipe, and under one that must not pass.

Emulated: operands are narrowed and multiplied in float32. A short run of a small model tells a recipe from a worse one
only over several seeds, and not before some thousand steps. So that the comparison is known to tell anything, a recipe
in which every cast of mxfp8 has four bits (MXFP4) is trained as well, and has to end further away than FP8 may. So that
it is known what it cannot tell, bf16 is trained once more with a learning rate that is a millionth higher.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.paired_losses import Comparison, compare
from moefold.config.attention import GQAConfig
from moefold.config.casts import Cast
from moefold.config.loading import override
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.precision_recipes import PRECISION_RECIPES, LinearCasts
from moefold.config.run import RunConfig
from moefold.recipes.catalog import recipe

BASE, MUTANT, CONTROL = "bf16", "MXFP4 instead of mxfp8", "bf16 again"
NAMES = (BASE, "mxfp8", "nvfp4", MUTANT, "fp8_blockwise", "fp8_tensor", "fp8_delayed", CONTROL)
# Bounds relative to bf16, of the mean over seeds.
BOUNDS = {"fp8_tensor": 0.005, "fp8_delayed": 0.005, "fp8_blockwise": 0.005, "mxfp8": 0.005, "nvfp4": 0.04}
MODEL = ModelConfig(
    dim=128,
    num_layers=4,
    attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=32),
    moe=MoEConfig(
        num_experts=16,
        top_k=2,
        expert_hidden_dim=128,
        router=RouterConfig(normalize=True),
        balance=BalanceConfig(microbatch=0.01, z=1e-3),
    ),
    # 1 / sqrt(dim). From 0.02 a model this small leaves its first plateau when noise lets it: after 1,000 steps MXFP4
    # was 2 % better than bf16, and mxfp8 1 % worse.
    init_std=0.088,
)
LEARNING_RATE = 2e-3
# By tokens per step: twice as many, and a learning rate that decays to zero, halve what rounding alone does to a loss,
# at twice the cost. And the same with four times as many experts.
SETTINGS: dict[str, dict[str, object]] = {
    "512": {"data.global_batch": 8, "data.micro_batch": 8, "optim.lr_schedule.floor": 0.1},
    "1024": {"data.global_batch": 16, "data.micro_batch": 16, "optim.lr_schedule.floor": 0.0},
}
SETTINGS["64_experts"] = {**SETTINGS["1024"], "model.moe.num_experts": 64}
RUN = {
    "precision.compute": "float32",
    "kernels.experts": "grouped",
    "kernels.casts": "native",
    "data.seq_len": 64,
    "optim.lr": LEARNING_RATE,
    "optim.lr_schedule.kind": "cosine",
    "optim.lr_schedule.warmup": 50,
}


def run_of(setting: str, name: str, seed: int, steps: int) -> RunConfig:
    named = {MUTANT: "mxfp8", CONTROL: BASE}.get(name, name)
    own: Mapping[str, object] = {"precision.recipe": named, "seed": seed, "train.steps": steps}
    changes: Mapping[str, object] = {**RUN, **SETTINGS[setting], **own}
    if name == CONTROL:
        changes = {**changes, "optim.lr": LEARNING_RATE * (1 + 1e-6)}
    return override(replace(recipe("debug_small"), model=MODEL), changes)


@contextmanager
def with_casts(name: str) -> Iterator[None]:
    """The mutant is no recipe of the project: mxfp8 has four bits while it is trained."""
    right = PRECISION_RECIPES["mxfp8"]
    if name == MUTANT:
        four_bits = Cast("e2m1", (1, 32), "e8m0_rceil")
        PRECISION_RECIPES["mxfp8"] = replace(right, casts=LinearCasts(*[four_bits] * 6))
    yield
    PRECISION_RECIPES["mxfp8"] = right


def comparison(setting: str) -> Comparison:
    return Comparison(
        "python -m benchmarks.precision_losses [512 | 1024 | 64_experts]",
        __doc__,
        BASE,
        NAMES,
        partial(run_of, setting),
        Path(f"runs/precision_losses_{setting}.json"),
        with_casts,
    )


if __name__ == "__main__":
    words = sys.argv[1:]
    named = words.pop(0) if words and words[0] in SETTINGS else "512"
    sys.exit(compare(comparison(named), words))
