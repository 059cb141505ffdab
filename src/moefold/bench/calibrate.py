"""Measure this machine, and write down what the planner needs to know of it.

First one rank alone, then 2, 4, ... ranks at once, each with one thread as in training, all forked from here. What was
measured becomes a `Machine` by `fit_machine.py`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moefold.bench.clock import Say, silent
from moefold.bench.fit_machine import machine_of, sample_errors, wires_of
from moefold.bench.multi_rank import crowd_sizes, group_sizes, measure_crowds, measure_together
from moefold.bench.single_rank import measure_alone
from moefold.comm.spawn import spawn_ranks
from moefold.errors import ConfigError, Problem
from moefold.hardware.machine import Machine, Wire

ROUNDS = 15
# No measurement of one world takes this long.
_SECONDS = 300.0
_MOST_RANKS = 64


@dataclass(frozen=True)
class Calibration:
    """The table, and how far it is from the small runs that it was made of."""

    machine: Machine
    errors: dict[str, float]


def calibrate(world: int = 4, rounds: int = ROUNDS, say: Say = silent) -> Calibration:
    """``world``: the most ranks that will run here at once."""
    if not 1 <= world <= _MOST_RANKS:
        raise ConfigError(Problem("world", f"is {world}", f"use a number of ranks from 1 to {_MOST_RANKS}"))
    most = max(2, world)
    alone = spawn_ranks(lambda rank: measure_alone(rounds, say), 1, seconds=_SECONDS)[0]
    alone = {name: value * (1.0 if name == "reference" else alone["reference"]) for name, value in alone.items()}
    crowds = _mean(lambda rank: measure_crowds(rank, most, rounds, _first(say, rank)), most)
    wires: list[Wire] = []
    for ranks in crowd_sizes(most)[1:]:
        measured = _mean(partial(_together, ranks, rounds, say), ranks)
        # Measured against the reference of as many ranks at once.
        one = alone["reference"] * crowds[f"reference {ranks}"]
        taken = {name: value * one for name, value in measured.items()}
        wires += [wire for group in group_sizes(ranks) for wire in wires_of(taken, ranks, group)]
    machine = machine_of(_name(), os.cpu_count() or 1, _memory_gb(), alone, crowds, wires)
    return Calibration(machine, sample_errors(machine, alone))


def _mean(work: Callable[[int], dict[str, float]], world: int) -> dict[str, float]:
    """What forked ranks measured, averaged."""
    answers = spawn_ranks(work, world, seconds=_SECONDS)
    return {name: sum(answer[name] for answer in answers) / world for name in answers[0]}


def _together(world: int, rounds: int, say: Say, rank: int) -> dict[str, float]:
    return measure_together(rank, world, rounds, _first(say, rank))


def _first(say: Say, rank: int) -> Say:
    return say if rank == 0 else silent


def _name() -> str:
    """What the processor calls itself."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        # Not Linux: the name is for the reader only.
        pass
    return f"{os.cpu_count()} cores of {model}"


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
