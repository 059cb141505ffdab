"""A comparison of candidates that are distributed over ranks.

All candidates are in the same forked ranks and alternate there: a barrier, then one run on every rank. The wall time of
the slowest rank counts; CPU time is the sum over ranks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.comparison import FIRST_SEED, FIXED_SEED, Setting, rounds_of
from benchmarks.process_stats import busy_cores_of_others, cpu_times
from benchmarks.results import CHANGING, CandidateResult, CandidateSpec, Comparison, Run, rounds_run
from benchmarks.runner import Candidate, Checked, one_line, timed_run
from moefold.bench.clock import Progress, rounds_within
from moefold.comm.spawn import disable_malloc_trim, spawn_ranks

# From rank and world size to a candidate.
RankBuilder = Callable[[int, int], Candidate]
# Time limit of a comparison.
_SECONDS = 1800.0


def run_rank_comparison(
    title: str,
    world: int,
    builders: Mapping[str, tuple[str, RankBuilder]],
    setting: Setting,
    progress: Progress | None = None,
) -> Comparison:
    """``builders``: each candidate's role and builder."""

    def work(rank: int) -> dict[str, Any]:
        disable_malloc_trim()
        built, failures = _build_all(builders, rank, world)
        runs = {
            routing: _alternate(built, routing, setting, progress if rank == 0 else None)
            for routing in setting.routings
        }
        return {"failures": failures, "runs": runs, "errors": {name: _error(each) for name, each in built.items()}}

    began = cpu_times()
    ranks = spawn_ranks(work, world, seconds=_SECONDS)
    others = busy_cores_of_others(began)
    results = tuple(_result(name, role, ranks, setting.routings) for name, (role, _) in builders.items())
    return Comparison(title, "wall", rounds_run(results), results, setting.tolerance, others)


def _build_all(
    builders: Mapping[str, tuple[str, RankBuilder]], rank: int, world: int
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Candidates, and why others cannot be built; the same on every rank, because all ranks have the same options."""
    built: dict[str, Candidate] = {}
    failures: dict[str, str] = {}
    for name, (_, build) in builders.items():
        try:
            built[name] = build(rank, world)
        except Exception as error:
            failures[name] = one_line(error)
    return built, failures


def _alternate(
    built: Mapping[str, Candidate], routing: str, setting: Setting, progress: Progress | None
) -> dict[str, list[dict[str, float]]]:
    names, budget = list(built), setting.budget / len(setting.routings)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number, round_ in enumerate(rounds_within(budget, setting.rounds, setting.warm, _time_of_rank_0)):
        seed = FIRST_SEED + number if routing == CHANGING else FIXED_SEED
        for position in range(len(names)):
            name = names[(position + number) % len(names)]
            taken = timed_run(built[name], seed, dist.barrier)
            if round_.counts:
                runs[name].append(taken)
        # Here, where nothing is timed.
        gc.collect()
        round_.show(progress, rounds_of(routing))
    return runs


def _time_of_rank_0() -> float:
    """So that all ranks run the same rounds."""
    now = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.broadcast(now, 0)
    return float(now)


def _error(candidate: Candidate) -> float | None:
    if not isinstance(candidate, Checked):
        return None
    return candidate.relative_error(candidate.prepare(FIXED_SEED))


def _result(name: str, role: str, ranks: Sequence[dict[str, Any]], routings: Sequence[str]) -> CandidateResult:
    spec = CandidateSpec(name, role, {"threads": 1})
    failure = next((rank["failures"][name] for rank in ranks if name in rank["failures"]), "")
    if failure:
        return CandidateResult(spec, failure=failure)
    runs = {
        routing: tuple(_slowest(run) for run in zip(*(rank["runs"][routing][name] for rank in ranks)))
        for routing in routings
    }
    errors = [rank["errors"][name] for rank in ranks if rank["errors"][name] is not None]
    return CandidateResult(spec, runs, allocator="kept", error=max(errors, default=None))


def _slowest(run: Sequence[dict[str, float]]) -> Run:
    return Run(
        wall=max(rank["wall"] for rank in run),
        cpu=sum(rank["cpu"] for rank in run),
        faults=round(max(rank["faults"] for rank in run)),
    )
