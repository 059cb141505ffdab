"""Measurements with several ranks: collectives over gloo, sharded parameters, and ranks that share cores.

All groups of one size communicate at once, as in training: with four ranks, both pairs. Small and large messages tell
latency and bandwidth apart.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from moefold.bench.calibration_shapes import CROWDED, DOCUMENTS, MESSAGES, PARAMETERS, REPETITIONS, RUNS, TOKENS
from moefold.bench.clock import REPEATS, Progress, Reference, Trial, barrier, ratios, repeat, seconds
from moefold.bench.distributed_parts import contexts, experts, sharded
from moefold.bench.single_rank import random_batch, single_rank_model
from moefold.comm.collectives import all_gather_no_grad, all_reduce_no_grad, reduce_scatter_no_grad
from moefold.comm.process_groups import Group, Groups, Ledger
from moefold.config.parallel import ParallelConfig
from moefold.pipeline.runtime import run_schedule
from moefold.topology.folded_layout import fold

# Rows of a message.
_ROWS = 64


def measure_together(rank: int, world: int, rounds: int, progress: Progress | None) -> dict[str, float]:
    """In units of the reference, by name: "tokens 2 4096" is operation, group size and message bytes."""
    found: dict[str, float] = {}
    for group in group_sizes(world):
        found |= ratios(_wires(rank, world, group), rounds, f"messages among {group} of {world} ranks", progress)
    return found


def group_sizes(world: int) -> list[int]:
    return [size for size in (2, 4, 8, 16, 32) if size <= world and world % size == 0]


def measure_crowds(rank: int, world: int, rounds: int, progress: Progress | None) -> dict[str, float]:
    """Slowdown of independent work when 1, 2, 4, ... ranks do it at once, relative to one rank.

    "run 2" is a small run, "reference 2" the reference. Numbers of ranks alternate; ranks that do not compute wait.
    """
    local_model, batch, reference = single_rank_model(RUNS[CROWDED]), random_batch(RUNS[CROWDED]), Reference()
    # The reference as often in a row as elsewhere: the scheduler moves ranks between cores slowly, so few matmuls share
    # them less evenly.
    works: list[tuple[str, Trial]] = [
        ("run", partial(run_schedule, local_model, [batch])),
        *[("reference", partial(repeat, reference, REPEATS))] * 4,
    ]
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, work in works:
            alone = 0.0
            for ranks in crowd_sizes(world):
                barrier()
                taken = seconds(work) if rank < ranks else 0.0
                barrier()
                mean = _mean(taken, ranks)
                alone = mean if ranks == 1 else alone
                found.setdefault(f"{name} {ranks}", []).append(mean / alone)
        if progress is not None:
            progress(f"up to {world} ranks at once", number + 1, rounds)
    return {name: median(taken) for name, taken in found.items()}


def crowd_sizes(world: int) -> list[int]:
    return [ranks for ranks in (1, 2, 4, 8, 16, 32, 64) if ranks <= world]


def _mean(taken: float, ranks: int) -> float:
    """Over the ranks that computed; the others contribute 0."""
    total = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / ranks


def _wires(rank: int, world: int, size: int) -> dict[str, Trial]:
    """Ranks that share cores reach a collective one after the other, so there work and message alternate."""
    group = _groups(rank, world, tp=size)["tp"]
    shards = _groups(rank, world, tp=world // size)
    contexts_by_size = _groups(rank, world, cp=size).contexts
    routed = _groups(rank, world, ep=size)
    parts: dict[str, Trial] = {}
    for total in MESSAGES:
        parts |= _named(size, total, _messages(group, total))
    for total in PARAMETERS:
        parts |= _named(size, total, sharded(shards, total))
    for number in DOCUMENTS:
        parts |= _named(size, number, contexts(contexts_by_size, size, number))
    for number in TOKENS:
        parts |= _named(size, number, experts(routed["ep"], routed["etp"], number))
    work: Trial = Reference() if world > (os.cpu_count() or 1) else idle
    return {f"work {size}": _alternating(work)} | {name: _alternating(work, part) for name, part in parts.items()}


def idle() -> None:
    """No work: ranks that have a core each arrive together anyway."""


def _named(size: int, amount: int, trials: dict[str, Trial]) -> dict[str, Trial]:
    return {f"{operation} {size} {amount}": trial for operation, trial in trials.items()}


def _groups(rank: int, world: int, **degrees: Any) -> Groups:
    return Groups(fold(ParallelConfig(**degrees), world), rank, Ledger(), timedelta(seconds=60))


def _alternating(*works: Trial) -> Trial:
    def trial() -> None:
        for _ in range(REPETITIONS):
            for work in works:
                work()

    return trial


def _messages(group: Group, total: int) -> dict[str, Trial]:
    whole = torch.ones(_ROWS, total // 4 // _ROWS)
    sizes = (_ROWS // group.size,) * group.size
    mine = whole[: sizes[0]].clone()
    peer = group.ranks[group.index ^ 1]

    def tokens() -> None:
        all_gather_no_grad(mine, sizes, group)
        reduce_scatter_no_grad(whole, sizes, group)

    def send() -> None:
        arriving = torch.empty_like(whole)
        works = [dist.isend(whole, peer, group=group.connected), dist.irecv(arriving, peer, group=group.connected)]
        for work in works:
            if work is not None:
                work.wait()

    return {
        "tokens": tokens,
        "send": send,
        "sum": lambda: all_reduce_no_grad(whole, group),
    }
