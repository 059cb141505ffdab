"""Does a launcher grow with its restarts? One rank is killed over and over; memory and descriptors are noted each time.

A launcher that lives for weeks starts its ranks again hundreds of times. Whatever a restart leaves behind (a pipe, a
thread, a store, a traceback that holds tensors) adds up in it, and every rank inherits it by the fork. After each kill
the first step notes resident memory, descriptors and threads of the launcher and of rank 0. The first restarts still
fill caches, so growth is counted from the `SETTLED`-th one: medians of the ten restarts after it and of the last ten.

    python -m tests.restart_growth --restarts 200 --json docs/measured/restart_growth.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import moefold
from moefold.train.callback import Callback, Control, StepRecord

WORLD, SETTLED, WINDOW = 2, 10, 10
SETTINGS = {
    "parallel.dp_replicate": 2,
    "data.seq_len": 32,
    "data.global_batch": 4,
    "data.micro_batch": 2,
    "data.validation": None,
    "train.log_every": 10,
    # Every step, before the next begins: a start that dies in its second step has gone on by one.
    "train.saving.every": 1,
    "train.saving.keep": 2,
    "train.saving.background": False,
    # The same rank dies every time.
    "train.elastic.min_world": WORLD,
}


def used_by(pid: int) -> dict[str, int]:
    """Resident bytes, open descriptors and threads of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    counts = {name: len(os.listdir(f"/proc/{pid}/{name}")) for name in ("fd", "task")}
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "descriptors": counts["fd"], "threads": counts["task"]}


class Killed(Callback):
    """After the first step of a start, rank 0 notes what it and its launcher hold; then rank 1 is killed."""

    def __init__(self, path: Path, restarts: int) -> None:
        self.path, self.restarts, self.started = path, restarts, 0

    def before_step(self, step: int, control: Control) -> None:
        self.started = self.started or step
        if control.rank == 1 and self.started < step <= self.restarts + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, record: StepRecord, control: Control) -> None:
        if record.step == self.started:
            with self.path.open("a") as file:
                file.write(json.dumps({"launcher": used_by(os.getppid()), "rank": used_by(os.getpid())}) + "\n")


def grown(notes: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per process and quantity: its median after the first restarts, and how much of that the last ones have more."""
    found: dict[str, dict[str, float]] = {}
    for process in ("launcher", "rank"):
        for name in ("rss", "descriptors", "threads"):
            values = [note[process][name] for note in notes]
            early, late = (statistics.median(part) for part in (values[SETTLED : SETTLED + WINDOW], values[-WINDOW:]))
            found[f"{process} {name}"] = {"early": early, "late": late, "growth": round(late / early - 1, 5)}
    return found


def measure(restarts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="moefold-growth-") as folder:
        path = Path(folder) / "notes.jsonl"
        run = moefold.load_run("debug_tiny", SETTINGS | {"train.directory": folder, "train.steps": restarts + 2})
        trainer = moefold.Trainer(run, [Killed(path, restarts)], reporters=[], nproc=WORLD)
        state = trainer.fit()
        notes = [json.loads(line) for line in path.read_text().splitlines()]
    return {"restarts": len(notes) - 1, "state": state, "grown": grown(notes)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and descriptors of a launcher over many restarts.")
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    args = parser.parse_args()
    found = measure(args.restarts)
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    bounded = all(of["growth"] < 0.01 for of in found["grown"].values())
    return int(found["state"] != "finished" or found["restarts"] != args.restarts or not bounded)


if __name__ == "__main__":
    sys.exit(main())
