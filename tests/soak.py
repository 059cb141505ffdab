"""Train for a long time under random faults, beside the same run in peace, and compare the two.

Both runs have two ranks and start together, each on a core of its own, so whatever slows the machine slows both. In
each step the host waits `--device-seconds`, as it would for a GPU: steps, and therefore those that are done twice, take
longer than their work on this host, and restarts take what they take. Faults come at random, `--between` seconds apart
on average (exponential, so some come during the recovery from another one): ranks are killed, crash, raise, stop;
writes fail; bits flip in weights; the launcher is preempted and started again.

The effective training time is the share of the peaceful run's steps that the disturbed one has done in the same time:
it counts everything, from noticing a fault to steps that were done twice. Losses and gradient norms of all steps that
both have done must be equal to the last bit.

    python -m tests.soak --minutes 90 --between 60 --seed 7 --json docs/measured/soak.json
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import torch
from tests.kill import TimedDiary

import moefold
import moefold.checkpoint.files
import moefold.train.callbacks.registry
import moefold.train.fault_tolerance.supervise
import moefold.train.fault_tolerance.watchdog
import moefold.train.train_loop
from moefold.config.run import RunConfig
from moefold.parallel.param_shards import local_part
from moefold.train.callback import Callback, Control
from moefold.train.fault_tolerance.signals import STOP_SIGNALS, stop_on_signals

WORLD = 2
SETTINGS = {
    # Replicas: a flipped bit has something to be compared with.
    "parallel.dp_replicate": 2,
    "parallel.edp_replicate": 2,
    "data.seq_len": 32,
    "data.global_batch": 4,
    "data.micro_batch": 2,
    "data.validation": None,
    "train.steps": 1_000_000,
    "train.log_every": 10,
    "train.saving.every": 2,
    "train.watchdog.seconds": 2.0,
    # The same rank may be hit again and again, by chance.
    "train.elastic.min_world": WORLD,
}


def _flip_bit(control: Control, dice: random.Random) -> None:
    weights = [local_part(weight) for weight in control.model.parameters() if local_part(weight).numel()]
    words = dice.choice(weights).detach().view(-1).view(torch.int32)
    position = dice.randrange(words.numel())
    words[position] ^= 1 << dice.randrange(23)


def _fail_one_write(control: Control, dice: random.Random) -> None:
    write, number = moefold.checkpoint.files._write_all, dice.choice((errno.ENOSPC, errno.EIO, errno.EDQUOT))

    def failing(*args: Any) -> None:
        moefold.checkpoint.files._write_all = write
        raise OSError(number, os.strerror(number))

    moefold.checkpoint.files._write_all = failing


def _raise(control: Control, dice: random.Random) -> None:
    raise RuntimeError("a fault of the soak")


# By a signal to a rank, from outside; inside a rank, before a step; or to the launcher. The number is its weight.
FROM_OUTSIDE = {"SIGKILL": (signal.SIGKILL, 6), "SIGSEGV": (signal.SIGSEGV, 3), "SIGABRT": (signal.SIGABRT, 3)}
FROM_OUTSIDE |= {"SIGSTOP": (signal.SIGSTOP, 3)}
INSIDE: dict[str, tuple[Callable[[Control, random.Random], None], int]] = {
    "exception": (_raise, 3),
    "failed write": (_fail_one_write, 3),
    "bit flip": (_flip_bit, 2),
}
PREEMPTION = "preemption"
WEIGHTS = {name: weight for name, (_, weight) in (FROM_OUTSIDE | INSIDE).items()} | {PREEMPTION: 2}


class Faults(Callback):
    """Does what the driver has asked this rank for, in a file of its own."""

    def __init__(self, directory: Path, device_seconds: float) -> None:
        self.directory, self.device_seconds = directory, device_seconds

    def before_step(self, step: int, control: Control) -> None:
        time.sleep(self.device_seconds)
        asked = _asked_file(self.directory, control.rank)
        if asked.exists():
            kind = asked.read_text()
            asked.unlink()
            INSIDE[kind][0](control, random.Random(f"{kind} {step}"))


def _asked_file(directory: Path, rank: int) -> Path:
    return directory / f"fault_of_rank_{rank}"


@dataclass
class Side:
    """One of the two runs. Its launcher is forked from this process, which has imported everything."""

    run: RunConfig
    directory: Path
    core: int
    device_seconds: float
    pid: int = 0

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # A launcher handles signals before anything else; here it must not receive one before it does.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            self._launch()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _launch(self) -> NoReturn:
        os.sched_setaffinity(0, {self.core})
        with (self.directory / "log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        callbacks, code = [Faults(self.directory, self.device_seconds), TimedDiary(self.directory / "diary.jsonl")], 1
        try:
            with stop_on_signals() as stop:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
                trainer = moefold.Trainer(self.run, callbacks, reporters=[], nproc=WORLD, patience=60.0)
                code = 75 if trainer.fit(stop) == "interrupted" else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def ranks(self) -> list[int]:
        with suppress(FileNotFoundError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def stop(self) -> int:
        """By SIGTERM; returns the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def has_ended(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def steps(self) -> list[dict[str, Any]]:
        lines = (self.directory / "diary.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]


@dataclass
class Soak:
    """``happened`` are the faults: when, in ``time.monotonic``, and which."""

    disturbed: Side
    peaceful: Side
    dice: random.Random
    between: float
    kinds: list[str]
    happened: list[tuple[float, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def train(self, seconds: float) -> float:
        """Returns when both were stopped."""
        for side in (self.disturbed, self.peaceful):
            side.start()
        end = time.monotonic() + seconds
        for pause in self._pauses():
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            if time.monotonic() >= end or self.problems:
                break
            self._disturb(self.dice.choices(self.kinds, [WEIGHTS[kind] for kind in self.kinds])[0])
        stopped = time.monotonic()
        for name, side in (("disturbed", self.disturbed), ("peaceful", self.peaceful)):
            code = side.stop()
            if code != 75:
                self.problems.append(f"the {name} run ended with {code} when it was asked to stop")
        return stopped

    def _pauses(self) -> Iterator[float]:
        while True:
            yield self.dice.expovariate(1 / self.between)

    def _disturb(self, kind: str) -> None:
        side, rank = self.disturbed, self.dice.randrange(WORLD)
        if side.has_ended():
            self.problems.append(f"the run ended by itself after {self.happened[-1:]}")
            side.start()
        self.happened.append((time.monotonic(), kind))
        print(f"fault {len(self.happened)}: {kind}", flush=True)
        if kind == PREEMPTION:
            code = side.stop()
            if code != 75:
                self.problems.append(f"preempted, it exited with {code}")
            side.start()
        elif kind in FROM_OUTSIDE:
            ranks = side.ranks()
            if len(ranks) == WORLD:
                with suppress(ProcessLookupError):
                    os.kill(ranks[rank], FROM_OUTSIDE[kind][0])
        else:
            _asked_file(side.directory, rank).write_text(kind)


_SPREAD: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "max": max}


def compare(soak: Soak, stopped: float) -> dict[str, Any]:
    disturbed, peaceful = soak.disturbed.steps(), soak.peaceful.steps()
    done, expected = ({entry["step"]: entry for entry in entries} for entries in (disturbed, peaceful))
    in_time = [
        max((entry["step"] for entry in entries if entry["at"] <= stopped), default=0)
        for entries in (disturbed, peaceful)
    ]
    common = sorted(set(done) & set(expected))
    differing = [step for step in common if _bits(done[step]) != _bits(expected[step])]
    ends = [entry["at"] for entry in disturbed]
    recovered = [min(later) - at for at, _ in soak.happened if (later := [end for end in ends if end > at])]
    return {
        "minutes": round((stopped - min(entry["at"] for entry in peaceful)) / 60, 1),
        "faults": len(soak.happened),
        "kinds": dict(sorted(Counter(kind for _, kind in soak.happened).items())),
        "steps": in_time[1],
        "steps_under_faults": in_time[0],
        "effective_training_time": round(in_time[0] / in_time[1], 4),
        "steps_done_twice": len(disturbed) - len(done),
        "steps_compared": len(common),
        "steps_that_differ": len(differing),
        "first_that_differs": min(differing, default=None),
        "next_step_s": {name: round(of(recovered or [inf]), 2) for name, of in _SPREAD.items()},
        "problems": soak.problems,
    }


def _bits(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "at"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train under random faults, beside the same run in peace.")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--between", type=float, default=60.0, help="mean seconds between faults (default 60)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--device-seconds", type=float, default=0.2, help="of each step that the host only waits")
    parser.add_argument("--kinds", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS), metavar="KIND")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="moefold-soak-") as folder:
        sides = []
        for name, core in (("disturbed", cores[0]), ("peaceful", cores[-1])):
            run = moefold.load_run("debug_tiny", SETTINGS | {"train.directory": f"{folder}/{name}"})
            sides.append(Side(run, Path(folder) / name / run.name, core, args.device_seconds))
        soak = Soak(sides[0], sides[1], random.Random(args.seed), args.between, args.kinds)
        stopped = soak.train(args.minutes * 60)
        found = {"seed": args.seed, "between_s": args.between} | compare(soak, stopped)
        if soak.problems or found["steps_that_differ"]:
            print((sides[0].directory / "log").read_text()[-8000:], *soak.problems, sep="\n")
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(soak.problems) or found["steps_that_differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
