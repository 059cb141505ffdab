"""Hosts lose their processes and their memory; the run resumes from what the other host's memory has of them.

Two hosts are network namespaces with a launcher each and directories in memory of their own. In a drawn step all
processes of a host are killed and its directory is deleted; the host then comes back. The run must resume from memory,
and end with the losses of a run that nothing disturbed, to the last bit. Where both hosts are lost, it must resume from
the disk. Two cases of one host follow: a killed rank, and one of 8 places that is lost for good, so that the others do
the interrupted step with the same batch. Needs the right to make namespaces.

    python -m tests.peer_copies --count 10 --seed 1 --json docs/measured/peer_copies.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.loss_of_ranks import BOUNDS, largest_difference, run_of, train_in_peace, train_with_losses
from tests.two_hosts import move_to, two_hosts

from moefold.checkpoint.memory_copies import memory_directory
from moefold.checkpoint.step_dirs import committed_steps
from moefold.cli.main import main as moefold
from moefold.config.parallel import ParallelConfig
from moefold.config.train import SavingConfig

STEPS, SAVE_EVERY, PATIENCE = 12, 5, 120.0
# Two steps before a checkpoint, so that the newest copy is newer than the disk's.
LOST_AFTER = (2, 3, 7, 8)
FROM_MEMORY = "from the copy in memory"


def _launch(host: int, words: tuple[str, ...], log: Path) -> None:
    """`moefold train`, in a process that has imported it already, on one of the hosts."""
    os.setsid()
    move_to(host)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(moefold(list(words)))


class Pair:
    """Two launchers of one run; those that were killed can be started again."""

    def __init__(self, directory: Path, memory_every: int) -> None:
        self.directory, self.memory_every = directory, memory_every
        self.logs = [directory / f"host_{name}.log" for name in "ab"]
        self.launchers = [self.start(host) for host in range(2)]

    def start(self, host: int) -> BaseProcess:
        words = (
            *("train", "debug_tiny", "--name", "two", "--nnodes", "2", "--node-rank", str(host), "--nproc", "2"),
            *("--patience", str(PATIENCE), "--host-patience", "0"),
            *("--master-addr", "10.99.0.1", "--parallel.ep", "4", "--train.steps", str(STEPS)),
            *("--train.saving.every", str(SAVE_EVERY), "--train.saving.memory_every", str(self.memory_every)),
            *("--train.directory", str(self.directory)),
        )
        process = get_context("fork").Process(target=_launch, args=(host, words, self.logs[host]))
        process.start()
        return process

    @property
    def memories(self) -> list[Path]:
        return [memory_directory(self.directory / "two", host) for host in range(2)]

    def lose(self, host: int) -> None:
        """All processes of a host at once, and what it has in memory, as when its power fails."""
        os.killpg(self.launchers[host].pid or 0, signal.SIGKILL)
        self.launchers[host].join()
        shutil.rmtree(self.memories[host], ignore_errors=True)

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "two" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if line.endswith("}") and (record := json.loads(line))["kind"] == kind]

    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in self.records("step")}

    def said(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs)

    def wait(self, until: Callable[[], bool], seconds: float = 300.0) -> None:
        ends = time.monotonic() + seconds
        while not until():
            if time.monotonic() > ends:
                raise TimeoutError(f"not within {seconds:g} s:\n{self.said()[-3000:]}")
            time.sleep(0.05)

    def wait_for_the_end(self) -> None:
        self.wait(lambda: not any(launcher.is_alive() for launcher in self.launchers))
        if any(launcher.exitcode for launcher in self.launchers):
            raise RuntimeError(self.said()[-3000:])

    def end(self) -> None:
        for host, launcher in enumerate(self.launchers):
            if launcher.is_alive():
                self.lose(host)
            shutil.rmtree(self.memories[host], ignore_errors=True)


@dataclass(frozen=True)
class Measured:
    """``next_step``: seconds from the return of the lost hosts to the first step after it."""

    lost: str
    at_step: int
    resumed_at: int
    from_memory: bool
    steps_redone: int
    next_step: float
    same_losses: bool

    @property
    def as_it_must_be(self) -> bool:
        return self.same_losses and self.from_memory == (self.lost != "both")


def measure(lost: tuple[int, ...], after: int, expected: dict[int, float]) -> Measured:
    with tempfile.TemporaryDirectory() as directory, two_hosts("100mbit"):
        pair = Pair(Path(directory), memory_every=1)
        try:
            pair.wait(lambda: all(after in committed_steps(memory) for memory in pair.memories))
            for host in lost:
                pair.lose(host)
            reached, starts = max(pair.losses()), len(pair.records("start"))
            if len(lost) == 1:
                pair.wait(lambda: "restarting from" in pair.logs[1 - lost[0]].read_text(errors="replace"))
            began = time.monotonic()
            for host in lost:
                pair.launchers[host] = pair.start(host)
            pair.wait(lambda: len(pair.records("start")) > starts)
            resumed = pair.records("start")[-1]["step"]
            pair.wait(lambda: max(pair.losses(), default=0) > resumed)
            next_step = time.monotonic() - began
            pair.wait_for_the_end()
            left = [host for host in range(2) if pair.memories[host].exists()]
            if left:
                raise RuntimeError(f"the finished run has left copies in memory of hosts {left}")
            return Measured(
                lost="both" if len(lost) == 2 else "ab"[lost[0]],
                at_step=reached,
                resumed_at=resumed,
                from_memory=FROM_MEMORY in pair.said(),
                steps_redone=reached - resumed,
                next_step=round(next_step, 1),
                same_losses=pair.losses() == expected,
            )
        finally:
            pair.end()


def undisturbed() -> dict[int, float]:
    """Without copies in memory."""
    with tempfile.TemporaryDirectory() as directory, two_hosts("100mbit"):
        pair = Pair(Path(directory), memory_every=0)
        try:
            pair.wait_for_the_end()
            assert sorted(pair.losses()) == list(range(1, STEPS + 1))
            return pair.losses()
        finally:
            pair.end()


def lose_a_place() -> dict[str, Any]:
    """One of 8 places, for good, in a step of two replicas: the ranks that are left do that step, of the same batch."""
    with tempfile.TemporaryDirectory() as directory:
        run = run_of(Path(directory) / "lost", ParallelConfig(dp_replicate=2, edp_replicate=2), "float64")
        run = replace(run, train=replace(run.train, saving=SavingConfig(every=0, memory_every=1)))
        peace = replace(run, train=replace(run.train, directory=f"{directory}/peace", saving=SavingConfig(every=0)))
        expected, found = train_in_peace(peace), train_with_losses(run, (3,))
        return {
            "layout": found["layout"],
            "world": found["world"],
            "resumed_at": found["from_step"],
            "interrupted_step": 4,
            "steps_redone": 3 - found["from_step"],
            "seconds": round(found["seconds"], 1),
            "difference": largest_difference(found["losses"], expected),
        }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10, help="lost hosts; two more cases lose both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write figures to this file")
    args = parser.parse_args(words)
    dice, expected, found = random.Random(args.seed), undisturbed(), list[Measured]()
    cases = [(dice.randrange(2),) for _ in range(args.count)] + [(0, 1)] * 2
    place: dict[str, Any] = {}
    for lost in cases:
        # Where both are lost, there must be a checkpoint to go back to.
        found.append(measure(lost, dice.choice(LOST_AFTER if len(lost) == 1 else LOST_AFTER[2:]), expected))
        print(found[-1], flush=True)
        _write(args, found, place)
    place |= lose_a_place()
    print(json.dumps(place), flush=True)
    _write(args, found, place)
    exact = place["difference"] <= BOUNDS["float64"] and place["steps_redone"] == 0
    return int(not exact or not all(one.as_it_must_be for one in found))


def _write(args: argparse.Namespace, found: list[Measured], place: dict[str, Any]) -> None:
    single = [one for one in found if one.lost != "both"]
    figures = {
        "seed": args.seed,
        "load": round(os.getloadavg()[1], 1),
        "hosts_lost": len(single),
        "from_memory": sum(one.from_memory for one in single),
        "both_lost": len(found) - len(single),
        "from_disk": sum(not one.from_memory for one in found if one.lost == "both"),
        "bitwise": sum(one.same_losses for one in found),
        "steps_redone_max": max((one.steps_redone for one in single), default=0),
        "next_step_s": sorted(one.next_step for one in single),
        "each": [asdict(one) for one in found],
        "lost_place": place,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
