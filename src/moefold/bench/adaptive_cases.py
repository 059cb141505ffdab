"""Does the adaptive choice pick well? Random exchanges, every dispatcher measured, and what the formula says of each.

All ranks fork once per world. In them every dispatcher of a case takes its turn, round after round; the slowest rank's
time counts, and of the rounds the lower quartile: whatever else the machine does makes a round longer, never shorter.
From the same figures comes the link that explains them best, in the form in which a run is told about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moefold.comm.spawn import spawn_ranks
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import LinkConfig, ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.base import Routing
from moefold.ops.malloc import disable_malloc_trim
from moefold.parallel.expert_parallel import dispatcher_for
from moefold.parallel.parallelize import groups_of
from moefold.plan.dispatch_choice import Exchange, Volume, volumes

CHOICES = ("all_to_all", "deduplicated", "all_gather")
# The choice is good if nothing is faster by more than this.
NEAR = 1.1
# Of 20 cases, so many must be good.
WANTED = 0.9
_SECONDS = 3600.0
_PATIENCE = timedelta(seconds=300)

Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """Seconds of each dispatcher in one case, and which one the formula takes."""

    case: Exchange
    seconds: dict[str, float]
    chosen: str

    @property
    def ratio(self) -> float:
        """The chosen one's time to the fastest one's."""
        return self.seconds[self.chosen] / min(self.seconds.values())

    @property
    def good(self) -> bool:
        return self.ratio <= NEAR


def draw_exchanges(count: int, seed: int) -> list[Exchange]:
    """Half over two ranks and half over four, from one choice per token to sixteen."""
    random = Random(seed)
    found = []
    for number in range(count):
        ep = (2, 4)[number % 2]
        experts = ep * random.choice((2, 4, 8, 16))
        found.append(
            Exchange(
                tokens=random.choice((64, 256, 512, 1024, 2048)),
                dim=random.choice((128, 256, 512, 1024, 2048)),
                word=random.choice((2, 2, 4)),
                num_experts=experts,
                top_k=min(experts, random.choice((1, 2, 3, 4, 6, 8, 16))),
                ep=ep,
            )
        )
    return found


def measure_choices(
    count: int,
    rounds: int,
    warm: int = 1,
    *,
    seed: int = 0,
    link: LinkConfig = LinkConfig(),  # noqa: B008
    say: Say = lambda what, done, total: None,
) -> list[Measured]:
    cases = draw_exchanges(count, seed)
    taken: dict[Exchange, dict[str, float]] = {}
    for ep in sorted({case.ep for case in cases}):
        mine = [case for case in cases if case.ep == ep]

        def work(rank: int, mine: Sequence[Exchange] = tuple(mine), ep: int = ep) -> list[dict[str, list[float]]]:
            disable_malloc_trim()
            torch.set_num_threads(1)
            told = []
            for number, case in enumerate(mine):
                told.append(_turns(case, rank, rounds, warm))
                if rank == 0:
                    say(f"cases over {ep} ranks", number + 1, len(mine))
            return told

        answers = spawn_ranks(work, ep, seconds=_SECONDS)
        for number, case in enumerate(mine):
            taken[case] = {name: _quiet([each[number][name] for each in answers]) for name in CHOICES}
    return [Measured(case, taken[case], choice_for(case, link)) for case in cases]


def choice_for(case: Exchange, link: LinkConfig) -> str:
    found = volumes(case)
    return min(found, key=lambda name: found[name].seconds(link))


def fit_link(measured: Sequence[Measured]) -> LinkConfig:
    """The link with the smallest relative errors over everything that was measured."""
    rows = [(_columns(volumes(each.case)[name]), each.seconds[name]) for each in measured for name in CHOICES]  # type: ignore[index]
    A = np.array([columns for columns, _ in rows]) / np.array([[seconds] for _, seconds in rows])
    rates = _non_negative(A, np.ones(len(rows)))
    message, operation, *per_byte = (float(rate) for rate in rates)
    # What costs nothing that could be measured is as fast as memory at best.
    exchange, gather, add, copy = (1e-9 / max(rate, 1e-11) for rate in per_byte)
    return LinkConfig(message * 1e6, exchange, gather, add, copy, operation * 1e6)


def run_for(case: Exchange, dispatcher: str) -> RunConfig:
    formats: Any = {2: "bfloat16", 4: "float32"}[case.word]
    moe = MoEConfig(num_experts=case.num_experts, top_k=case.top_k, expert_hidden_dim=8)
    return RunConfig(
        model=ModelConfig(dim=case.dim, num_layers=1, moe=moe),
        parallel=ParallelConfig(ep=case.ep, dispatcher=dispatcher),  # type: ignore[arg-type]
        precision=PrecisionConfig(params=formats, compute=formats),
        data=DataConfig(seq_len=case.tokens, global_batch=case.ep),
    )


def _turns(case: Exchange, rank: int, rounds: int, warm: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(rank)
    dtype = {2: torch.bfloat16, 4: torch.float32}[case.word]
    x = torch.randn(case.tokens, case.dim, generator=generator).to(dtype)
    weight = torch.rand(case.tokens, case.top_k, generator=generator)
    runs = {name: run_for(case, name) for name in CHOICES}
    groups = groups_of(runs["all_to_all"], case.ep, rank, _PATIENCE)
    dispatchers = {name: dispatcher_for(run, groups) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in CHOICES}
    for number in range(warm + rounds):
        expert = torch.rand(case.tokens, case.num_experts, generator=generator).topk(case.top_k, dim=1).indices
        for place in range(len(CHOICES)):
            name = CHOICES[(place + number) % len(CHOICES)]
            dist.barrier()
            began = time.perf_counter()
            arrived = dispatchers[name].dispatch(x, Routing(expert, weight))
            dispatchers[name].combine(arrived.rows_SD, arrived.ticket)
            if number >= warm:
                found[name].append(time.perf_counter() - began)
    return found


def _quiet(by_rank: Sequence[Sequence[float]]) -> float:
    """The slowest rank's time, in the round that a quarter of all were faster than."""
    slowest = sorted(map(max, zip(*by_rank, strict=True)))
    return slowest[len(slowest) // 4]


def _columns(volume: Volume) -> list[float]:
    return [float(getattr(volume, field.name)) for field in fields(volume)]


def _non_negative(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares without negative rates, by coordinate descent; columns are few."""
    size = np.linalg.norm(A, axis=0)
    size[size == 0] = 1.0
    scaled = A / size
    x = np.zeros(A.shape[1])
    for _ in range(5000):
        for column in range(A.shape[1]):
            left = b - scaled @ x + scaled[:, column] * x[column]
            x[column] = max(0.0, float(scaled[:, column] @ left))
    return x / size


def with_link(measured: Sequence[Measured], link: LinkConfig) -> list[Measured]:
    """The same measurements, chosen by another link."""
    return [replace(each, chosen=choice_for(each.case, link)) for each in measured]
