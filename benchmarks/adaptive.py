"""How good is `parallel.dispatcher: adaptive`? Random cases, every dispatcher measured, and the one its formula picks.

Ranks are forked once per world size and the dispatchers of a case alternate there. The slowest rank's time counts, and
of all rounds the lower quartile, because other processes only ever make a round slower. The same times are then fitted
by a `parallel.link` for this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.command_line import run_script
from moefold.bench.clock import Progress
from moefold.cli.bench import progress_line
from moefold.comm.spawn import disable_malloc_trim, spawn_ranks
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import LinkConfig, ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.moe.dispatch.base import Routing
from moefold.parallel.dispatchers import dispatcher_for
from moefold.parallel.parallelize import groups_of
from moefold.plan.dispatch_choice import Exchange, Volume, volumes
from moefold.tables import text_table

DISPATCHERS = ("all_to_all", "deduplicated", "all_gather")
# A pick is good if no dispatcher is faster by more than this factor.
TOLERANCE = 1.1
# Part of the cases in which the pick must be good.
TARGET = 0.9
_SECONDS = 3600.0
_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Measured:
    """Seconds of each dispatcher in one case, and the one that the formula picks."""

    case: Exchange
    seconds: dict[str, float]
    picked: str

    @property
    def ratio(self) -> float:
        """Time of the picked dispatcher over the fastest one's."""
        return self.seconds[self.picked] / min(self.seconds.values())

    @property
    def good(self) -> bool:
        return self.ratio <= TOLERANCE


def draw_exchanges(count: int, seed: int) -> list[Exchange]:
    """Half over two ranks and half over four, with one to sixteen experts per token."""
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


def measure_cases(
    count: int,
    rounds: int,
    warm: int = 1,
    *,
    seed: int = 0,
    link: LinkConfig = LinkConfig(),  # noqa: B008
    progress: Progress | None = None,
) -> list[Measured]:
    cases = draw_exchanges(count, seed)
    times: dict[Exchange, dict[str, float]] = {}
    for ep in sorted({case.ep for case in cases}):
        cases_of_ep = [case for case in cases if case.ep == ep]

        def work(
            rank: int, cases_of_ep: Sequence[Exchange] = tuple(cases_of_ep), ep: int = ep
        ) -> list[dict[str, list[float]]]:
            disable_malloc_trim()
            torch.set_num_threads(1)
            found = []
            for number, case in enumerate(cases_of_ep):
                found.append(_alternate(case, rank, rounds, warm))
                if rank == 0 and progress is not None:
                    progress(f"cases over {ep} ranks", number + 1, len(cases_of_ep))
            return found

        ranks = spawn_ranks(work, ep, seconds=_SECONDS)
        for number, case in enumerate(cases_of_ep):
            times[case] = {name: _lower_quartile([each[number][name] for each in ranks]) for name in DISPATCHERS}
    return [Measured(case, times[case], pick_for(case, link)) for case in cases]


def pick_for(case: Exchange, link: LinkConfig) -> str:
    found = volumes(case)
    return min(found, key=lambda name: found[name].seconds(link))


def fit_link(measured: Sequence[Measured]) -> LinkConfig:
    """The link with the smallest relative errors over all measurements."""
    rows = [(_columns(volumes(each.case)[name]), each.seconds[name]) for each in measured for name in DISPATCHERS]  # type: ignore[index]
    A = np.array([columns for columns, _ in rows]) / np.array([[seconds] for _, seconds in rows])
    costs = _non_negative(A, np.ones(len(rows)))
    latency, operation, *per_byte = (float(cost) for cost in costs)
    # At most 100 GB/s: what costs nothing measurable is at best as fast as memory.
    all_to_all, all_gather, reduce_scatter, copy = (1e-9 / max(cost, 1e-11) for cost in per_byte)
    return LinkConfig(
        latency_us=latency * 1e6,
        all_to_all_gb_s=all_to_all,
        all_gather_gb_s=all_gather,
        reduce_scatter_gb_s=reduce_scatter,
        copy_gb_s=copy,
        operation_us=operation * 1e6,
    )


def run_for(case: Exchange, dispatcher: str) -> RunConfig:
    formats: Any = {2: "bfloat16", 4: "float32"}[case.word]
    moe = MoEConfig(num_experts=case.num_experts, top_k=case.top_k, expert_hidden_dim=8)
    return RunConfig(
        model=ModelConfig(dim=case.dim, num_layers=1, moe=moe),
        parallel=ParallelConfig(ep=case.ep, dispatcher=dispatcher),  # type: ignore[arg-type]
        precision=PrecisionConfig(params=formats, compute=formats),
        data=DataConfig(seq_len=case.tokens, global_batch=case.ep),
    )


