"""A data-parallel replica is lost within a step; the living ones form a new world in process, and redo the step.

A study: no run of `moefold train` does this. `python -m tests.replica_loss --json FILE` trains 2 replicas of 2 ranks
(HSDP) in float64, kills one rank of the second replica after the backward pass of a step, and compares the losses with
those of a run in peace. The collectives of the living replica fail; it meets over a new store, builds the layout
without the lost replica, and takes its own weights and optimizer states over from memory: they are those before the
step, since no update has run. The global batch stays the same, so the living replica computes all of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

import moefold.comm.spawn  # noqa: F401  imports what ranks need, before they are forked
from moefold.checkpoint.state_dict import copy_into_live, local_buffers
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.config.train import CorruptionConfig, SavingConfig
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control, StepRecord
from moefold.train.state import TrainState
from moefold.train.train_context import TrainContext, build_train_context
from moefold.train.train_loop import train

REPLICAS, EACH, STEPS, LOST_AT, VICTIM = 2, 2, 8, 5, 3
PATIENCE = 15.0


class Recorder(Callback):
    """Losses with the time of each step's end, appended to a file; the victim ends itself in the chosen step."""

    def __init__(self, path: Path, kills: bool) -> None:
        self.path, self.kills, self.step = path, kills, 0

    def before_step(self, step: int, control: Control) -> None:
        self.step = step

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        if self.kills and self.step == LOST_AT and control.world == REPLICAS * EACH and control.rank == VICTIM:
            self.path.with_suffix(".killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, record: StepRecord, control: Control) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([record.step, record.loss, record.grad_norm, control.world, time.monotonic()]) + "\n")


def small_run(directory: Path, replicas: int) -> RunConfig:
    base = RECIPES["debug_tiny"]()
    settings = replace(base.train, steps=STEPS, directory=str(directory), saving=SavingConfig(every=0))
    settings = replace(settings, corruption=CorruptionConfig(every=0))
    data = replace(base.data, seq_len=16, global_batch=8, micro_batch=1, validation=None)
    parallel = ParallelConfig(ep=2, dp_replicate=replicas, edp_replicate=replicas)
    precision = PrecisionConfig(params="float64", compute="float64", reduce="float64")
    return replace(base, data=data, parallel=parallel, train=settings, precision=precision)


def meet(store: Path, rank: int, world: int) -> None:
    dist.init_process_group(
        "gloo", store=FileStore(str(store), world), rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE)
    )


def state_in_memory(context: TrainContext) -> dict[str, Tensor]:
    """What a checkpoint would hold of this rank's shards, its replicas' ones as well."""
    local, optimizer = context.local_model, context.optimizer
    live = dict(local.model.named_buffers())
    values = {f"buffer/{spec.name}": live[spec.name].clone() for spec in local_buffers(local.run, local.model)}
    for piece in local.pieces():
        values[f"parameter/{piece.name}"] = optimizer.main_weight(piece.parameter).clone()
        for kind, state in (optimizer.saved_state(piece.parameter) if optimizer.state else {}).items():
            values[f"{kind}/{piece.name}"] = state.clone() if isinstance(state, Tensor) else torch.tensor(state)
    return values


def rank_main(directory: Path, rank: int, kills: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    run, recorder = small_run(directory, REPLICAS), Recorder(directory / "steps.jsonl", kills)
    meet(directory / "store_0", rank, REPLICAS * EACH)
    context, state = build_train_context(run, rank, REPLICAS * EACH, torch.device("cpu"), PATIENCE)
    try:
        train(context, state, [recorder])
        return
    except RuntimeError as error:
        failed = str(error).splitlines()[0]
    began = time.monotonic()
    # Of this step nothing has been applied: the loop's position is that before it.
    step = recorder.step - 1
    at = TrainState(step=step, samples=step * run.data.global_batch, tokens=0)
    values = state_in_memory(context)
    # This does not close gloo's connections: a peer that waits for this rank notices by its own timeout only.
    dist.destroy_process_group()
    lost_replica = VICTIM // EACH
    if rank // EACH == lost_replica:
        return
    smaller = small_run(directory, REPLICAS - 1)
    meet(directory / "store_1", rank if rank < lost_replica * EACH else rank - EACH, (REPLICAS - 1) * EACH)
    context, _ = build_train_context(smaller, dist.get_rank(), dist.get_world_size(), torch.device("cpu"), PATIENCE)
    copy_into_live(context.local_model, context.optimizer, values)
    if rank == 0:
        (directory / "formed.json").write_text(json.dumps({"seconds": time.monotonic() - began, "failed": failed}))
    train(context, at, [recorder])


def run_ranks(directory: Path, kills: bool) -> list[list[Any]]:
    children = []
    for rank in range(REPLICAS * EACH):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                rank_main(directory, rank, kills)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        clean, lost = run_ranks(Path(one), False), run_ranks(Path(two), True)
        formed = json.loads((Path(two) / "formed.json").read_text())
        killed = float((Path(two) / "steps.killed").read_text())
    apart = [max(abs(a[1] - b[1]) / abs(b[1]), abs(a[2] - b[2]) / abs(b[2])) for a, b in zip(lost, clean, strict=True)]
    figures = {
        "steps": [line[0] for line in lost],
        "worlds": [line[3] for line in lost],
        "largest_relative_difference": max(apart),
        "new_world_s": round(formed["seconds"], 2),
        "from_the_kill_to_the_redone_step_s": round(lost[LOST_AT - 1][4] - killed, 2),
        "collective_timeout_s": PATIENCE,
        "noticed_by": "timeout" if "Timed out" in formed["failed"] else "closed connection",
    }
    print(json.dumps(figures, indent=1))
    if words[:1] == ["--json"]:
        Path(words[1]).write_text(json.dumps(figures, indent=1) + "\n")
    return int(max(apart) > 1e-9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
