"""The same contest among contestants that are spread over ranks.

All of them live in the same forked ranks and take turns there: a barrier, one run of everybody on every rank, and the
time on the wall of the slowest rank counts. CPU time is all ranks' together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from moefold.bench.comparison import FIRST_SEED, FIXED_SEED, Say, rounds_of
from moefold.bench.machine_load import cores_of_others, now
from moefold.bench.results import CHANGING, Contest, Entrant, Run, Standing
from moefold.bench.runner import Checked, Contestant, in_one_line, timed_run
from moefold.comm.spawn import spawn_ranks
from moefold.ops.malloc import disable_malloc_trim

# Builds a contestant on a rank, in a world of so many.
RankBuilder = Callable[[int, int], Contestant]
# No contest of one world takes this long.
_SECONDS = 1800.0


def hold_rank_contest(
    title: str,
    world: int,
    builders: Mapping[str, tuple[str, RankBuilder]],
    *,
    rounds: int,
    warm: int,
    routings: Sequence[str],
    tolerance: float = float("inf"),
    say: Say = lambda what, done, total: None,
) -> Contest:
    """``builders``: each contestant's role, and what builds it on a rank."""

    def work(rank: int) -> dict[str, Any]:
        disable_malloc_trim()
        speak: Say = say if rank == 0 else lambda what, done, total: None
        built, failures = _build_all(builders, rank, world)
        runs = {routing: _take_turns(built, routing, rounds, warm, speak) for routing in routings}
        return {"failures": failures, "runs": runs, "errors": {name: _error(each) for name, each in built.items()}}

    began = now()
    answers = spawn_ranks(work, world, seconds=_SECONDS)
    others = cores_of_others(began)
    standings = tuple(_standing(name, role, answers, routings) for name, (role, _) in builders.items())
    return Contest(title, "wall", rounds, standings, tolerance, others)


def _build_all(
    builders: Mapping[str, tuple[str, RankBuilder]], rank: int, world: int
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Who can be built, and why the others cannot; the same on every rank, for they are told the same."""
    built: dict[str, Contestant] = {}
    failures: dict[str, str] = {}
    for name, (_, build) in builders.items():
        try:
            built[name] = build(rank, world)
        except Exception as error:
            failures[name] = in_one_line(error)
    return built, failures


def _take_turns(
    built: Mapping[str, Contestant], routing: str, rounds: int, warm: int, say: Say
) -> dict[str, list[dict[str, float]]]:
    names = list(built)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(warm + rounds):
        seed = FIRST_SEED + number if routing == CHANGING else FIXED_SEED
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            taken = timed_run(built[name], seed, dist.barrier)
            if number >= warm:
                runs[name].append(taken)
        # Not while somebody is timed.
        gc.collect()
        say(rounds_of(routing), max(0, number + 1 - warm), rounds)
    return runs


def _error(contestant: Contestant) -> float | None:
    if not isinstance(contestant, Checked):
        return None
    return contestant.relative_error(contestant.prepare(FIXED_SEED))


def _standing(name: str, role: str, answers: Sequence[dict[str, Any]], routings: Sequence[str]) -> Standing:
    entrant = Entrant(name, role, {"threads": 1})
    failure = next((answer["failures"][name] for answer in answers if name in answer["failures"]), "")
    if failure:
        return Standing(entrant, failure=failure)
    runs = {
        routing: tuple(_slowest(turn) for turn in zip(*(answer["runs"][routing][name] for answer in answers)))
        for routing in routings
    }
    errors = [answer["errors"][name] for answer in answers if answer["errors"][name] is not None]
    return Standing(entrant, runs, allocator="kept", error=max(errors, default=None))


def _slowest(turn: Sequence[dict[str, float]]) -> Run:
    return Run(
        wall=max(rank["wall"] for rank in turn),
        cpu=sum(rank["cpu"] for rank in turn),
        faults=round(max(rank["faults"] for rank in turn)),
    )
