"""`moefold bench calibrate`: measure this machine for the planner, and fit its table to the measured seconds.

First one rank alone, then 2, 4, ... ranks at once, each with one thread as in training, all forked from this process.

The FLOPs and bytes of each measurement are counted by the planner's own formulas, so that the fitted speeds match them.
Each fit has one or two unknowns and minimises relative errors.

    matmuls      FLOPs and fetched bytes -> seconds per FLOP, seconds per byte
    experts      the same counts times a slowdown, and a fixed time per expert
    small runs   the rest after matmuls and attention: memory traffic and a fixed time per operation
    messages     the rest after the work between them
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from moefold.bench.clock import Progress
from moefold.bench.multi_rank import crowd_sizes, group_sizes, measure_crowds, measure_together
from moefold.bench.single_rank import (
    ATTENTION,
    CONTEXT,
    DENSE,
    DOCUMENTS,
    EXPERTS,
    MESSAGES,
    PARAMETERS,
    REPETITIONS,
    ROUTED,
    RUNS,
    TOKENS,
    measure_alone,
)
from moefold.blueprint.model_shape import Attention, Dense, Layer, MoE
from moefold.blueprint.param_counts import count_parameters
from moefold.comm.spawn import spawn_ranks
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.hardware.cluster import cluster_of_machine
from moefold.hardware.machine import Crowd, Machine, Operation, Wire
from moefold.plan.op_costs import Part, parts_of
from moefold.plan.op_sizes import Sizes, sizes_of
from moefold.plan.stage_contents import stages_of_shape
from moefold.plan.timing.constants import CURRENT
from moefold.plan.timing.step_time import stage_passes
from moefold.plan.timing.throughput import Rates, rates_of
from moefold.plan.workload import Workload, workload_of_run
from moefold.tables import text_table
from moefold.units import format_bytes, format_seconds

Times = Mapping[str, float]
# Seconds per FLOP or byte that are smaller are measurement noise.
_LEAST = 1e-15
# Shortest time of a message, whatever remains after subtracting the work.
_SHORTEST = 2e-5


def smallest_errors(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative seconds per unit of one or two kinds of work, by least squares of relative errors."""
    A, t = np.array(columns).T, np.array(seconds)
    found, *_ = np.linalg.lstsq(A / t[:, None], np.ones(len(t)), rcond=None)
    if (found >= 0).all():
        return [float(rate) for rate in found]
    # One coefficient is negative: fit each kind alone and keep the better one.
    best: list[float] = []
    least = np.inf
    for kept in range(A.shape[1]):
        column = A[:, kept] / t
        rate = max(0.0, float(column.sum() / (column**2).sum()))
        error = float(((column * rate - 1) ** 2).sum())
        if error < least:
            least, best = error, [rate if index == kept else 0.0 for index in range(A.shape[1])]
    return best


# ---- matmuls and attention ----


def _sizes(dim: int, tokens: int, length: int, balance: float) -> Sizes:
    """Of one rank in float32, as `sizes_of` makes them for a machine."""
    return Sizes(
        dim=dim, seq_len=length, tokens=float(tokens), tp=1, ep=1, etp=1, imbalance=1.0, narrow=False,
        operand_bytes=4.0, gradient_bytes=4.0, fused=False, exact=True,
        biases_apart=False, fused_experts=False, flash=True, balance=balance, word=4.0, tile=1, sharpness=1.0,
    )  # fmt: skip


def _counts(layer: Layer, name: str, dim: int, tokens: int) -> list[tuple[str, float, float, float]]:
    """(direction, FLOPs, bytes, loops) of a part's matmuls, as the planner counts them."""

    def part(balance: float) -> Part:
        return next(part for part in parts_of(layer, _sizes(dim, tokens, tokens, balance)) if part.name == name)

    found = []
    for direction in ("forward", "backward"):
        without, fetched = getattr(part(0.0), direction), getattr(part(1.0), direction)
        flops = without.gemm_flops + without.grouped_flops
        found.append((direction, flops, fetched.gemm_flops + fetched.grouped_flops - flops, without.loops))
    return found


