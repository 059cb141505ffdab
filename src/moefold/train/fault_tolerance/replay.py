"""Run steps of a run again from a checkpoint, and compare with what was recorded, bit for bit.

The same code, data, seed and layout compute the same bits, so a difference is a fault: of the computation then or now,
of the data, or of the software that changed in between. `metrics.jsonl` has the loss, the grad norm and the samples of
every step, and the hash of all ranks' states of steps that were compared (`corruption.py`). JSON holds the shortest
decimal number that reads back as the same float64, so equal means bitwise equal.

Nothing is written into the run: a replay takes no lock, and may run beside the training.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from moefold.checkpoint.load import load_into
from moefold.checkpoint.step_dirs import committed_steps, final_path
from moefold.config.loading import run_from_mapping
from moefold.config.run import RunConfig
from moefold.config.train import StragglersConfig
from moefold.errors import MoefoldError
from moefold.parallel.parallelize import groups_of
from moefold.train.callback import StepRecord
from moefold.train.callbacks.jsonl import FILE_NAME
from moefold.train.fault_tolerance.corruption import StateWatch, read_findings
from moefold.train.fault_tolerance.stragglers import StragglerWatch
from moefold.train.metrics import finite
from moefold.train.prefetch import Prefetcher
from moefold.train.train_context import first_state, open_context, position_of
from moefold.train.train_loop import Hooks, read_local_step, take_step

# What a step must have in common with its record.
COMPARED = ("loss", "grad_norm", "balance", "dropped", "skipped", "sample_ids_digest", "state_hash")


@dataclass(frozen=True)
class Recorded:
    """What a run says of itself: its ranks, its steps by number, and the step at whose checkpoint a replay starts."""

    world: int
    steps: dict[int, dict[str, object]]
    start: int
    # The configuration's section at that time: a run that has lost ranks goes on in another layout.
    parallel: Mapping[str, object] | None = None

    def in_its_layout(self, run: RunConfig) -> RunConfig:
        return run if self.parallel is None else run_from_mapping({**asdict(run), "parallel": self.parallel})


def read_recorded(directory: Path, last: int) -> Recorded:
    """Up to step ``last``; refuses a step that is not recorded."""
    path, starts = directory / FILE_NAME, list[tuple[int, int, Mapping[str, object] | None]]()
    steps: dict[int, dict[str, object]] = {}
    if not path.exists():
        raise MoefoldError(f"{path}: not found; give the directory of a run, such as runs/debug_small")
    for line in path.read_bytes().splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            # The last line of a killed run.
            continue
        if data.get("kind") == "start" and data["step"] < last:
            starts.append((int(data["step"]), int(data["world"]), data.get("config", {}).get("parallel")))
        elif data.get("kind") == "step":
            steps[int(data["step"])] = data
    if last not in steps or not starts:
        known = f"has steps {min(steps)} to {max(steps)}" if steps else "has no step"
        raise MoefoldError(f"{path}: step {last} is not recorded; the file {known}")
    start = max((step for step in committed_steps(directory / "checkpoints") if step < last), default=0)
    missing = [step for step in range(start + 1, last) if step not in steps]
    if missing:
        raise MoefoldError(f"{path}: step {missing[0]}, between the checkpoint of step {start} and {last}, is missing")
    first = next((each for each in reversed(starts) if each[0] <= start), starts[0])
    if any(each[1:] != first[1:] for each in starts if each[0] > start):
        began, world, _ = starts[-1]
        raise MoefoldError(
            f"{path}: after step {start}, the newest checkpoint before step {last}, steps were taken in one layout and "
            f"from step {began} on in another, by {world} ranks; train.saving.keep keeps more checkpoints"
        )
    return Recorded(first[1], {step: steps[step] for step in range(start + 1, last + 1)}, start, first[2])


def replay_rank(
    run: RunConfig, directory: Path, recorded: Recorded, rank: int, device: torch.device, patience: float
) -> dict[str, list[dict[str, object]]]:
    """This rank's part of the replay: the steps as they came out, and findings that they decide. All ranks return."""
    groups = groups_of(run, recorded.world, rank, timedelta(seconds=patience))
    with tempfile.TemporaryDirectory(prefix="moefold-replay-") as scratch:
        context = open_context(run, directory, groups, device, incarnation=0, checkpoints=Path(scratch))
        root = directory / "checkpoints"
        if recorded.start in committed_steps(root):
            path = final_path(root, recorded.start)
            state = position_of(context, path, load_into(path, context.local_model, context.optimizer))
        else:
            state = first_state(context)
        watch = StateWatch(context.local_model, context.optimizer, every=1, directory=Path(scratch))
        watch.undecided = [
            each for each in read_findings(directory) if each.step in recorded.steps and not each.culprits
        ]
        hooks, pace = Hooks((), context), StragglerWatch(StragglersConfig(window=0), context.local_model)
        records = []
        with Prefetcher(partial(read_local_step, context), groups, device) as batches:
            while state.step < max(recorded.steps):
                hooks.control.begin_record()
                state, record = take_step(context, state, time.perf_counter(), hooks, batches, watch, pace)
                records.append(as_recorded(record))
        return {"steps": records, "decided": [asdict(each) for each in read_findings(Path(scratch))]}


def as_recorded(record: StepRecord) -> dict[str, object]:
    """A record as its line in `metrics.jsonl` has it."""
    data = json.loads(json.dumps(finite(asdict(record)), allow_nan=False))
    return {"step": record.step} | {name: data[name] for name in COMPARED}


def differences(
    recorded: Mapping[int, Mapping[str, object]], replayed: list[dict[str, object]]
) -> list[dict[str, object]]:
    """Fields that are not the same bits. The hash is compared where it was recorded."""
    found = []
    for now in replayed:
        step = now["step"]
        assert isinstance(step, int)
        then = recorded[step]
        for name in COMPARED:
            if name == "state_hash" and then.get(name) is None:
                continue
            if then.get(name) != now[name]:
                found.append({"step": step, "field": name, "recorded": then.get(name), "replayed": now[name]})
    return found
