"""Faults between two hosts: network namespaces with a launcher each, `moefold train --nnodes 2`, and a cable.

Every case trains, meets its fault after a few steps, and must end with the losses of a run that nothing disturbed, to
the last bit: two sides that had both written would not. A fault that stops the run is mended once every side that lives
has ended its ranks; a link that is only slow or loses packets, once the run has made two steps over it or started
again. A fault that is never mended leaves a host that goes on alone, in another layout, so that losses agree within
float32 rounding. Needs the right to make namespaces.

    python -m tests.host_faults --count 20 --seed 1 --json docs/measured/host_faults.json
    python -m tests.host_faults --write       # the table of docs/reliability.md, from that file
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.lossy_link import LossyLink
from tests.two_hosts import HOSTS, two_hosts, two_lossy_hosts

STEPS, SAVE_EVERY, WATCHDOG, PATIENCE = 24, 2, 5.0, 60.0
# Until a host goes on alone, where the other stays away; relative differences of its losses.
HOST_PATIENCE, ROUNDING = 8.0, 1e-6
RATE, SLOW_RATE, LOSS, DELAY_SECONDS = "100mbit", "1mbit", 0.05, 0.02
NAMES = ("a", "b")
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- host faults: python -m tests.host_faults --write -->", "<!-- end of the host faults -->"


class Pair:
    """Two launchers of one run; those that were killed can be started again."""

    def __init__(self, directory: Path, link: LossyLink | None = None, host_patience: float = 0.0) -> None:
        self.directory, self.link, self.host_patience = directory, link, host_patience
        self.logs = [directory / f"host_{name}.log" for name in NAMES]
        self.launchers = [self.start(host) for host in range(2)]

    def start(self, host: int) -> subprocess.Popen[bytes]:
        words = (
            *("ip", "netns", "exec", HOSTS[host], sys.executable, "-m", "moefold.cli.main", "train", "debug_tiny"),
            *("--name", "two", "--nnodes", "2", "--node-rank", str(host), "--nproc", "2", "--patience", str(PATIENCE)),
            *("--master-addr", "10.99.0.1,10.99.0.2", "--host-patience", str(self.host_patience)),
            *("--parallel.ep", "4", "--train.steps", str(STEPS)),
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


def _limit(rate: str) -> None:
    for name in HOSTS:
        words = ("tc", "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate, "burst", "32kb")
        subprocess.run(("ip", "netns", "exec", name, *words, "latency", "400ms"), check=True, capture_output=True)


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


def _vanish(pair: Pair, host: int) -> None:
    """The cable first, so that no end of a connection reaches the other host: its connections stay half-open."""
    _down(pair, host)
    _kill(pair, host)


def _reappear(pair: Pair, host: int) -> None:
    _up(pair, host)
    _return(pair, host)


def _stay(pair: Pair, host: int) -> None:
    """Nothing mends it."""


def _slow_link(pair: Pair, host: int) -> None:
    _limit(SLOW_RATE)


def _fast_link(pair: Pair, host: int) -> None:
    _limit(RATE)


def _lose(pair: Pair, host: int) -> None:
    assert pair.link is not None
    pair.link.loss, pair.link.delay = LOSS, DELAY_SECONDS


def _lose_nothing(pair: Pair, host: int) -> None:
    assert pair.link is not None
    pair.link.loss = pair.link.delay = 0.0


@dataclass(frozen=True)
class Fault:
    """What breaks and what mends it; ``hosts`` are those where it may happen, host 0 serves the store."""

    breaks: Callable[[Pair, int], None]
    mends: Callable[[Pair, int], None]
    hosts: tuple[int, ...] = (0, 1)
    # Whether the run cannot go on until it is mended.
    stops: bool = True
    # Over a link in user space.
    lossy: bool = False

    @property
    def heals(self) -> bool:
        return self.mends is not _stay


FAULTS = {
    "cable cut, healed": Fault(_down, _up),
    "one way only, healed": Fault(_one_way, _both_ways),
    "half-open connection, host comes back": Fault(_vanish, _reappear),
    "host killed, comes back": Fault(_kill, _return, hosts=(1,)),
    "host of the store killed, comes back": Fault(_kill, _return, hosts=(0,)),
    "host killed for good": Fault(_kill, _stay, hosts=(1,)),
    "host of the store killed for good": Fault(_kill, _stay, hosts=(0,)),
    "cable cut for good": Fault(_down, _stay),
    "link of 1 Mbit/s, healed": Fault(_slow_link, _fast_link, stops=False),
    "5 % loss and 20 ms delay, healed": Fault(_lose, _lose_nothing, stops=False, lossy=True),
}


@dataclass(frozen=True)
class Measured:
    """Seconds: until every side that lives has ended its ranks, and from there on, mended, to the next step.

    Of a fault that does not stop the run: None, and the time of its next step over the bad link.
    """

    fault: str
    host: int
    noticed: float | None
    next_step: float
    steps_redone: int
    restarts: int
    same_losses: bool


def measure(name: str, host: int, after: int, expected: dict[int, float]) -> Measured:
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as directory, _hosts(fault) as link:
        pair = Pair(Path(directory), link, 0.0 if fault.heals else HOST_PATIENCE)
        try:
            pair.wait(lambda: max(pair.losses(), default=0) >= after)
            began, noticed = pair.restarts(), None
            fault.breaks(pair, host)
            if fault.stops:
                alive = [side for side in range(2) if pair.launchers[side].poll() is None]
                noticed = pair.wait(lambda: all(pair.restarts()[side] > began[side] for side in alive))
                reached, size = max(pair.losses()), len(_lines(pair))
                fault.mends(pair, host)
                next_step = pair.wait(lambda: len(_lines(pair)) != size and _trains(pair, size))
                redone = max(0, reached + 1 - min(_steps(pair, size), default=reached + 1))
            else:
                reached = max(pair.losses())
                next_step = pair.wait(lambda: max(pair.losses()) > reached or pair.restarts() != began)
                pair.wait(lambda: max(pair.losses()) > reached + 1 or pair.restarts() != began)
                fault.mends(pair, host)
                redone = 0
            pair.wait(lambda: all(launcher.poll() is not None for launcher in pair.launchers))
            ended = [launcher.returncode for launcher in pair.launchers]
            if ended != [0, 0] if fault.heals else 0 not in ended:
                raise RuntimeError(f"ended with {ended}: " + pair.logs[host].read_text()[-1500:])
            restarts = max(now - before for now, before in zip(pair.restarts(), began, strict=True))
            same = pair.losses() == expected if fault.heals else _agree(pair.losses(), expected)
            return Measured(name, host, noticed, next_step, redone, restarts, same)
        finally:
            pair.end()


def _agree(losses: Mapping[int, float], expected: Mapping[int, float]) -> bool:
    return losses.keys() == expected.keys() and all(
        math.isclose(loss, expected[step], rel_tol=ROUNDING) for step, loss in losses.items()
    )


@contextmanager
def _hosts(fault: Fault) -> Iterator[LossyLink | None]:
    if fault.lossy:
        with two_lossy_hosts() as link:
            yield link
    else:
        with two_hosts(RATE):
            yield None


def _lines(pair: Pair) -> list[str]:
    path = pair.directory / "two" / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _steps(pair: Pair, size: int) -> list[int]:
    found = [json.loads(line) for line in _lines(pair)[size:] if line.endswith("}")]
    return [each["step"] for each in found if "loss" in each and "lr" in each]


def _trains(pair: Pair, size: int) -> bool:
    return bool(_steps(pair, min(size, len(_lines(pair)) - 1)))


def undisturbed() -> dict[int, float]:
    with tempfile.TemporaryDirectory() as directory, two_hosts(RATE):
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
    parser.add_argument("--only", metavar="WORDS", default="", help="faults whose names have these words")
    parser.add_argument("--write", action="store_true", help="write the table of the docs, and run nothing")
    args = parser.parse_args(words)
    if args.write:
        page, found_before = DOCS / "reliability.md", json.loads((DOCS / "measured/host_faults.json").read_text())
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n{table(found_before)}\n\n{END}{rest.partition(END)[2]}")
        return 0
    dice, names = random.Random(args.seed), [name for name in FAULTS if args.only in name]
    expected, found = undisturbed(), list[Measured]()
    failed: list[dict[str, object]] = []
    for number in range(args.count):
        name = names[number % len(names)]
        host, after = dice.choice(FAULTS[name].hosts), dice.randint(3, 8)
        try:
            found.append(measure(name, host, after, expected))
            print(found[-1], flush=True)
        except (TimeoutError, RuntimeError) as error:
            print(f"{name} at host {NAMES[host]} after step {after}: {error}", flush=True)
            failed.append({"fault": name, "host": host, "after": after})
        figures = _figures(args.seed, found, failed)
        if args.json is not None:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({name: value for name, value in figures.items() if name != "each"}, indent=1))
    return int(figures["recovered"] != args.count)


def _figures(seed: int, found: list[Measured], failed: list[dict[str, object]]) -> dict[str, object]:
    stopped = [one for one in found if one.noticed is not None]
    return {
        "seed": seed,
        "faults": len(found) + len(failed),
        "recovered": sum(one.same_losses for one in found),
        "load": round(os.getloadavg()[2], 1),
        "noticed_s": _spread([one.noticed for one in stopped if one.noticed is not None]),
        "next_step_s": _spread([one.next_step for one in stopped]),
        "steps_redone": max((one.steps_redone for one in found), default=0),
        "failed": failed,
        "each": [asdict(one) for one in found],
    }


def table(found: Mapping[str, Any]) -> str:
    """What was run, one row per fault, and those that did not recover."""
    lines = [
        f"Seed {found['seed']}: {found['recovered']} of {found['faults']} recovered, on two cores at a mean load of "
        f"{found['load']} (15 minutes).",
        "",
        "| fault | at host | noticed, s | next step, s | steps redone | restarts | same losses |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for one in found["each"]:
        noticed = "-" if one["noticed"] is None else f"{one['noticed']:.1f}"
        counts = f"{one['next_step']:.1f} | {one['steps_redone']} | {one['restarts']}"
        exact = FAULTS[one["fault"]].heals
        same = ("bit for bit" if exact else "within 1e-6") if one["same_losses"] else "NO"
        lines.append(f"| {one['fault']} | {NAMES[one['host']]} | {noticed} | {counts} | {same} |")
    lines += [f"| {one['fault']} | {NAMES[one['host']]} | | | | | did not recover |" for one in found["failed"]]
    return "\n".join(lines)


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 1), "max": round(max(values), 1)} if values else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
