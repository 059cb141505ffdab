"""What the switches of ``train.host`` do to a step of two ranks: garbage collection, and cores.

    python -m benchmarks.host_switches [ROUNDS] [OUT.json]

Two gloo ranks train one small model. A round has a block of steps with each setting, one after the other, so that what
else the computer does meets all of them alike; a block's figures are the median of its steps and its slowest step. The
figures are medians over rounds of the ratio to the block of the same round without any switch. Live objects beside the
model, as a data pipeline or a tokenizer would keep them, are what a collection has to look through.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import moefold
from moefold.comm.spawn import spawn_ranks
from moefold.config.run import RunConfig
from moefold.config.train import HostConfig
from moefold.pipeline.step import run_step
from moefold.train.batches import step_batches
from moefold.train.host_switches import bind_rank, garbage_collection
from moefold.train.train_context import build_train_context

RANKS, STEPS, OBJECTS = 2, 40, 300_000
SETTINGS: dict[str, HostConfig] = {
    "none": HostConfig(),
    "gc: manual": HostConfig(gc="manual", gc_every=STEPS),
    "bind: cores": HostConfig(bind="cores"),
    "both": HostConfig(gc="manual", gc_every=STEPS, bind="cores"),
}


def model_run(folder: str) -> RunConfig:
    run: RunConfig = moefold.load_run("debug_tiny", {"parallel.ep": RANKS, "train.directory": folder})
    return run


def block(context: Any, rank: int, host: HostConfig, free: set[int]) -> list[float]:
    """Seconds of each step."""
    os.sched_setaffinity(0, free)
    bind_rank(host, rank, RANKS, torch.device("cpu"))
    found = []
    with garbage_collection(host) as after_step:
        for step in range(1, STEPS + 1):
            data = step_batches(context.samples, 0, context.run, context.groups, context.device)
            dist.barrier()
            start = perf_counter()
            run_step(context.local_model, context.optimizer, data.batches)
            dist.barrier()
            found.append(perf_counter() - start)
            after_step(step)
    return found


def rank_rounds(rank: int, rounds: int, folder: str) -> list[dict[str, list[float]]]:
    free = os.sched_getaffinity(0)
    context, _ = build_train_context(model_run(folder), rank, RANKS, torch.device("cpu"), 120.0)
    kept = [[number] for number in range(OBJECTS)]
    block(context, rank, SETTINGS["none"], free)
    found = [{name: block(context, rank, host, free) for name, host in SETTINGS.items()} for _ in range(rounds)]
    assert len(kept) == OBJECTS
    return found


def ratios(rounds: list[dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """Of each setting to none in the same round: quartiles of the median step and of the slowest one."""
    made: dict[str, dict[str, list[float]]] = {}
    for name in SETTINGS:
        typical = [median(each[name]) / median(each["none"]) for each in rounds]
        slowest = [max(each[name]) / max(each["none"]) for each in rounds]
        made[name] = {
            "median step": [round(number, 3) for number in quantiles(typical, n=4)],
            "slowest step": [round(number, 3) for number in quantiles(slowest, n=4)],
        }
    return made


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with TemporaryDirectory() as folder:
        first, *_ = spawn_ranks(lambda rank: rank_rounds(rank, rounds, folder), RANKS, seconds=1800)
    found = {
        "ranks": RANKS,
        "rounds": rounds,
        "steps": STEPS,
        "objects": OBJECTS,
        "milliseconds": {name: round(1e3 * median(median(each[name]) for each in first), 2) for name in SETTINGS},
        "slowest milliseconds": {name: round(1e3 * median(max(each[name]) for each in first), 2) for name in SETTINGS},
        "ratios": ratios(first),
    }
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
