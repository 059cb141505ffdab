"""Kill drawn runs at drawn points: any layout on two to eight ranks, killed again and again, is the run in peace.

Runs are those of the proof (`moefold.prove.random_cases`): every parallelism, context parallelism among them, with
every kind of routing, dispatcher, schedule, sharding and optimizer. Each is trained once in peace, which counts the
points that it passes, and once with kills (`tests/kill.py`). Losses, gradient norms, counts and sample ids of every
step and every repetition, and at the end every number on every rank, must be the same to the last bit.

    python -m tests.kill_draws --kills 1000 --seed 7 --piece 1/3 --json docs/measured/kills.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from tests.kill import (
    SAVE_EVERY,
    assert_nothing_committed_was_lost,
    assert_same_steps,
    plan_possible_kills,
    run_with_kills,
    steps_for,
)

from moefold.checks.run_all import problems_to_train
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig, TrainConfig
from moefold.optim.optimizer import TorchAdamW
from moefold.prove.cases import Case
from moefold.prove.random_cases import draw_cases
from moefold.train.fault_tolerance.warm_up import warm_up
from moefold.train.train_context import run_directory

KILLS_PER_RUN = 10
# In turn: eight ranks on two cores take as long as all others together.
WORLDS = (2, 4, 2, 4, 8)
_AXES = ("pp", "cp", "tp", "ep", "etp", "dp_replicate")


@dataclass
class Figures:
    """What was seen; ``restart_s`` is from a kill to the end of the first step after it."""

    seed: int
    runs: int = 0
    kills: int = 0
    worlds: Counter[int] = field(default_factory=Counter)
    axes: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        counts = {"seed": self.seed, "runs": self.runs, "kills": self.kills, "failures": len(self.failures)}
        kinds = {"worlds": self.worlds, "axes": self.axes, "points": self.points}
        times = {"median": statistics.median(self.restart_s), "max": max(self.restart_s)} if self.restart_s else {}
        return counts | {name: dict(sorted(kind.items())) for name, kind in kinds.items()} | {"restart_s": times}


def trainable(case: Case, folder: Path, background: bool) -> RunConfig | None:
    """A case of the proof as a run in ``folder``; None where it proves what cannot be trained as it is."""
    settings = TrainConfig(directory=str(folder), steps=SAVE_EVERY)
    settings = replace(settings, saving=SavingConfig(every=SAVE_EVERY, keep=2, background=background))
    data = replace(case.run.data, train="builtin", validation=None)
    model = replace(case.run.model, vocab_size=256)
    run = replace(case.run, name="run", data=data, model=model, train=settings)
    if problems_to_train(run, case.world):
        return None
    return run if case.world < 8 else _fewest_microbatches(run, case.world)


def _fewest_microbatches(run: RunConfig, world: int) -> RunConfig:
    """As few as its schedule needs: eight ranks on a machine of two cores take seconds for each."""
    smallest = run.data.global_batch
    for batch in range(run.data.micro_batch, smallest, run.data.micro_batch):
        fewer = replace(run, data=replace(run.data, global_batch=batch))
        if smallest % batch == 0 and not problems_to_train(fewer, world):
            return fewer
    return run


def drawn_cases(world: int, seed: int) -> Iterator[Case]:
    return (case for case in draw_cases(100_000, world, seed) if case.world == world)


def kill_one(case: Case, kills: int, folder: Path, figures: Figures) -> None:
    dice = Random(case.run.seed)
    run = trainable(case, folder / "count", background=dice.random() < 0.5)
    if run is None:
        return
    warm_up(run, case.world)
    run_with_kills(run, case.world, [])
    counted = run_directory(run)
    passed = [json.loads((counted / f"passed_{rank}.json").read_text()) for rank in range(case.world)]
    plan = plan_possible_kills(kills, passed, case.run.seed)
    steps = steps_for(plan)
    runs = [replace(run, train=replace(run.train, steps=steps, directory=str(folder / side))) for side in "ab"]
    peaceful, digests, _ = run_with_kills(runs[0], case.world, [])
    killed, digests_after, happened = run_with_kills(runs[1], case.world, plan)
    figures.runs += 1
    figures.kills += happened
    figures.worlds[case.world] += happened
    figures.points.update(kill.point for kill in plan[:happened])
    figures.axes.update(axis for axis in _AXES if getattr(run.parallel, axis) > 1)
    figures.axes.update([run.parallel.sharding] if run.parallel.sharding == "flat" else [])
    figures.restart_s += _restarts(run_directory(runs[1]), happened)
    assert digests_after == digests, f"ranks whose numbers differ: {_differing(digests, digests_after)}"
    assert_same_steps(peaceful, killed, steps)
    assert_nothing_committed_was_lost(killed)


def _differing(before: list[str], after: list[str]) -> list[int]:
    return [rank for rank, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def _restarts(directory: Path, happened: int) -> list[float]:
    """From each kill to the next step's line in the diary."""
    entries = (json.loads(line) for line in (directory / "diary.jsonl").read_text().splitlines())
    steps = [entry["at"] for entry in entries if entry["kind"] == "step"]
    kills = [float((directory / "kills" / str(number)).read_text()) for number in range(happened)]
    return [min(after) - kill for kill in kills if (after := [at for at in steps if at > kill])]


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks of drawn runs, and compare with the same runs in peace.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--max-world", type=int, default=8, choices=(2, 4, 8))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--piece", default="1/1", metavar="K/N", help="the K-th of N parts of the kills")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    args = parser.parse_args()
    piece, pieces = map(int, args.piece.split("/"))
    # Ranks are forked; what an optimizer built here has done to its class must not disarm a kill.
    TorchAdamW([torch.zeros(1, requires_grad=True)])
    wanted, figures, number = -(-args.kills // pieces), Figures(args.seed), 0
    worlds = [world for world in WORLDS if world <= args.max_world]
    cases = {world: drawn_cases(world, args.seed * pieces + piece) for world in set(worlds)}
    while figures.kills < wanted:
        case, number = next(cases[worlds[number % len(worlds)]]), number + 1
        with tempfile.TemporaryDirectory(prefix="moefold-kills-") as folder:
            try:
                kill_one(case, min(KILLS_PER_RUN, wanted - figures.kills), Path(folder), figures)
            except Exception:
                figures.failures.append(f"{case.title}\n{traceback.format_exc()}")
                print(figures.failures[-1], flush=True)
        print(f"{figures.kills} of {wanted} kills, {len(figures.failures)} failures: {case.title}", flush=True)
    found = figures.as_json()
    print(json.dumps(found, indent=1))
    if args.json is not None:
        before = json.loads(args.json.read_text())["pieces"] if args.json.exists() else []
        args.json.write_text(json.dumps({"pieces": [*before, found]}, indent=1) + "\n")
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
