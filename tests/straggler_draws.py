"""Make one rank of real runs slow, and measure when it is named; and count what is named in runs where none is slow.

A slow rank is a busy loop in one rank: before every step it spins for a share of the processor time that its steps take
without it, so that its own work is 2 or 1.5 times that of its peers. It begins after one clean window and ends again,
so that each draw also shows the windows before and after.

`python -m tests.straggler_draws --count 10 --json docs/measured/stragglers.json` writes what was measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig, StragglersConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train

WORLD = 4
LAYOUTS = {
    "ep4": ParallelConfig(ep=4),
    "tp2 ep2": ParallelConfig(tp=2, ep=2),
    "pp2 ep2": ParallelConfig(pp=2, ep=2),
    "replicas": ParallelConfig(dp_replicate=4, edp_replicate=4),
    "flat": ParallelConfig(ep=2, sharding="flat"),
}
FACTORS = (2.0, 1.5)


@dataclass(frozen=True)
class Draw:
    layout: str
    rank: int
    factor: float


class SlowRank(Callback):
    """A busy loop before each step from ``first`` to ``last``, on one rank."""

    def __init__(self, rank: int, factor: float, first: int, last: int) -> None:
        self.rank, self.factor, self.first, self.last = rank, factor, first, last
        self._began, self._usual, self._step = 0.0, list[float](), 0

    def before_step(self, step: int, control: Control) -> None:
        self._step = step
        if control.rank == self.rank and self.first <= step <= self.last:
            ends = time.thread_time() + (self.factor - 1) * self.usual
            while time.thread_time() < ends:
                pass
        self._began = time.thread_time()

    @property
    def usual(self) -> float:
        """Mean processor time of the steps so far; the first one takes longer."""
        measured = self._usual[1:] or self._usual
        return sum(measured) / len(measured)

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        self._usual.append(time.thread_time() - self._began)


def small_run(directory: Path, layout: str, windows: int, config: StragglersConfig) -> RunConfig:
    base = RECIPES["debug_tiny"]()
    # The first step of a start is in no window.
    settings = replace(base.train, steps=1 + windows * config.window, directory=str(directory), stragglers=config)
    settings = replace(settings, saving=SavingConfig(every=0), corruption=replace(settings.corruption, every=0))
    data = replace(base.data, seq_len=16, global_batch=4, micro_batch=1, validation=None)
    return replace(base, name="draw", parallel=LAYOUTS[layout], data=data, train=settings)


def run_with(run: RunConfig, callbacks: list[Callback]) -> list[dict[str, Any]]:
    """The lines about slow ranks in metrics.jsonl."""

    def work(rank: int) -> int:
        context, state = build_train_context(run, rank, WORLD, torch.device("cpu"), 120.0)
        return int(train(context, state, [*callbacks, JsonLines()]))

    spawn_ranks(work, WORLD, seconds=3600)
    lines = map(json.loads, (run_directory(run) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "straggler"]


def measure(draw: Draw, config: StragglersConfig) -> dict[str, Any]:
    """One clean window, slow ones, and clean ones to the end; when it was named, and who else was."""
    slow, clean = config.windows, config.windows + 1
    first = 2 + config.window
    last = first + slow * config.window - 1
    with tempfile.TemporaryDirectory() as directory:
        run = small_run(Path(directory), draw.layout, 1 + slow + clean, config)
        lines = run_with(run, [SlowRank(draw.rank, draw.factor, first, last)])
    own = [line for line in lines if line["rank"] == draw.rank]
    named = [line for line in own if line["slow"]]
    return {
        **{"layout": draw.layout, "rank": draw.rank, "factor": draw.factor},
        "windows_until_named": None if not named else (named[0]["step"] - first + 1) / config.window,
        "ended": any(not line["slow"] for line in own),
        "measured_factor": None if not named else named[0]["seconds"]["own"] / named[0]["seconds"]["peers_own"],
        "others_named": len(lines) - len(own),
    }


def false_alarms(layout: str, windows: int, config: StragglersConfig) -> int:
    with tempfile.TemporaryDirectory() as directory:
        return len(run_with(small_run(Path(directory), layout, windows, config), []))


def draws(count: int, seed: int) -> list[Draw]:
    """Layouts in turn, ranks by chance; ``count`` of each factor."""
    dice, names = random.Random(seed), list(LAYOUTS)
    return [Draw(names[i % len(names)], dice.randrange(WORLD), factor) for factor in FACTORS for i in range(count)]


def summary(each: list[dict[str, Any]], clean: Mapping[str, int], windows: int, limit: int) -> dict[str, Any]:
    rows = []
    for factor in FACTORS:
        mine = [one for one in each if one["factor"] == factor]
        rows.append(
            {
                "factor": factor,
                "draws": len(mine),
                "named_in_bound": sum((one["windows_until_named"] or limit + 1) <= limit for one in mine),
                "ended": sum(one["ended"] for one in mine),
                "others_named": sum(one["others_named"] for one in mine),
            }
        )
    return {"rows": rows, "clean_windows": windows * len(clean), "false_alarms": sum(clean.values()), "clean": clean}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="of each factor")
    parser.add_argument(
        "--clean", type=int, default=30, help="windows in which no rank is slow, of all layouts together"
    )
    parser.add_argument("--window", type=int, default=20, help="`train.stragglers.window`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write figures as JSON")
    args = parser.parse_args(words)
    config = StragglersConfig(window=args.window)
    each = []
    for draw in draws(args.count, args.seed):
        each.append(measure(draw, config))
        print(json.dumps(each[-1]), flush=True)
    clean = {}
    windows = -(-args.clean // len(LAYOUTS))
    for layout in LAYOUTS if windows else ():
        clean[layout] = false_alarms(layout, windows, config)
        print(json.dumps({"layout": layout, "clean_windows": windows, "false_alarms": clean[layout]}), flush=True)
    figures = summary(each, clean, windows, config.windows)
    print(json.dumps(figures, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(figures | {"seed": args.seed, "each": each}, indent=1) + "\n")
    two = figures["rows"][0]
    bad = figures["false_alarms"] + two["others_named"] + two["draws"] - two["named_in_bound"]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
