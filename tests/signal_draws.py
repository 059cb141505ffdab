"""Signal a real run of two ranks at a drawn moment, and look at what is left of it.

A draw is a moment of the run's life and one to three signals, each with a kind, a target and a pause before it. Moments
are recognised from outside: by the handlers the kernel knows of, by the launcher's children, by the lines on standard
output, and by the temporary directory of a save under way. The run has a session of its own, so that its process group
holds nothing else.

    python -m tests.signal_draws --draws 500 --seed 7 --piece 1/2 --json signals.json

Importing torch takes longer than a run of 20 steps. So the command, and the tests, import it once and fork a process
per run, which calls the command line's own `main`; only runs that are signalled while they import are started afresh.
Every run that was stopped is resumed, and its last checkpoint must be bit for bit that of a run that nobody signalled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import rich.progress  # noqa: F401 (before the fork, like everything that a run imports)

import moefold
import moefold.cli.train
import moefold.plan.preflight
import moefold.train.callbacks.registry
import moefold.train.fault_tolerance.supervise
import moefold.train.train_loop
from moefold.checkpoint.run_lock import read_incarnation
from moefold.checkpoint.step_dirs import verify
from moefold.cli.main import main as moefold_main
from moefold.train.fault_tolerance.signals import AT_ONCE_SECONDS, INTERRUPTED, SAME_SECONDS

STEPS, SAVE_EVERY, SECONDS = 20, 4, 400.0
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

    @property
    def at_once(self) -> bool:
        """Whether the launcher is asked a second time, later than its copies of the first request come."""
        launcher = [at for one, at in zip(self.signals, self._times(), strict=True) if one.target in (LAUNCHER, GROUP)]
        return any(SAME_SECONDS < at - launcher[0] <= AT_ONCE_SECONDS for at in launcher)

    def _times(self) -> list[float]:
        return [sum(one.pause for one in self.signals[: number + 1]) for number in range(len(self.signals))]

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
    # From the last signal that was sent to the end of the run.
    seconds: float


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
            dice.choice(PAUSES)(dice) if number else 0.0,
        )
        for number in range(dice.choice([1, 2, 2, 3]))
    )
    return Draw(moment, dice.randint(first, last), dice.uniform(0.0, longest), signals)


# Copies of one request, also 20 ms apart; and a person who asks a second time.
PAUSES: tuple[Callable[[random.Random], float], ...] = (
    lambda dice: 0.02,
    lambda dice: dice.uniform(0.0, 0.3),
    lambda dice: dice.uniform(SAME_SECONDS + 0.1, SAME_SECONDS + 1.0),
)
# First and last step that may be drawn, and the longest delay in seconds.
MOMENTS = {
    "imports": (0, 0, 4.0),
    "set-up": (0, 0, 1.0),
    "first step": (0, 0, 0.3),
    "step": (2, STEPS - 8, 0.3),
    "save": (SAVE_EVERY, STEPS - 8, 0.02),
    "restart": (SAVE_EVERY + 2, STEPS - 6, 0.6),
    "near the end": (STEPS - 5, STEPS - 3, 0.0),
}


def command(directory: Path, *words: str) -> list[str]:
    settings = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
    start = [sys.executable, "-m", "moefold.cli.main", "train", "debug_tiny", "--name", "run"]
    return [*start, "--train.directory", str(directory), *settings, *words]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(moefold.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


class Forked:
    """A process that runs the command line in a fork of this one, with what `subprocess.Popen` offers of it."""

    def __init__(self, words: list[str], out: int) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(words, out)

    def _run(self, words: list[str], out: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.update(environment())
            sys.argv = ["moefold", *words]
            code = moefold_main()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds: float = SECONDS) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, "the run did not end"
            time.sleep(0.002)
        return code


class Run:
    """One start of the run on two ranks; both streams go to one file. ``cold``: by an interpreter of its own."""

    def __init__(self, directory: Path, *words: str, cold: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory / "run"
        self.log = directory / f"log_{len(list(directory.glob('log_*')))}"
        self.signalled = time.monotonic()
        asked = command(directory, *(words or ("--nproc", "2")))
        with self.log.open("wb") as out:
            self.process: subprocess.Popen[bytes] | Forked
            if not cold:
                self.process = Forked(asked[3:], out.fileno())
                return
            self.process = subprocess.Popen(
                asked, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment()
            )

    def signal_as(self, draw: Draw) -> None:
        self.wait_for(draw.moment, draw.step)
        if draw.moment == "restart":
            self.send(Dispatched(signal.SIGKILL, (RANK_0, RANK_1)[draw.step % 2], 0.0))
        time.sleep(draw.delay)
        for one in draw.signals:
            time.sleep(one.pause)
            if self.process.poll() is not None:
                return
            self.send(one)
            self.signalled = time.monotonic()

    def send(self, one: Dispatched) -> None:
        """A process that has not been waited for keeps its number; ranks may be reaped by their launcher meanwhile."""
        if one.target == GROUP:
            os.killpg(self.process.pid, one.number)
        elif one.target == LAUNCHER:
            os.kill(self.process.pid, one.number)
        elif ranks := children(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(ranks[min(int(one.target[-1]), len(ranks) - 1)], one.number)

    def wait_for(self, moment: str, step: int) -> None:
        reached: dict[str, Callable[[], bool]] = {
            "imports": lambda: hears_sigterm(self.process.pid),
            "set-up": lambda: len(children(self.process.pid)) == 2,
            "first step": lambda: "run=" in self.text(),
            "step": lambda: self.last_step() >= step,
            "save": lambda: self.last_step() >= step and any(self.directory.glob("checkpoints/*tmp*")),
            "restart": lambda: self.last_step() >= step,
            "near the end": lambda: self.last_step() >= step,
        }
        deadline = time.monotonic() + SECONDS
        while not reached[moment]():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.001)

    def outcome(self) -> Outcome:
        try:
            code = self.process.wait(SECONDS)
            seconds = time.monotonic() - self.signalled
        finally:
            self.end()
        started = read_incarnation(self.directory) if self.directory.exists() else None
        saved = sorted(path for path in self.directory.glob("checkpoints/step_*") if path.suffix == "")
        for path in saved:
            verify(path)
        steps = tuple(int(path.name.removeprefix("step_")) for path in saved)
        return Outcome(code, self.text(), started.number if started else 0, self.last_step(), steps, seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_step(self) -> int:
        """Of the last start: one that follows a kill goes on from a checkpoint, which may be some steps older."""
        steps = re.findall(r"^step=(\d+)/", self.text().rpartition("; restarting from")[2], re.MULTILINE)
        return int(steps[-1]) if steps else 0


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


def run_uninterrupted(folder: Path) -> Path:
    """The directory of a run that nobody signalled."""
    run = Run(folder)
    found = run.outcome()
    assert found.code == 0 and found.saved[-1] == STEPS, found.said
    return run.directory


def follow(draw: Draw, folder: Path, uninterrupted: Path) -> tuple[str, float]:
    """Signal a run as drawn, look at what it left, and let it go on; returns the kind of end, and its time."""
    run = Run(folder, cold=draw.moment == "imports")
    try:
        run.signal_as(draw)
    finally:
        found = run.outcome()
    kind = kind_of_end(found, draw)
    if kind != "finished":
        after = Run(folder).outcome()
        assert after.code == 0 and after.saved[-1] == STEPS, after.said
        # What was saved last is where it goes on.
        assert ("resumed_from=" in after.said) == bool(found.saved), after.said
        assert not found.saved or f"resumed_from={found.saved[-1]}\n" in after.said, after.said
    assert tensors_of(run.directory) == tensors_of(uninterrupted), "not the numbers of the run that nobody signalled"
    return kind, found.seconds


def kind_of_end(found: Outcome, draw: Draw) -> str:
    """How the run ended; an AssertionError if it should not have ended so."""
    said, killed = found.said, draw.moment == "restart"
    assert "Traceback" not in said, said
    stopping = said.find(": stopping after")
    assert stopping < 0 or "restarting" not in said[stopping:], f"started again after a stop: {said}"
    assert found.starts <= 1 + said.count("restarting") and said.count("restarting") <= killed, said
    if found.code == 0:
        # The signals came too late, or met a rank that had been ended after its peer was killed.
        assert draw.moment in ("near the end", "step", "save") or killed, said
        assert found.saved[-1] == STEPS, said
        return "finished"
    assert found.code == INTERRUPTED, f"exit code {found.code}: {said}"
    if "stopped without another checkpoint" in said:
        assert draw.at_once or killed, f"unsaved: {said}"
        return "at once" if "ranks are ended at once" in said else "lost a rank"
    if "stopped before a step was done" in said:
        assert said.count("nothing to save") == 1 and (killed or not found.saved), said
        return "no step"
    if draw.at_once and "stopped at once" in said:
        return "at once"
    assert found.saved and found.saved[-1] == found.last_step < STEPS, f"unsaved: {said}"
    assert f"saved step={found.last_step} " in said and "reason=interrupted" in said, said
    return "saved"


def tensors_of(directory: Path) -> dict[str, bytes]:
    """Every number of the last checkpoint, optimizer and random state included."""
    last = directory / "checkpoints" / f"step_{STEPS:08}"
    return {path.name: path.read_bytes() for path in sorted(last.glob("rank_*.safetensors"))}


@dataclass
class Figures:
    """What a number of draws came to."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    moments: Counter[str] = field(default_factory=Counter)

    def as_json(self, seed: int) -> dict[str, Any]:
        ends = {
            kind: {"runs": len(all_), "median_s": round(statistics.median(all_), 2), "max_s": round(max(all_), 2)}
            for kind, all_ in sorted(self.seconds.items())
        }
        text = "\n".join(self.failures)
        return {
            "seed": seed,
            "draws": sum(self.moments.values()),
            "moments": dict(self.moments),
            "ends": ends,
            "unsaved": text.count("unsaved: "),
            "restarts_after_a_stop": text.count("started again after a stop"),
            "tracebacks": sum("Traceback" in one for one in self.failures),
            "other_exit_codes": text.count("exit code "),
            "failures": len(self.failures),
        }


