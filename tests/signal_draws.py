"""Signal a real run of two ranks at a drawn moment, and look at what is left of it.

A draw is a moment of the run's life and one to three signals, each with a kind, a target and a pause before it. Moments
are recognised from outside: by the handlers the kernel knows of, by the launcher's children, by the lines on standard
output, and by the temporary directory of a save under way. The run has a session of its own, so that its process group
holds nothing else.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import moefold
from moefold.checkpoint.run_lock import read_incarnation
from moefold.checkpoint.step_dirs import verify

STEPS, SAVE_EVERY, SECONDS = 40, 6, 400.0
LAUNCHER, GROUP, RANK_0, RANK_1 = "launcher", "group", "rank 0", "rank 1"
SETTINGS = {
    "parallel.ep": 2,
    "data.seq_len": 16,
    "data.global_batch": 4,
    "data.micro_batch": 2,
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.validate_batches": 1,
    "train.saving.every": SAVE_EVERY,
    "train.saving.keep": 3,
}


class Dispatched(NamedTuple):
    number: signal.Signals
    target: str
    pause: float


@dataclass(frozen=True)
class Draw:
    """Signals that are sent ``delay`` seconds after ``moment``, which for some moments means: of step ``step``."""

    moment: str
    step: int
    delay: float
    signals: tuple[Dispatched, ...]

    def __str__(self) -> str:
        at = f"{self.moment} {self.step or ''}".strip()
        sent = ", ".join(f"{one.number.name} to {one.target} after {one.pause * 1e3:.0f} ms" for one in self.signals)
        return f"{at} + {self.delay * 1e3:.0f} ms: {sent}"


@dataclass(frozen=True)
class Outcome:
    """What a run left: its exit code, how often its ranks were started, its last step, and its checkpoints."""

    code: int
    said: str
    starts: int
    last_step: int
    saved: tuple[int, ...]


def draws(count: int, seed: int) -> list[Draw]:
    """Moments in turn, so that each comes equally often; everything else by chance."""
    dice = random.Random(seed)
    return [_draw(list(MOMENTS)[number % len(MOMENTS)], dice) for number in range(count)]


def _draw(moment: str, dice: random.Random) -> Draw:
    first, last, longest = MOMENTS[moment]
    # Ranks do not exist while the launcher imports.
    targets = [LAUNCHER, GROUP] if moment == "imports" else [LAUNCHER, GROUP, RANK_0, RANK_1]
    signals = tuple(
        Dispatched(
            dice.choice([signal.SIGTERM, signal.SIGINT]),
            dice.choice(targets),
            dice.uniform(0.0, 0.3) if number else 0.0,
        )
        for number in range(dice.choice([1, 2, 2, 3]))
    )
    return Draw(moment, dice.randint(first, last), dice.uniform(0.0, longest), signals)


# First and last step that may be drawn, and the longest delay in seconds.
MOMENTS = {
    "imports": (0, 0, 4.0),
    "set-up": (0, 0, 1.0),
    "first step": (0, 0, 0.3),
    "step": (2, STEPS - 12, 0.3),
    "save": (SAVE_EVERY, STEPS - 10, 0.02),
    "near the end": (STEPS - 6, STEPS - 4, 0.0),
}


def command(directory: Path, *words: str) -> list[str]:
    settings = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
    start = [sys.executable, "-m", "moefold.cli.main", "train", "debug_tiny", "--name", "run"]
    return [*start, "--train.directory", str(directory), *settings, *words]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(moefold.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


class Run:
    """One start of the run on two ranks; both streams go to one file."""

    def __init__(self, directory: Path, *words: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory / "run"
        self.log = directory / f"log_{len(list(directory.glob('log_*')))}"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command(directory, *(words or ("--nproc", "2"))),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
            )

    def signal_as(self, draw: Draw) -> None:
        self.wait_for(draw.moment, draw.step)
        time.sleep(draw.delay)
        for one in draw.signals:
            time.sleep(one.pause)
            self.send(one)

    def send(self, one: Dispatched) -> None:
        """The launcher has not been waited for, so its number is still its own; so are those of its children."""
        if one.target == GROUP:
            os.killpg(self.process.pid, one.number)
        elif one.target == LAUNCHER:
            os.kill(self.process.pid, one.number)
        elif ranks := children(self.process.pid):
            os.kill(ranks[min(int(one.target[-1]), len(ranks) - 1)], one.number)

    def wait_for(self, moment: str, step: int) -> None:
        reached: dict[str, Callable[[], bool]] = {
            "imports": lambda: hears_sigterm(self.process.pid),
            "set-up": lambda: len(children(self.process.pid)) == 2,
            "first step": lambda: "run=" in self.text(),
            "step": lambda: self.last_step() >= step,
            "save": lambda: self.last_step() >= step and any(self.directory.glob("checkpoints/*tmp*")),
            "near the end": lambda: self.last_step() >= step,
        }
        deadline = time.monotonic() + SECONDS
        while not reached[moment]():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.001)

    def outcome(self) -> Outcome:
        try:
            code = self.process.wait(SECONDS)
        finally:
            self.end()
        started = read_incarnation(self.directory) if self.directory.exists() else None
        saved = sorted(path for path in self.directory.glob("checkpoints/step_*") if path.suffix == "")
        for path in saved:
            verify(path)
        steps = tuple(int(path.name.removeprefix("step_")) for path in saved)
        return Outcome(code, self.text(), started.number if started else 0, self.last_step(), steps)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_step(self) -> int:
        return max(map(int, re.findall(r"^step=(\d+)/", self.text(), re.MULTILINE)), default=0)


def hears_sigterm(pid: int) -> bool:
    """Whether the process has installed a handler for it; the interpreter alone has one for SIGINT only."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def children(pid: int) -> list[int]:
    """In the order in which they were started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
