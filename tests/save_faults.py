"""Fail saves of real runs in six ways, and compare with the same run without faults.

    python -m tests.save_faults --count 60 --seed S --json docs/measured/save_faults.json

Each run has six saves before its last one; one fault is drawn for each: a kind, a rank, and for how many attempts it
lasts. A save whose fault ends before its retries do is written late; the others are skipped. No run may end or start
again, losses must be the same to the last bit, and so must the last checkpoint.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.kill import Diary, digest, small_run

from moefold import load_run
from moefold.checkpoint import files, save, writer_thread
from moefold.checkpoint.save import Saver
from moefold.checkpoint.step_dirs import final_path, verify
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.train.callback import Callback
from moefold.train.fault_tolerance.supervise import supervise
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train

KINDS = ("EPERM", "ENOSPC", "EDQUOT", "EIO", "EROFS", "memory")
SAVE_EVERY, STEPS, RETRIES = 2, 14, 1
LAYOUTS = {1: ParallelConfig(), 2: ParallelConfig(ep=2), 4: ParallelConfig(ep=2)}


@dataclass(frozen=True)
class Fault:
    """Of the save of ``step``, on ``rank``, in its first ``attempts`` attempts."""

    kind: str
    step: int
    rank: int
    attempts: int


def drawn(count: int, seed: int) -> list[tuple[int, list[Fault]]]:
    """Runs of 1, 2 and 4 ranks in turn, with one fault of every kind each."""
    dice, runs = random.Random(seed), []
    for number in range(-(-count // len(KINDS))):
        world = tuple(LAYOUTS)[number % len(LAYOUTS)]
        kinds = dice.sample(KINDS, len(KINDS))[: count - number * len(KINDS)]
        faults = [
            Fault(kind, (index + 1) * SAVE_EVERY, dice.randrange(world), dice.randint(1, RETRIES + 1))
            for index, kind in enumerate(kinds)
        ]
        runs.append((world, faults))
    return runs


def arm(rank: int, faults: Sequence[Fault]) -> None:
    """Break this process's saves as planned."""
    by_step = {fault.step: fault for fault in faults if fault.rank == rank}
    now: list[Fault | None] = [None]
    attempt, write, sync, make = Saver._attempt, files._write_all, files.fsync, save.make_directory
    submit, write_shard = writer_thread.WriterThread.submit, save.write_shard

    def note(self: Saver, saving: Any, error: BaseException | None = None) -> None:
        fault = by_step.get(saving.step)
        now[0] = fault if fault is not None and saving.attempts <= fault.attempts else None
        attempt(self, saving, error)

    def refuse(*kinds: str) -> None:
        if (fault := now[0]) is not None and fault.kind in kinds:
            code = getattr(errno, fault.kind)
            raise OSError(code, os.strerror(code))

    def half(descriptor: int, part: memoryview) -> None:
        if now[0] is not None:
            write(descriptor, part[: len(part) // 2])
            refuse("ENOSPC", "EDQUOT")
            part = part[len(part) // 2 :]
        write(descriptor, part)

    def flush(descriptor: int) -> None:
        refuse("EIO")
        sync(descriptor)

    def directory(path: Path) -> None:
        with files.naming(path):
            refuse("EPERM", "EROFS")
        make(path)

    def allocate(*args: Any) -> Any:
        if now[0] is not None and now[0].kind == "memory":
            raise MemoryError
        return write_shard(*args)

    def no_thread(self: writer_thread.WriterThread, job: Any) -> None:
        # Every other step: the memory is short before the writer has begun.
        if now[0] is not None and now[0].kind == "memory" and now[0].step % (2 * SAVE_EVERY):
            job.fail(MemoryError())
        else:
            submit(self, job)

    Saver._attempt, files._write_all, files.fsync = note, half, flush  # type: ignore[method-assign]
    save.make_directory, save.write_shard = directory, allocate
    writer_thread.WriterThread.submit = no_thread  # type: ignore[method-assign]


class Failures(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_save_failed(self, step: int, reason: str, retries_left: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "reason": reason, "retries_left": retries_left}) + "\n")


def trained(run: RunConfig, world: int, faults: Sequence[Fault]) -> dict[str, Any]:
    """What a run left."""
    directory = run_directory(run)
    directory.mkdir(parents=True)

    def work(rank: int) -> int:
        arm(rank, faults)
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 60.0)
        code = train(context, state, [Diary(directory / "diary.jsonl"), Failures(directory / "failed.jsonl")])
        (directory / f"digest_{rank}").write_text(digest(context))
        return code

    code = supervise(work, world, directory / "checkpoints", 60.0, max_fruitless=1)
    lines = [json.loads(line) for line in (directory / "diary.jsonl").read_text().splitlines()]
    failed = directory / "failed.jsonl"
    return {
        "code": code,
        "starts": sum(line["kind"] == "start" for line in lines),
        "steps": [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"],
        "saved": [line["step"] for line in lines if line["kind"] == "save"],
        "digests": [(directory / f"digest_{rank}").read_text() for rank in range(world)],
        "files": verify(final_path(directory / "checkpoints", STEPS)).files,
        "failed": [json.loads(line) for line in failed.read_text().splitlines()] if failed.exists() else [],
    }


def measure(count: int, seed: int, tell: bool = False) -> dict[str, Any]:
    began, kinds, ended, differ, attempts, skipped = time.monotonic(), Counter[str](), 0, 0, 0, 0
    whole: dict[int, dict[str, Any]] = {}
    runs = drawn(count, seed)
    with tempfile.TemporaryDirectory() as root:
        for number, (world, faults) in enumerate(runs):

            def one(name: str, planned: Sequence[Fault], world: int = world) -> dict[str, Any]:
                run = small_run(load_run("debug_tiny"), Path(root) / name, LAYOUTS[world], True, STEPS)
                saving = replace(run.train.saving, every=SAVE_EVERY, retries=RETRIES)
                data = replace(run.data, global_batch=4)
                return trained(replace(run, data=data, train=replace(run.train, saving=saving)), world, planned)

            if world not in whole:
                whole[world] = one(f"whole{world}", ())
            found = one(f"run{number}", faults)
            ended += found["code"] != 0 or found["starts"] != 1
            differ += any(found[name] != whole[world][name] for name in ("steps", "digests", "files"))
            attempts += len(found["failed"])
            skipped += sum(not each["retries_left"] for each in found["failed"])
            missed = [fault for fault in faults if fault.step not in {each["step"] for each in found["failed"]}]
            assert not missed, missed
            kinds.update(fault.kind for fault in faults)
            if tell:
                print(
                    f"run {number + 1} of {len(runs)}: {world} ranks, {len(found['failed'])} failed attempts",
                    flush=True,
                )
    return {
        "seed": seed,
        "failed_saves": kinds.total(),
        "kinds": {kind: kinds[kind] for kind in KINDS},
        "runs": len(runs),
        "failed_attempts": attempts,
        "skipped": skipped,
        "runs_ended": ended,
        "runs_that_differ": differ,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.count, given.seed, tell=True)
    print(json.dumps(found, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    assert not found["runs_ended"] and not found["runs_that_differ"]


if __name__ == "__main__":
    main()
