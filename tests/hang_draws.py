"""Make ranks of a real run hang in drawn ways, and measure how the watchdog deals with it.

A hang is planned as (kind, rank, occurrence). Every start of the run trains a few steps, so that the watchdog has
something to learn from, and then one rank does what its kind says. Which hang is due is the number of those that have
happened, counted in files, so every start knows it without being told.

For a dead network interface, the start that meets it and the one after it run on two hosts that are network namespaces:
ranks 0 and 1 on one, 2 and 3 on the other. The culprits are both ranks behind the interface. The kind is left out where
namespaces cannot be made.

`python -m tests.hang_draws --count 100 --out hangs.json` draws a hundred and writes what was measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from tests.two_hosts import move_to, possible, two_hosts
from torch import Tensor

import moefold.comm.collectives
import moefold.pipeline.step
import moefold.train.train_loop
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.train import SavingConfig, WatchdogConfig
from moefold.errors import RankError
from moefold.recipes.catalog import RECIPES
from moefold.train.callback import Callback, Control, StepRecord
from moefold.train.fault_tolerance.supervise import supervise
from moefold.train.fault_tolerance.warm_up import warm_up
from moefold.train.fault_tolerance.watchdog import Watchdog
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train

SAVE_EVERY = 2
DEAD_NIC, RANKS_PER_HOST = "dead NIC", 2
# A start resumes at a saved step, trains two steps that are learned from, and hangs in the third or fourth.
STEPS_PER_HANG = 4
LAYOUTS = {
    "ep": ParallelConfig(ep=4),
    "tp": ParallelConfig(tp=2, ep=2),
    "pp": ParallelConfig(pp=2, ep=2),
    "flat": ParallelConfig(ep=2, sharding="flat"),
}


@dataclass(frozen=True)
class Hang:
    kind: str
    rank: int
    # In which step after the start, and at which call of the function that hangs within it.
    step: int
    occurrence: int

    @property
    def culprits(self) -> tuple[int, ...]:
        first = self.rank // RANKS_PER_HOST * RANKS_PER_HOST
        return tuple(range(first, first + RANKS_PER_HOST)) if self.kind == DEAD_NIC else (self.rank,)


@dataclass(frozen=True)
class Measured:
    """``noticed`` and ``next_step`` are seconds: from the hang to the error, and from there to the end of a step."""

    hang: Hang
    noticed: float
    bound: float
    next_step: float
    kind: str
    culprits: tuple[int, ...]
    said: str

    @property
    def named(self) -> bool:
        return self.culprits == self.hang.culprits


def _forever() -> NoReturn:
    while True:
        time.sleep(3600)


def _stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_the_gil() -> NoReturn:
    # PyDLL keeps the GIL during the call, so no thread of this rank runs any Python. A signal ends a sleep.
    while True:
        ctypes.PyDLL(None).sleep(3600)


def _lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _cut_the_cable() -> None:
    subprocess.run(("ip", "link", "set", "cable", "down"), check=True)


def _loop_forever() -> NoReturn:
    while True:
        pass


class Trigger:
    """Counts calls of one function within the chosen step; ``due`` is true once, at the chosen one."""

    def __init__(self, hang: Hang, marker: Path) -> None:
        self.hang, self.marker, self.calls, self.armed = hang, marker, 0, False

    def due(self) -> bool:
        if not self.armed:
            return False
        self.calls += 1
        if self.calls != self.hang.occurrence:
            return False
        self.marker.write_text(repr(time.monotonic()))
        return True


def _replace(owner: Any, name: str, instead: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, instead(getattr(owner, name)))


def _at_call(owner: Any, name: str, do: Callable[[], None]) -> Callable[[Trigger], None]:
    def arm(trigger: Trigger) -> None:
        def instead(original: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **words: Any) -> Any:
                if trigger.due():
                    do()
                return original(*args, **words)

            return called

        _replace(owner, name, instead)

    return arm


def _in_all_reduce(do: Callable[[Callable[..., Tensor], Tensor, Any], Tensor]) -> Callable[[Trigger], None]:
    def arm(trigger: Trigger) -> None:
        def instead(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def called(x: Tensor, group: Any, *rest: Any) -> Tensor:
                return do(original, x, group) if trigger.due() else original(x, group, *rest)

            return called

        _replace(moefold.comm.collectives, "_all_reduce", instead)

    return arm


def _left_out(original: Callable[..., Tensor], x: Tensor, group: Any) -> Tensor:
    return x.clone()


def _doubled(original: Callable[..., Tensor], x: Tensor, group: Any) -> Tensor:
    flat = x.reshape(-1)
    return original(torch.cat([flat, flat]), group)[: flat.numel()].view_as(x)


# How to arm each kind, and how many occurrences there are in every step of every layout.
KINDS: dict[str, tuple[Callable[[Trigger], None], int]] = {
    "SIGSTOP": (_at_call(moefold.comm.collectives, "_all_reduce", _stop_itself), 4),
    "left-out collective": (_in_all_reduce(_left_out), 4),
    "mismatched shape": (_in_all_reduce(_doubled), 4),
    "sleeping data loader": (_at_call(moefold.train.train_loop, "read_step", _forever), 1),
    "deadlocked thread": (_at_call(moefold.pipeline.step, "finish_gradients", _lock_twice), 1),
    "GIL held": (_at_call(moefold.comm.collectives, "_all_reduce", _hold_the_gil), 4),
    "endless loop": (_at_call(moefold.pipeline.step, "clip_gradients", _loop_forever), 1),
    DEAD_NIC: (_at_call(moefold.comm.collectives, "_all_reduce", _cut_the_cable), 4),
}


def draw(count: int, world: int, seed: int, kinds: Sequence[str]) -> list[Hang]:
    """Kinds in turn, everything else by chance."""
    dice = random.Random(seed)
    return [
        Hang(kind, dice.randrange(world), dice.randint(3, STEPS_PER_HANG), dice.randint(1, KINDS[kind][1]))
        for kind in (kinds[number % len(kinds)] for number in range(count))
    ]


class Stopwatch(Callback):
    """Arms the trigger in the step that was drawn, and notes when steps end."""

    def __init__(self, path: Path, trigger: Trigger | None, first: int) -> None:
        self.path, self.trigger, self.first = path, trigger, first

    def before_step(self, step: int, control: Control) -> None:
        if self.trigger is not None:
            self.trigger.armed = step == self.first + self.trigger.hang.step

    def after_step(self, record: StepRecord, control: Control) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([time.monotonic(), record.step, record.loss.hex()]) + "\n")


def small_run(directory: Path, layout: str, steps: int, seconds: float) -> RunConfig:
    base = RECIPES["debug_mla"]()
    saving = SavingConfig(every=SAVE_EVERY, keep=2, background=False)
    settings = replace(base.train, steps=steps, directory=str(directory), saving=saving)
    settings = replace(settings, watchdog=WatchdogConfig(seconds=seconds))
    # Nothing is read ahead: a loader that sleeps does so in the step that was drawn.
    data = replace(base.data, seq_len=16, global_batch=8, micro_batch=1, validation=None, prefetch=0)
    return replace(base, parallel=LAYOUTS[layout], data=data, train=settings)


def run_with_hangs(
    run: RunConfig, world: int, hangs: list[Hang], report: Callable[[Measured], None] | None = None
) -> tuple[list[Measured], dict[int, str]]:
    """What was measured of each hang, and the loss of every step at the end, to the last bit."""
    directory = run_directory(run)
    happened, steps = directory / "happened", directory / "steps.jsonl"
    happened.mkdir(parents=True)
    noticed: list[tuple[float, float, Watchdog, Any, str]] = []
    watchdog = Watchdog(world, run.train.watchdog, 60.0, directory)

    def work(rank: int) -> int:
        number, trigger = len(list(happened.iterdir())), None
        if number < len(hangs) and hangs[number].rank == rank:
            trigger = Trigger(hangs[number], happened / str(number))
            KINDS[hangs[number].kind][0](trigger)
        heartbeat = watchdog.enter(rank)
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 60.0, None, heartbeat)
        return train(context, state, [Stopwatch(steps, trigger, state.step)])

    def interface(rank: int) -> str:
        number = len(list(happened.iterdir()))
        if all(hang.kind != DEAD_NIC for hang in hangs[max(0, number - 1) : number + 1]):
            return "lo"
        name = move_to(rank // RANKS_PER_HOST)
        subprocess.run(("ip", "link", "set", name, "up"), check=True)
        return name

    def spawn(*args: Any, **words: Any) -> list[int]:
        try:
            return watchdog.spawn(*args, **words, interface=interface)
        except RankError as error:
            slowest = max(max(heartbeat.pulse().recent_steps) for heartbeat in watchdog.heartbeats)
            bound = max(run.train.watchdog.seconds, run.train.watchdog.steps * slowest)
            noticed.append((time.monotonic(), bound, watchdog, watchdog.verdict, str(error).splitlines()[0]))
            raise

    # As `Trainer` does before it starts ranks.
    warm_up(run, world)
    cable = two_hosts("1gbit") if any(hang.kind == DEAD_NIC for hang in hangs) else nullcontext()
    with closing(watchdog), cable:
        code = supervise(work, world, directory / "checkpoints", 60.0, max_fruitless=len(hangs) + 1, spawn=spawn)
    assert code == 0 and len(noticed) == len(hangs) == len(list(happened.iterdir())), noticed
    ended = [json.loads(line) for line in steps.read_text().splitlines()]
    measured = []
    for number, (hang, (at, bound, _, verdict, said)) in enumerate(zip(hangs, noticed, strict=True)):
        began = float((happened / str(number)).read_text())
        after = min(when for when, _, _ in ended if when > at) - at
        kind, culprits = ("", ()) if verdict is None else (verdict.kind, verdict.culprits)
        measured.append(Measured(hang, at - began, bound, after, kind, culprits, said))
        if report is not None:
            report(measured[-1])
    return measured, {step: loss for _, step, loss in ended}


def summary(measured: list[Measured]) -> dict[str, object]:
    return {
        "hangs": len(measured),
        "kinds": sorted({one.hang.kind for one in measured}),
        "noticed_in_bound": sum(one.noticed <= one.bound for one in measured),
        "noticed_in_1.5_bounds": sum(one.noticed <= 1.5 * one.bound for one in measured),
        "culprit_named": sum(one.named for one in measured),
        "restarted": len(measured),
        "noticed_s": _spread([one.noticed for one in measured]),
        "next_step_s": _spread([one.next_step for one in measured]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {name: round(of(values), 2) for name, of in (("median", statistics.median), ("max", max))}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0, help="`train.watchdog.seconds`")
    parser.add_argument("--out", type=Path, default=None, help="write figures as JSON")
    parser.add_argument("--add", action="store_true", help="keep the draws of other seeds that the file has")
    args = parser.parse_args(words)
    measured: list[Measured] = []
    kinds = [kind for kind in KINDS if kind != DEAD_NIC or possible()]
    hangs, names = draw(args.count, 4, args.seed, kinds), list(LAYOUTS)
    for number, layout in enumerate(names):
        part = hangs[number :: len(names)]
        with tempfile.TemporaryDirectory() as directory:
            run = small_run(Path(directory), layout, STEPS_PER_HANG * (len(part) + 1), args.seconds)
            measured += run_with_hangs(run, 4, part, _tell)[0] if part else []
    figures = summary(measured) | {"seconds": args.seconds, "seed": args.seed, "world": 4, "load": os.getloadavg()[2]}
    print(json.dumps(figures, indent=1))
    if args.out is not None:
        old = json.loads(args.out.read_text())["draws"] if args.add and args.out.exists() else []
        new = figures | {"each": [_plain(one) for one in measured]}
        draws = [*(each for each in old if each["seed"] != args.seed), new]
        args.out.write_text(json.dumps({"draws": draws}, indent=1) + "\n")
    return int(figures["culprit_named"] != len(measured))


def _plain(one: Measured) -> dict[str, object]:
    """Without the message, which has paths in it."""
    seconds = {name: round(getattr(one, name), 2) for name in ("noticed", "bound", "next_step")}
    return asdict(one.hang) | seconds | {"evidence": one.kind, "named": one.named}


def _tell(one: Measured) -> None:
    verdict = "right" if one.named else f"WRONG {one.culprits}"
    print(f"{one.hang} noticed={one.noticed:.2f}/{one.bound:.2f} next={one.next_step:.2f} {verdict}: {one.said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
