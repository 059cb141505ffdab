"""How long a restart takes: from the end of a killed rank to the end of the next step, on four ranks of one machine.

Runs with and without what the launcher prepares for its ranks (`train/fault_tolerance/warm_up.py`) take turns, so that
both meet the same load. Processor seconds of rank 0, from its fork to the end of its first step, depend less on what
else the machine does than the time on the wall.

    python -m benchmarks.restart_time --kills 5 --turns 3 --json restarts.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from moefold.config.parallel import ParallelConfig
from moefold.config.train import SavingConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control, StepRecord
from moefold.train.fault_tolerance import warm_up
from moefold.train.trainer import Trainer

WORLD, STEPS_PER_KILL = 4, 4
KINDS = ("prepared", "unprepared")


class Killer(Callback):
    """Ends its rank after chosen steps, as the kernel would, and notes when steps end."""

    def __init__(self, path: Path, kills: int) -> None:
        self.path, self.kills = path, kills

    def after_step(self, record: StepRecord, control: Control) -> None:
        killed = self.path.with_suffix(".kills")
        done = len(killed.read_text().splitlines()) if killed.exists() else 0
        with self.path.open("a") as file:
            file.write(json.dumps([time.monotonic(), record.step, time.process_time()]) + "\n")
        if done < self.kills and record.step >= STEPS_PER_KILL * done + 3:
            with killed.open("a") as file:
                file.write(f"{time.monotonic()!r}\n")
            os.kill(os.getpid(), signal.SIGKILL)


def measure(recipe: str, kills: int) -> list[tuple[float, float]]:
    """(seconds to the end of the next step, processor seconds of rank 0) of every kill."""
    with tempfile.TemporaryDirectory() as directory:
        run = RECIPES[recipe]()
        saving = SavingConfig(every=1, keep=2, background=False)
        settings = replace(
            run.train, steps=STEPS_PER_KILL * (kills + 1), directory=directory, saving=saving, validate_every=0
        )
        run = replace(run, parallel=ParallelConfig(ep=4), train=settings)
        path = Path(directory) / "steps"
        if Trainer(run, [Killer(path, kills)], reporters=[], nproc=WORLD).fit() != "finished":
            raise RuntimeError("the run did not finish")
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        killed = [float(line) for line in path.with_suffix(".kills").read_text().splitlines()]
    after = [min(step for step in steps if step[0] > at) for at in killed]
    return [(when - at, cpu) for at, (when, _, cpu) in zip(killed, after, strict=True)]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="debug_tiny")
    parser.add_argument("--kills", type=int, default=5, help="per run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    parser.add_argument("--json", type=Path, default=None, help="write figures to this file")
    parser.add_argument("--one", choices=KINDS, help="one run of this kind, in this process; prints what it measured")
    args = parser.parse_args(words)
    if args.one is not None:
        if args.one == "unprepared":
            warm_up.warm_up = lambda run, world: 0.0
        print(json.dumps(measure(args.recipe, args.kills)))
        return 0
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    loads = []
    for kind in KINDS * args.turns:
        # What one launcher has prepared, the next must not inherit.
        one = (sys.executable, "-m", "benchmarks.restart_time", "--one", kind, "--recipe", args.recipe)
        done = subprocess.run((*one, "--kills", str(args.kills)), check=True, stdout=subprocess.PIPE)
        found[kind] += json.loads(done.stdout.splitlines()[-1])
        loads.append(os.getloadavg()[0])
    figures = {
        "recipe": args.recipe,
        "world": WORLD,
        "load": round(statistics.median(loads), 1),
        **{
            kind: {
                "restarts": len(values),
                "next_step_s": _spread([seconds for seconds, _ in values]),
                "processor_s": _spread([cpu for _, cpu in values]),
            }
            for kind, values in found.items()
        },
    }
    print(json.dumps(figures, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "max": round(max(values), 2)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