def matmul_costs(times: Times) -> tuple[float, float]:
    """Seconds per FLOP and per byte."""
    flops, fetched, taken = [], [], []
    for number, shape in enumerate(DENSE):
        for direction, count, moved, _ in _counts(
            Layer(None, Dense(shape.hidden)), "feed_forward", shape.dim, shape.tokens
        ):
            flops.append(count)
            fetched.append(moved)
            taken.append(times[f"dense {number} {direction}"])
    a, b = smallest_errors((flops, fetched), taken)
    return max(a, _LEAST), max(b, _LEAST)


def expert_costs(times: Times, per_flop: float, per_byte: float) -> tuple[float, float]:
    """Slowdown of the experts' matmuls, and seconds per expert and matmul."""
    alike, loops, taken = [], [], []
    for number, shape in enumerate(EXPERTS):
        layer = Layer(None, MoE(shape.experts, 1, shape.hidden))
        for direction, count, moved, looped in _counts(layer, "experts", shape.dim, shape.rows):
            alike.append(count * per_flop + moved * per_byte)
            loops.append(looped)
            taken.append(times[f"experts {number} {direction}"])
    factor, each = smallest_errors((alike, loops), taken)
    return max(factor, _LEAST), each


def attention_cost(times: Times, direction: str) -> float:
    """Seconds per FLOP."""
    flops, taken = [], []
    for number, shape in enumerate(ATTENTION):
        layer = Layer(Attention(shape.heads, shape.kv_heads, shape.dim, shape.dim), None)
        parts = parts_of(layer, _sizes(shape.heads * shape.dim, shape.tokens, shape.length, 0.0))
        core = next(part for part in parts if part.name == "core_attention")
        flops.append(getattr(core, direction).attention_flops)
        taken.append(times[f"attention {number} {direction}"])
    return max(smallest_errors((flops,), taken)[0], _LEAST)


# ---- small runs ----


def _passes_seconds(workload: Workload, rates: Rates) -> float:
    """One microbatch, forward and backward, at these rates."""
    stages = stages_of_shape(workload.model, 1, None)
    return sum(passes.total for passes in stage_passes(workload, stages, sizes_of(workload), rates, CURRENT))


def traffic_costs(times: Times, draft: Machine) -> tuple[float, float]:
    """Seconds per byte of traffic and per operation, from the time of small runs beyond matmuls and attention."""
    cluster = cluster_of_machine(draft, 1)
    moved, operations, left = [], [], []
    whole = []
    for name, run in RUNS.items():
        workload = workload_of_run(run, cluster)
        rates = replace(rates_of(workload, CURRENT, float(run.data.seq_len)), traffic=0.0, gap=0.0)
        nothing = Rates(**dict.fromkeys(Rates.__slots__, 0.0))
        known = _passes_seconds(workload, rates)
        whole.append(times[f"run {name}"])
        left.append(times[f"run {name}"] - known)
        moved.append(_passes_seconds(workload, replace(nothing, traffic=1.0)))
        operations.append(_passes_seconds(workload, replace(nothing, gap=1.0)))
    # Errors are relative to the time of the whole run.
    scale = np.array(whole)
    A = np.array((moved, operations)).T / scale[:, None]
    found, *_ = np.linalg.lstsq(A, np.array(left) / scale, rcond=None)
    traffic, gap = (max(0.0, float(each)) for each in found)
    return max(traffic, _LEAST), gap


def optimizer_cost(times: Times) -> float:
    """Seconds per parameter."""
    counts = [count_parameters(run.model).total for run in RUNS.values()]
    return smallest_errors((counts,), [times[f"update {name}"] for name in RUNS])[0]


# ---- several ranks ----