def _alternate(case: Exchange, rank: int, rounds: int, warm: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(rank)
    dtype = {2: torch.bfloat16, 4: torch.float32}[case.word]
    x = torch.randn(case.tokens, case.dim, generator=generator).to(dtype)
    prob = torch.rand(case.tokens, case.top_k, generator=generator)
    runs = {name: run_for(case, name) for name in DISPATCHERS}
    groups = groups_of(runs["all_to_all"], case.ep, rank, _TIMEOUT)
    dispatchers = {name: dispatcher_for(run, groups) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in DISPATCHERS}
    for number in range(warm + rounds):
        expert = torch.rand(case.tokens, case.num_experts, generator=generator).topk(case.top_k, dim=1).indices
        for position in range(len(DISPATCHERS)):
            name = DISPATCHERS[(position + number) % len(DISPATCHERS)]
            dist.barrier()
            began = time.perf_counter()
            arrived = dispatchers[name].dispatch(x, Routing(expert, prob))
            dispatchers[name].combine(arrived.rows_RL, arrived.ticket)
            if number >= warm:
                found[name].append(time.perf_counter() - began)
    return found


def _lower_quartile(by_rank: Sequence[Sequence[float]]) -> float:
    """Of the slowest rank's times over the rounds."""
    slowest = sorted(map(max, zip(*by_rank, strict=True)))
    return slowest[len(slowest) // 4]


def _columns(volume: Volume) -> list[float]:
    return [float(getattr(volume, field.name)) for field in fields(volume)]


def _non_negative(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with non-negative coefficients, by coordinate descent; columns are few."""
    size = np.linalg.norm(A, axis=0)
    size[size == 0] = 1.0
    scaled = A / size
    x = np.zeros(A.shape[1])
    for _ in range(5000):
        for column in range(A.shape[1]):
            residual = b - scaled @ x + scaled[:, column] * x[column]
            x[column] = max(0.0, float(scaled[:, column] @ residual))
    return x / size


def with_link(measured: Sequence[Measured], link: LinkConfig) -> list[Measured]:
    """The same measurements, with the picks of another link."""
    return [replace(each, picked=pick_for(each.case, link)) for each in measured]


# ---- report and command ----


def adaptive_report(measured: Sequence[Measured]) -> str:
    header = ("tokens", "dim", "bytes", "E", "K", "ep", *DISPATCHERS, "picked", "x fastest")
    rows = [
        (
            *(each.case.tokens, each.case.dim, each.case.word, each.case.num_experts, each.case.top_k, each.case.ep),
            *(f"{each.seconds[name] * 1e3:.2f} ms" for name in DISPATCHERS),
            each.picked,
            f"{each.ratio:.2f}",
        )
        for each in measured
    ]
    link = fit_link(measured)
    link_text = "\n".join(f"    {name}: {value:.3g}" for name, value in asdict(link).items())
    return "\n\n".join(
        (
            text_table(header, rows),
            verdict(measured),
            f"fitted to these times:\nparallel:\n  link:\n{link_text}",
            f"with that link {sum(each.good for each in with_link(measured, link))} of {len(measured)}",
        )
    )


def verdict(measured: Sequence[Measured]) -> str:
    good = sum(each.good for each in measured)
    reached = "reached" if good >= TARGET * len(measured) else "MISSED"
    return (
        f"the pick is the fastest or within {TOLERANCE - 1:.0%} of it in {good} of {len(measured)} cases; "
        f"target {TARGET:.0%}: {reached}"
    )


def adaptive_json(measured: Sequence[Measured]) -> dict[str, Any]:
    link = fit_link(measured)
    return {
        "cases": [
            {"case": asdict(each.case), "seconds": each.seconds, "picked": each.picked, "ratio": each.ratio}
            for each in measured
        ],
        "good": sum(each.good for each in measured),
        "target": TARGET * len(measured),
        "link": asdict(link),
        "good_with_link": sum(each.good for each in with_link(measured, link)),
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adaptive",
        description="Time every dispatcher in random cases on this machine; say how often the adaptive dispatcher's "
        "pick is good, and which `parallel.link` fits the times best.",
    )
    parser.add_argument("cases", nargs="?", type=int, default=20, metavar="N", help="random cases (default 20)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds that count (default 9)")
    parser.add_argument("--warm", type=int, default=2, metavar="N", help="rounds before those (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    least = {"cases": 1, "rounds": 1, "warm": 0}
    problems = [
        Problem(n, f"is {getattr(args, n)}", f"use {k} or more") for n, k in least.items() if getattr(args, n) < k
    ]
    if problems:
        raise ConfigError(*problems)
    measured = measure_cases(args.cases, args.rounds, args.warm, progress=progress_line())
    print(json.dumps(adaptive_json(measured), indent=2) if args.json else adaptive_report(measured))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, sys.argv[1:]))
