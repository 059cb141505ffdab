"""`moefold bench calibrate`: measure this machine for the planner.

First one rank alone, then 2, 4, ... ranks at once, each with one thread as in training, all forked from this process.
`fit_machine.py` turns the measurements into a `Machine`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moefold.bench.clock import Progress
from moefold.bench.fit_machine import machine_of, sample_errors, wires_of
from moefold.bench.multi_rank import crowd_sizes, group_sizes, measure_crowds, measure_together
from moefold.bench.single_rank import measure_alone
from moefold.comm.spawn import spawn_ranks
from moefold.errors import ConfigError, Problem
from moefold.hardware.machine import Machine, Wire
from moefold.tables import text_table
from moefold.units import format_bytes, format_seconds

ROUNDS = 15
# Time limit of the measurements of one world.
_SECONDS = 300.0
_MAX_RANKS = 64


@dataclass(frozen=True)
class Calibration:
    """The machine's table, and its relative error on the small runs that it was fitted to."""

    machine: Machine
    errors: dict[str, float]


def calibrate(world: int = 4, rounds: int = ROUNDS, progress: Progress | None = None) -> Calibration:
    """``world``: the largest number of ranks that will run here at once."""
    if not 1 <= world <= _MAX_RANKS:
        raise ConfigError(Problem("world", f"is {world}", f"use a number of ranks from 1 to {_MAX_RANKS}"))
    largest = max(2, world)
    alone = spawn_ranks(lambda rank: measure_alone(rounds, progress), 1, seconds=_SECONDS)[0]
    alone = {name: value * (1.0 if name == "reference" else alone["reference"]) for name, value in alone.items()}
    crowds = _mean(lambda rank: measure_crowds(rank, largest, rounds, _on_rank_0(progress, rank)), largest)
    wires: list[Wire] = []
    for ranks in crowd_sizes(largest)[1:]:
        measured = _mean(partial(_together, ranks, rounds, progress), ranks)
        # In units of the reference with as many ranks at once.
        unit = alone["reference"] * crowds[f"reference {ranks}"]
        in_seconds = {name: value * unit for name, value in measured.items()}
        wires += [wire for group in group_sizes(ranks) for wire in wires_of(in_seconds, ranks, group)]
    machine = machine_of(_name(), os.cpu_count() or 1, _memory_gb(), alone, crowds, wires)
    return Calibration(machine, sample_errors(machine, alone))


def _mean(work: Callable[[int], dict[str, float]], world: int) -> dict[str, float]:
    """Mean over the ranks of what each measured."""
    results = spawn_ranks(work, world, seconds=_SECONDS)
    return {name: sum(result[name] for result in results) / world for name in results[0]}


def _together(world: int, rounds: int, progress: Progress | None, rank: int) -> dict[str, float]:
    return measure_together(rank, world, rounds, _on_rank_0(progress, rank))


def _on_rank_0(progress: Progress | None, rank: int) -> Progress | None:
    return progress if rank == 0 else None


def _name() -> str:
    """Number of cores and model name of the processor."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        # Not Linux. The name is only printed.
        pass
    return f"{os.cpu_count()} cores of {model}"


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


# ---- report ----


def calibration_report(calibration: Calibration) -> str:
    machine = calibration.machine
    speeds = [
        ("matmuls", f"{machine.gemm_gflops:.0f} GFLOP/s", f"and {machine.gemm_gb_s:.1f} GB/s to fetch operands"),
        ("experts' matmuls", f"{100 * machine.grouped:.0f} %", "of one matmul's FLOP/s"),
        ("attention forward", f"{machine.attention_forward_gflops:.0f} GFLOP/s", ""),
        ("attention backward", f"{machine.attention_backward_gflops:.0f} GFLOP/s", ""),
        ("memory traffic", f"{machine.traffic_gb_s:.1f} GB/s", "of bytes read and written"),
        ("one operation", f"{machine.operation_us:.0f} us", "in addition to its bytes"),
        ("one expert", f"{machine.expert_us:.0f} us", "per iteration of a loop over experts"),
        ("optimizer", f"{machine.update_ns:.1f} ns", "per parameter"),
    ]
    crowds = [
        (str(crowd.ranks), f"{crowd.slowdown:.2f}", f"{crowd.reference_us / 1e3:.2f} ms") for crowd in machine.crowds
    ]
    wires = [
        (
            wire.operation,
            f"{wire.group} of {wire.world}",
            f"{format_bytes(wire.received[0])}: {format_seconds(wire.us[0] * 1e-6)}",
            f"{format_bytes(wire.received[-1])}: {format_seconds(wire.us[-1] * 1e-6)}",
        )
        for wire in machine.wires
    ]
    errors = [(name, f"{100 * error:+.0f} %") for name, error in calibration.errors.items()]
    return "\n\n".join(
        (
            machine.name,
            text_table(("one rank", "speed", ""), speeds),
            text_table(("ranks at once", "slowdown", "reference"), crowds),
            text_table(("messages", "ranks", "small", "large"), wires),
            text_table(("small runs", "error of the table"), errors),
        )
    )
