"""How many steps Muon needs for the validation loss that AdamW has after a thousand: a 10M-parameter MoE on one core.

Both optimizers get three learning rates, the best of them in the middle, constant after a warmup, so that a step's loss
does not depend on how long the run is. The target is the lowest loss of the AdamW runs at their last step; a Muon run
ends where it reaches it.
Everything else is the same: initial weights, batches, weight decay, clipping.

Results are written after every validation, and runs have checkpoints: the command can be interrupted and continues.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import moefold
from moefold.blueprint.param_counts import count_parameters
from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.optim import LRScheduleConfig, OptimConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig, TrainConfig
from moefold.recipes.catalog import recipe
from moefold.train.callback import Callback, Control, Evaluation

STEPS, VALIDATE_EVERY = 1000, 25
# Muon's middle one first: the others need not go further than it did.
LRS = {"adamw": (0.75e-3, 0.375e-3, 1.5e-3), "muon": (1.5e-3, 3e-3, 0.75e-3)}


def run_of(algorithm: str, lr: float, directory: str, steps: int) -> RunConfig:
    """Small experts, so that Newton-Schulz on one core does not take longer than the step."""
    base = recipe("debug_tiny")
    return replace(
        base,
        name=f"{algorithm}_{lr:g}",
        model=ModelConfig(
            dim=128,
            num_layers=4,
            attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=32),
            moe=MoEConfig(
                num_experts=96,
                top_k=2,
                expert_hidden_dim=64,
                router=RouterConfig(normalize=True),
                balance=BalanceConfig(microbatch=0.01),
            ),
        ),
        data=replace(base.data, seq_len=64, global_batch=8, micro_batch=8),
        optim=OptimConfig(algorithm=algorithm, lr=lr, lr_schedule=LRScheduleConfig(warmup=50)),  # type: ignore[arg-type]
        train=TrainConfig(
            steps=steps,
            directory=directory,
            validate_every=VALIDATE_EVERY,
            validate_batches=16,
            saving=SavingConfig(every=200, keep=1),
        ),
    )


class Curve(Callback):
    """Validation losses by step; stops at ``target``."""

    def __init__(self, entry: dict[str, Any], write: Callable[[], None], target: float | None) -> None:
        self.entry, self.write, self.target = entry, write, target
        self.losses: dict[str, float] = entry["losses"]
        self.before, self.began = entry.get("seconds", 0.0), time.process_time()

    def on_evaluate(self, evaluation: Evaluation, control: Control) -> None:
        self.losses[str(evaluation.step)] = evaluation.loss
        self.entry["seconds"] = self.before + time.process_time() - self.began
        self.write()
        print(self.entry["name"], evaluation.step, f"{evaluation.loss:.4f}", flush=True)
        if self.target is not None and evaluation.loss <= self.target:
            control.request_stop("reached the target")


def main(words: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.muon_vs_adamw", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="muon_vs_adamw.json", type=Path)
    parser.add_argument("--steps", default=STEPS, type=int, help="of AdamW; Muon may take as many")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    found = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}

    def write() -> None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")

    for algorithm in ("adamw", "muon"):
        if algorithm == "muon":
            ends = {name: run["losses"][str(args.steps)] for name, run in found["runs"].items() if "adamw" in name}
            found["target"] = min(ends.values())
        for lr in LRS[algorithm]:
            name = f"{algorithm} {lr:g}"
            entry = found["runs"].setdefault(name, {"name": name, "losses": {}})
            best = min(map(int, steps_to(found, found.get("target")).values()), default=args.steps)
            run = run_of(algorithm, lr, str(args.out.with_suffix(".runs")), best if algorithm == "muon" else args.steps)
            found["parameters"] = count_parameters(run.model).total
            if is_done(found, name, run.train.steps):
                continue
            moefold.Trainer(run, [Curve(entry, write, found.get("target"))], reporters=[]).fit()
            if not is_done(found, name, run.train.steps):
                print("interrupted; the same command continues", file=sys.stderr)
                return 1
    found["steps_to_target"] = steps_to(found, found["target"])
    write()
    print(json.dumps({"target": found["target"], "steps": found["steps_to_target"]}))
    return 0


def is_done(found: dict[str, Any], name: str, steps: int) -> bool:
    """At its last step, or at the target, which falls when another rate of AdamW is better."""
    return str(steps) in found["runs"][name]["losses"] or name in steps_to(found, found.get("target"))


def steps_to(found: dict[str, Any], target: float | None) -> dict[str, int]:
    """By Muon run, the first validated step at the target or below."""
    reached = {}
    for name, run in found["runs"].items():
        steps = [int(step) for step, loss in run["losses"].items() if target is not None and loss <= target]
        if name.startswith("muon") and steps:
            reached[name] = min(steps)
    return reached


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