def wires_of(times: Times, world: int, group: int) -> list[Wire]:
    """Time of every operation in groups of ``group`` of ``world`` ranks."""

    def taken(name: str) -> Callable[[int], float]:
        """Without the work before each message."""
        return lambda total: max(0.0, times[f"{name} {group} {total}"] - times[f"work {group}"]) / REPETITIONS

    def wire(operation: Operation, seconds: Callable[[int], float], received: Mapping[int, float]) -> Wire:
        """``received``: bytes that a rank receives, by message. Times are made monotonic in bytes."""
        us = accumulate((max(seconds(each), _SHORTEST) * 1e6 for each in received), max)
        return Wire(operation, world, group, tuple(received.values()), tuple(us))

    received_fraction = 1 - 1 / group
    gather, passes, both = taken("parameters"), taken("passes"), taken("tokens")
    rows = {total: received_fraction * total for total in MESSAGES}
    parameters = {total: received_fraction * total for total in PARAMETERS}
    # Keys and values in float32.
    keys = {
        number: 8.0 * number * CONTEXT.length * CONTEXT.kv_heads * CONTEXT.dim * (group - 1) for number in DOCUMENTS
    }
    sent = {number: 4.0 * number * ROUTED.top_k * ROUTED.dim * received_fraction for number in TOKENS}

    def beyond(name: str) -> Callable[[int], float]:
        """Time beyond that of the same part on one rank."""
        distributed, single = taken(name), taken(f"one {name}")
        return lambda number: distributed(number) - single(number)

    return [
        wire("tokens", lambda total: both(total) / 2, rows),
        wire("exchange", beyond("exchange"), sent),
        wire("context", beyond("context"), keys),
        wire("send", taken("send"), {total: float(total) for total in MESSAGES}),
        wire("sum", taken("sum"), rows),
        wire("parameters", gather, parameters),
        # Forward and backward all_gather twice and reduce_scatter once.
        wire("gradients", lambda total: passes(total) - 2 * gather(total), parameters),
    ]


def machine_of(name: str, cores: int, memory_gb: float, alone: Times, crowds: Times, wires: Sequence[Wire]) -> Machine:
    """``alone``: seconds of one rank. ``crowds``: slowdowns "run 4" and "reference 4" relative to one rank."""
    per_flop, per_byte = matmul_costs(alone)
    factor, each = expert_costs(alone, per_flop, per_byte)
    draft = Machine(
        name=name,
        cores=cores,
        memory_gb=memory_gb,
        gemm_gflops=1e-9 / per_flop,
        gemm_gb_s=1e-9 / per_byte,
        grouped=1 / factor,
        attention_forward_gflops=1e-9 / attention_cost(alone, "forward"),
        attention_backward_gflops=1e-9 / attention_cost(alone, "backward"),
        traffic_gb_s=1.0,
        operation_us=0.0,
        expert_us=each * 1e6,
        update_ns=optimizer_cost(alone) * 1e9,
        wires=tuple(wires),
        crowds=crowds_of(alone, crowds),
    )
    traffic, operation = traffic_costs(alone, draft)
    return replace(draft, traffic_gb_s=1e-9 / traffic, operation_us=operation * 1e6)


def crowds_of(alone: Times, crowds: Times) -> tuple[Crowd, ...]:
    """Slowdown by number of ranks that compute at once."""
    counted = sorted(int(name.split()[1]) for name in crowds if name.startswith("run "))
    return tuple(
        Crowd(ranks, crowds[f"run {ranks}"], crowds[f"reference {ranks}"] * alone["reference"] * 1e6)
        for ranks in counted
    )


def sample_errors(machine: Machine, alone: Times) -> dict[str, float]:
    """Relative error of the table on the small runs that it was fitted to."""

    def error(run: RunConfig, name: str) -> float:
        workload = workload_of_run(run, cluster_of_machine(machine, 1))
        return (
            _passes_seconds(workload, rates_of(workload, CURRENT, float(run.data.seq_len))) / alone[f"run {name}"] - 1
        )

    return {name: error(run, name) for name, run in RUNS.items()}


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
