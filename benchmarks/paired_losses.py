"""Validation losses of one small model trained in several ways, from the same seeds: what a way of training costs.

Every run of a seed sees the same data from the same initial weights, so ways are compared in pairs. A run that is in
the file is not run again: a comparison can be stopped and started, and its pieces can be run one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from moefold.config.run import RunConfig
from moefold.data.samples import open_samples
from moefold.optim.lr_schedule import lr_at
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of, init_main_weights
from moefold.pipeline.step import evaluate, make_optimizer, run_step
from moefold.train.batches import step_batches

CPU = torch.device("cpu")
VALIDATION_SAMPLES = 256


@dataclass(frozen=True)
class Comparison:
    """``run_of``: from a name, a seed and a number of steps; other names are compared with ``base``."""

    program: str
    text: str
    base: str
    names: tuple[str, ...]
    run_of: Callable[[str, int, int], RunConfig]
    out: Path
    # Entered while a run of this name is trained.
    around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()


def validation_loss(local_model: LocalModel) -> float:
    run = local_model.run
    samples = open_samples(run.data, run.model.vocab_size, run.seed, "validation")
    batches = step_batches(
        samples, 0, replace(run, data=replace(run.data, global_batch=VALIDATION_SAMPLES)), local_model.groups, CPU
    )
    return float(evaluate(local_model, batches.batches))


def train(name: str, run: RunConfig) -> dict[str, object]:
    local_model = build_local_model(run, groups_of(run, 1, 0, timedelta(seconds=60)), CPU)
    optimizer = make_optimizer(local_model)
    init_main_weights(local_model, optimizer)
    samples = open_samples(run.data, run.model.vocab_size, run.seed)
    began, losses, steps = time.process_time(), list[float](), run.train.steps
    for step in range(1, steps + 1):
        optimizer.set_lr(lr_at(step, steps, run.optim))
        batches = step_batches(samples, (step - 1) * run.data.global_batch, run, local_model.groups, CPU).batches
        losses.append(float(run_step(local_model, optimizer, batches).sums.loss))
        if step % 50 == 0:
            mean = sum(losses[-50:]) / 50
            print(f"{name}, seed {run.seed}: step {step}, loss {mean:.4f}", file=sys.stderr, flush=True)
    return {
        "format": name,
        "seed": run.seed,
        "steps": steps,
        "validation_loss": validation_loss(local_model),
        "training_loss": sum(losses[-50:]) / len(losses[-50:]),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def differences(runs: Sequence[Mapping[str, object]], base: str) -> dict[str, list[float]]:
    """By name: relative to the base, the validation losses of the same seeds."""
    found: dict[str, list[float]] = {}
    by_run = {(str(each["format"]), each["seed"]): float(str(each["validation_loss"])) for each in runs}
    for (name, seed), loss in by_run.items():
        if name != base and (base, seed) in by_run:
            found.setdefault(name, []).append(loss / by_run[base, seed] - 1)
    return found


def compare(comparison: Comparison, words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=comparison.program, description=comparison.text)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=comparison.names, choices=comparison.names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=comparison.out, help="read, and added to")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    for seed in range(args.seeds):
        for name in args.formats:
            if any((each["format"], each["seed"], each["steps"]) == (name, seed, args.steps) for each in runs):
                continue
            with comparison.around(name):
                runs.append(train(name, comparison.run_of(name, seed, args.steps)))
            args.out.parent.mkdir(parents=True, exist_ok=True)
            waiting = args.out.with_suffix(".tmp")
            waiting.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
            os.replace(waiting, args.out)
    for name, relative in differences(runs, comparison.base).items():
        print(f"{name}: {', '.join(f'{value:+.3%}' for value in relative)}")
    return 0
