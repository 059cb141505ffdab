"""Faults between two hosts: network namespaces with a launcher each, `moefold train --nnodes 2`, and a cable.

Every case trains, meets its fault after a few steps, and must end with the losses of a run that nothing disturbed, to
the last bit: two sides that had both written would not. Needs the right to make namespaces.

    python -m tests.host_faults --count 20 --seed 1 --json docs/measured/host_faults.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.two_hosts import HOSTS, two_hosts

STEPS, SAVE_EVERY, WATCHDOG, PATIENCE = 16, 2, 5.0, 60.0
NAMES = ("a", "b")


class Pair:
    """Two launchers of one run; those that were killed can be started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = [directory / f"host_{name}.log" for name in NAMES]
        self.launchers = [self.start(host) for host in range(2)]

    def start(self, host: int) -> subprocess.Popen[bytes]:
        words = (
            *("ip", "netns", "exec", HOSTS[host], sys.executable, "-m", "moefold.cli.main", "train", "debug_tiny"),
            *("--name", "two", "--nnodes", "2", "--node-rank", str(host), "--nproc", "2", "--patience", str(PATIENCE)),
            *("--master-addr", "10.99.0.1", "--parallel.ep", "4", "--train.steps", str(STEPS)),
            *("--train.saving.every", str(SAVE_EVERY), "--train.watchdog.seconds", str(WATCHDOG)),
            *("--train.directory", str(self.directory)),
        )
        with self.logs[host].open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def kill(self, host: int) -> None:
        """All of a host at once, as when its power fails."""
        os.killpg(self.launchers[host].pid, signal.SIGKILL)
        self.launchers[host].wait()

    def losses(self) -> dict[int, float]:
        path = self.directory / "two" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return {each["step"]: each["loss"] for each in records if "loss" in each and "lr" in each}

    def restarts(self) -> list[int]:
        return [log.read_text(errors="replace").count("restarting from") for log in self.logs]

    def wait(self, until: Callable[[], bool], seconds: float = 240.0) -> float:
        began = time.monotonic()
        while not until():
            if time.monotonic() - began > seconds:
                said = "\n".join(log.read_text(errors="replace")[-1500:] for log in self.logs)
                raise TimeoutError(f"not within {seconds:g} s:\n{said}")
            time.sleep(0.1)
        return time.monotonic() - began

    def end(self) -> None:
        for host, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                self.kill(host)


def _ip(host: int, *words: str) -> None:
    subprocess.run(("ip", "-n", HOSTS[host], *words), check=True, capture_output=True)


def _slow(rate: str) -> None:
    for name in HOSTS:
        limit = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        subprocess.run(("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "cable", *limit), check=True)


def _down(pair: Pair, host: int) -> None:
    _ip(host, "link", "set", "cable", "down")


def _up(pair: Pair, host: int) -> None:
    _ip(host, "link", "set", "cable", "up")


def _one_way(pair: Pair, host: int) -> None:
    _ip(host, "route", "add", "blackhole", f"10.99.0.{2 - host}/32")


def _both_ways(pair: Pair, host: int) -> None:
    _ip(host, "route", "del", "blackhole", f"10.99.0.{2 - host}/32")


def _kill(pair: Pair, host: int) -> None:
    pair.kill(host)


def _return(pair: Pair, host: int) -> None:
    pair.launchers[host] = pair.start(host)


# What breaks, and what mends it once both sides, or the one that is left, have noticed.
FAULTS: dict[str, tuple[Callable[[Pair, int], None], Callable[[Pair, int], None]]] = {
    "cable cut, healed": (_down, _up),
    "one way only, healed": (_one_way, _both_ways),
    "host killed, comes back": (_kill, _return),
}


@dataclass(frozen=True)
class Measured:
    """Seconds: until every side that lives has ended its ranks, and from there on, mended, to the next step."""

    fault: str
    host: int
    noticed: float
    next_step: float
    steps_redone: int
    same_losses: bool


def measure(fault: str, host: int, after: int, expected: dict[int, float]) -> Measured:
    with tempfile.TemporaryDirectory() as directory, two_hosts("100mbit"):
        pair = Pair(Path(directory))
        try:
            pair.wait(lambda: max(pair.losses(), default=0) >= after)
            began, mended = pair.restarts(), FAULTS[fault][1]
            FAULTS[fault][0](pair, host)
            alive = [side for side in range(2) if pair.launchers[side].poll() is None]
            noticed = pair.wait(lambda: all(pair.restarts()[side] > began[side] for side in alive))
            reached = max(pair.losses())
            size = len(_lines(pair))
            mended(pair, host)
            next_step = pair.wait(lambda: len(_lines(pair)) != size and _trains(pair, size))
            redone = max(0, reached + 1 - min(_steps(pair, size), default=reached + 1))
            pair.wait(lambda: all(launcher.poll() is not None for launcher in pair.launchers))
            ended = [launcher.returncode for launcher in pair.launchers]
            if ended != [0, 0]:
                raise RuntimeError(f"ended with {ended}: " + pair.logs[host].read_text()[-1500:])
            return Measured(fault, host, noticed, next_step, redone, pair.losses() == expected)
        finally:
            pair.end()


def _lines(pair: Pair) -> list[str]:
    path = pair.directory / "two" / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _steps(pair: Pair, size: int) -> list[int]:
    found = [json.loads(line) for line in _lines(pair)[size:] if line.endswith("}")]
    return [each["step"] for each in found if "loss" in each and "lr" in each]


def _trains(pair: Pair, size: int) -> bool:
    return bool(_steps(pair, min(size, len(_lines(pair)) - 1)))


def undisturbed() -> dict[int, float]:
    with tempfile.TemporaryDirectory() as directory, two_hosts("100mbit"):
        pair = Pair(Path(directory))
        try:
            pair.wait(lambda: all(launcher.poll() is not None for launcher in pair.launchers))
            found = pair.losses()
            if sorted(found) != list(range(1, STEPS + 1)):
                raise RuntimeError(pair.logs[0].read_text()[-1500:] + pair.logs[1].read_text()[-1500:])
            return found
        finally:
            pair.end()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write figures to this file")
    args = parser.parse_args(words)
    dice, names, expected, found = random.Random(args.seed), list(FAULTS), undisturbed(), list[Measured]()
    for number in range(args.count):
        one = measure(names[number % len(names)], dice.randrange(2), dice.randint(3, 8), expected)
        print(one, flush=True)
        found.append(one)
    figures = {
        "seed": args.seed,
        "faults": len(found),
        "recovered": sum(one.same_losses for one in found),
        "noticed_s": _spread([one.noticed for one in found]),
        "next_step_s": _spread([one.next_step for one in found]),
        "steps_redone": max(one.steps_redone for one in found),
        "each": [asdict(one) for one in found],
    }
    print(json.dumps({name: value for name, value in figures.items() if name != "each"}, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(figures["recovered"] != len(found))


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 1), "max": round(max(values), 1)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