def run_draws(chosen: list[tuple[int, Draw]], folder: Path) -> Figures:
    """Follow every draw, and go on after one that fails."""
    figures, uninterrupted = Figures(), run_uninterrupted(folder / "uninterrupted")
    for number, draw in chosen:
        place = folder / str(number)
        figures.moments[draw.moment] += 1
        try:
            kind, seconds = follow(draw, place, uninterrupted)
            figures.seconds.setdefault(kind, []).append(seconds)
        except Exception as error:
            kind = "FAILED"
            figures.failures.append(f"draw {number}: {draw}\n{error}")
            print(figures.failures[-1], flush=True)
        print(f"{number:3} {kind:11} {draw}", flush=True)
        if kind != "FAILED":
            shutil.rmtree(place)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Signal runs at drawn moments, and count how they end.")
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--piece", default="1/1", metavar="K/N", help="the K-th of N parts of the draws")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    args = parser.parse_args()
    piece, pieces = map(int, args.piece.split("/"))
    chosen = [(n, draw) for n, draw in enumerate(draws(args.draws, args.seed)) if n * pieces // args.draws == piece - 1]
    print(f"seed {args.seed}, {len(chosen)} of {args.draws} draws", flush=True)
    with tempfile.TemporaryDirectory(prefix="moefold-signals-") as folder:
        figures = run_draws(chosen, Path(folder))
    found = figures.as_json(args.seed)
    print(json.dumps(found, indent=1))
    if args.json is not None:
        before = json.loads(args.json.read_text())["pieces"] if args.json.exists() else []
        args.json.write_text(json.dumps({"pieces": [*before, found]}, indent=1) + "\n")
    if figures.failures:
        print(f"to repeat: python -m tests.signal_draws --draws {args.draws} --seed {args.seed} --piece {args.piece}")
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
