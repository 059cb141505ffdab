"""Lose ranks of a real run for good, and measure how it goes on.

Ranks die in a step, and every later start of their places dies at once: 1, 2 or 4 of 8. The run must go on with the
ranks that are left, in another layout, and its losses must be those of the same run in peace.

`python -m tests.loss_of_ranks --json docs/measured/loss_of_ranks.json` does it for six layouts in float64 and float32.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.fault_tolerance.supervise import PLACE_VARIABLE
from moefold.train.trainer import Trainer

WORLD, STEPS, SAVE_EVERY, LOST_AT = 8, 6, 2, 4
LAYOUTS = {
    "dp8": ParallelConfig(),
    "ep8": ParallelConfig(ep=8),
    "tp2 ep4": ParallelConfig(tp=2, ep=4),
    "pp2 ep4": ParallelConfig(pp=2, ep=4),
    "flat ep4": ParallelConfig(ep=4, sharding="flat"),
    "cp2 ep4": ParallelConfig(cp=2, ep=4),
}
LOST = {1: (3,), 2: (3, 6), 4: (1, 2, 4, 7)}
# Of a loss: the number that the goal names, and rounding of sums in another order.
BOUNDS = {"float64": 1e-9, "float32": 5e-6}


class _Dies(Callback):
    """Ranks at lost places die together before a step; the first notes when."""

    def __init__(self, places: Sequence[int], mark: Path) -> None:
        self.places, self.mark = places, mark

    def before_step(self, step: int, control: Control) -> None:
        place = int(os.environ[PLACE_VARIABLE])
        if step != LOST_AT or place not in self.places or control.world != WORLD:
            return
        if place == self.places[0]:
            self.mark.write_text(repr(time.time()))
        while not self.mark.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


class _LosesPlaces(Trainer):
    """Once they are lost, these places die at every start."""

    places: tuple[int, ...] = ()
    mark = Path()

    def _fit_rank(self, *args: Any, **words: Any) -> int:
        if self.mark.exists() and int(os.environ[PLACE_VARIABLE]) in self.places:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._fit_rank(*args, **words)


def run_of(directory: Path, parallel: ParallelConfig, dtype: str) -> RunConfig:
    run = RECIPES["debug_tiny"]()
    return replace(
        run,
        parallel=parallel,
        precision=replace(run.precision, params=dtype, compute=dtype),
        train=replace(
            run.train, steps=STEPS, directory=str(directory), saving=SavingConfig(every=SAVE_EVERY, background=False)
        ),
    )


def lines_of(run: RunConfig, kind: str) -> list[dict[str, Any]]:
    path = Path(run.train.directory) / run.name / "metrics.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def train_in_peace(run: RunConfig, world: int = WORLD) -> list[float]:
    assert Trainer(run, reporters=[JsonLines()], nproc=world).fit() == "finished"
    return [line["loss"] for line in lines_of(run, "step")]


def train_with_losses(run: RunConfig, places: tuple[int, ...], spares: int = 0) -> dict[str, Any]:
    """The run's losses, the layout it went on with, and the seconds from the loss of the ranks to the end of the first
    step after it."""
    mark = Path(run.train.directory) / "lost"
    mark.parent.mkdir(parents=True, exist_ok=True)
    trainer = _LosesPlaces(run, [_Dies(places, mark)], reporters=[JsonLines()], nproc=WORLD, spares=spares)
    trainer.places, trainer.mark = places, mark
    assert trainer.fit() == "finished"
    steps, start = lines_of(run, "step"), lines_of(run, "start")[-1]
    first = next(step for step in steps if step["step"] > start["step"])
    return {
        "losses": [step["loss"] for step in steps],
        "world": start["world"],
        "layout": trainer.layout.describe().partition(",")[0],
        "from_step": start["step"],
        "seconds": first["time"] - float(mark.read_text()),
        "step_seconds": first["seconds"]["step"],
    }


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected) == STEPS
    return max(abs(a - b) for a, b in zip(found, expected))


def measure(layout: str, dtype: str, counts: Sequence[int], directory: Path) -> list[dict[str, Any]]:
    expected = train_in_peace(run_of(directory / "peace", LAYOUTS[layout], dtype))
    rows = []
    for count in counts:
        found = train_with_losses(run_of(directory / str(count), LAYOUTS[layout], dtype), LOST[count])
        rows.append(
            {
                "layout": layout,
                "dtype": dtype,
                "lost": count,
                "world": found["world"],
                "new_layout": found["layout"],
                "difference": largest_difference(found["losses"], expected),
                "seconds": round(found["seconds"], 1),
                "first_step_seconds": round(found["step_seconds"], 1),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--dtypes", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layout in args.layouts:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as directory:
                rows += measure(layout, dtype, list(LOST), Path(directory))
            if args.json:
                args.json.write_text(json.dumps({"load": os.getloadavg()[1], "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row["difference"] > BOUNDS[row["dtype"]] or row["world"] != WORLD // 2]
    print(f"{len(rows)} losses of ranks, {len(wrong)} whose losses differ", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
