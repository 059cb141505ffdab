"""Validation loss of a 10M-parameter MoE after the same steps, with optimizer states in each format.

Every run of a seed sees the same data from the same initial weights, so formats are compared in pairs. A run that is in
the file is not run again: the script can be stopped and started.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.data.samples import open_samples
from moefold.optim.lr_schedule import lr_at
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of, init_main_weights
from moefold.pipeline.step import evaluate, make_optimizer, run_step
from moefold.recipes.catalog import recipe
from moefold.train.batches import step_batches

CPU = torch.device("cpu")
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
VALIDATION_SAMPLES = 256


def run_of(name: str, seed: int, steps: int) -> RunConfig:
    changes: Mapping[str, object] = RUN | FORMATS[name] | {"seed": seed, "train.steps": steps}
    return override(recipe("debug_10m"), changes)


def validation_loss(local_model: LocalModel) -> float:
    run = local_model.run
    samples = open_samples(run.data, run.model.vocab_size, run.seed, "validation")
    batches = step_batches(
        samples, 0, replace(run, data=replace(run.data, global_batch=VALIDATION_SAMPLES)), local_model.groups, CPU
    )
    return float(evaluate(local_model, batches.batches))


def train(name: str, seed: int, steps: int) -> dict[str, object]:
    run = run_of(name, seed, steps)
    local_model = build_local_model(run, groups_of(run, 1, 0, timedelta(seconds=60)), CPU)
    optimizer = make_optimizer(local_model)
    init_main_weights(local_model, optimizer)
    samples = open_samples(run.data, run.model.vocab_size, run.seed)
    began, losses = time.process_time(), []
    for step in range(1, steps + 1):
        optimizer.set_lr(lr_at(step, steps, run.optim))
        batches = step_batches(samples, (step - 1) * run.data.global_batch, run, local_model.groups, CPU).batches
        losses.append(float(run_step(local_model, optimizer, batches).sums.loss))
        if step % 50 == 0:
            print(f"{name}, seed {seed}: step {step}, loss {sum(losses[-50:]) / 50:.4f}", file=sys.stderr, flush=True)
    return {
        "format": name,
        "seed": seed,
        "steps": steps,
        "validation_loss": validation_loss(local_model),
        "training_loss": sum(losses[-50:]) / len(losses[-50:]),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def differences(runs: Sequence[Mapping[str, object]]) -> dict[str, list[float]]:
    """By format: relative to float32, the validation losses of the same seeds."""
    found: dict[str, list[float]] = {}
    by_run = {(str(each["format"]), each["seed"]): float(str(each["validation_loss"])) for each in runs}
    for (name, seed), loss in by_run.items():
        if name != BASE and (BASE, seed) in by_run:
            found.setdefault(name, []).append(loss / by_run[BASE, seed] - 1)
    return found


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_formats", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/optimizer_formats.json"), help="read, and added to")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    for seed in range(args.seeds):
        for name in args.formats:
            if any((each["format"], each["seed"], each["steps"]) == (name, seed, args.steps) for each in runs):
                continue
            runs.append(train(name, seed, args.steps))
            args.out.parent.mkdir(parents=True, exist_ok=True)
            waiting = args.out.with_suffix(".tmp")
            waiting.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
            os.replace(waiting, args.out)
    for name, relative in differences(runs).items():
        print(f"{name}: {', '.join(f'{value:+.3%}' for value in relative)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
