"""What copies in memory cost: step times of a small run without them, with one per step, and without comparisons.

    python -m benchmarks.memory_copies --json docs/measured/memory_copies.json

Runs in turns, so that other work on the machine disturbs all alike. "Waits" is the time from the end of a step to the
beginning of the next that the loop spends on copies and checkpoints. A comparison of replicas precedes every copy, as
it precedes every checkpoint, unless `train.corruption.every` is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from moefold.config.train import CorruptionConfig, SavingConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control, StepRecord
from moefold.train.trainer import Trainer

# Steps between copies, and between comparisons that are due anyway.
MODES = {
    "no copies": (0, 100),
    "a copy per step": (1, 100),
    "a copy per step, no comparisons": (1, 0),
    "a copy every 10 steps": (10, 100),
}
# The first steps of a start are longer.
WARM_UP = 3


class _Times(Callback):
    """Of all steps, in a file: ranks are processes of their own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_step(self, record: StepRecord, control: Control) -> None:
        if record.step > WARM_UP:
            with self.path.open("a") as file:
                file.write(json.dumps([record.seconds["total"], record.seconds["save"]]) + "\n")


def step_times(recipe: str, mode: str, steps: int, ranks: int) -> list[list[float]]:
    """Seconds of each step, and of those what it waited for copies."""
    memory_every, compare_every = MODES[mode]
    run = RECIPES[recipe]()
    with tempfile.TemporaryDirectory() as directory:
        settings = replace(
            run.train,
            steps=steps + WARM_UP,
            directory=directory,
            saving=SavingConfig(every=0, memory_every=memory_every),
            corruption=CorruptionConfig(every=compare_every),
        )
        path = Path(directory) / "times"
        fitted = Trainer(replace(run, train=settings), reporters=[_Times(path)], nproc=ranks).fit()
        assert fitted == "finished"
        return [json.loads(line) for line in path.read_text().splitlines()]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="debug_tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(words)
    found: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode, times in found.items():
            times += step_times(args.recipe, mode, args.steps, args.ranks)
    base = statistics.median(total for total, _ in found["no copies"])
    rows = [
        {
            "mode": mode,
            "step_s": round(statistics.median(total for total, _ in times), 4),
            "mean_waits_s": round(statistics.mean(waits for _, waits in times), 4),
            "ratio": round(statistics.median(total for total, _ in times) / base, 3),
            "ratio_of_means": round(
                statistics.mean(total for total, _ in times)
                / statistics.mean(total for total, _ in found["no copies"]),
                3,
            ),
        }
        for mode, times in found.items()
    ]
    figures = {"recipe": args.recipe, "ranks": args.ranks, "steps": len(found["no copies"])}
    figures |= {"load": round(os.getloadavg()[1], 1), "rows": rows}
    print(json.dumps(figures, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
