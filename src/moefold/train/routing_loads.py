"""What a recorded routing does to ranks: load and entropy of every layer, and what cloning or placing experts changes.

Rows of one exchange are those of some samples at once: a microbatch from each of ``ep`` ranks. For each exchange of a
trace the busiest rank's rows over the mean rank's decide how long all wait; means are over the exchanges. Compared are

    in order     rank r holds the experts r * E / ep and on, as the trainer does
    clones       the same, and ECHO with some spare slots on every rank (`plan/clone_loads.py`)
    placement    experts dealt out by their rows, the heaviest first, each to the emptiest rank that has a free place.
                 They are dealt by the first half of the exchanges and measured on the second: a placement is
                 chosen before the rows are known.

The trainer clones experts (`parallel.echo`); it does not place them otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moefold.errors import ConfigError, Problem
from moefold.plan.clone_loads import EchoSizes, loads_with, planned_clones
from moefold.train.metrics import LayerStats, router_stats
from moefold.train.routing_trace import RoutingTrace

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankLoads:
    """Of one layer: rows of the busiest rank over the mean rank's, averaged over exchanges."""

    in_order: float
    clones: float
    placement: float


@dataclass(frozen=True)
class RoutingLoads:
    """By MoE layer. ``ranks`` is empty without ep."""

    layers: tuple[str, ...]
    stats: tuple[LayerStats, ...]
    ranks: tuple[RankLoads, ...]
    exchanges: int
    tokens: int

    @property
    def imbalance(self) -> RankLoads:
        """Of the mean layer: what `moefold plan --imbalance` takes."""
        kinds = ("in_order", "clones", "placement")
        return RankLoads(*(float(np.mean([getattr(each, kind) for each in self.ranks])) for kind in kinds))


def routing_loads(trace: RoutingTrace, ep: int = 1, slots: int = 1, samples: int | None = None) -> RoutingLoads:
    """``samples``: of one exchange; ``ep`` microbatches of the recorded run unless given."""
    info = trace.info
    if ep < 1 or info.num_experts % ep:
        what = f"{info.num_experts} experts do not divide over {ep} ranks"
        raise ConfigError(Problem("--ep", what, "use a divisor of the number of experts"))
    at_once = info.micro_batch * ep if samples is None else samples
    if at_once < 1:
        raise ConfigError(Problem("--samples", f"{at_once} is no number of samples", "use 1 or more"))
    counted = list(_exchanges(trace, at_once))
    if not counted:
        raise ConfigError(Problem(str(trace.directory), "has no recorded step", "train with --trace-routing"))
    counts_XME = np.stack(counted)
    ranks = () if ep == 1 else tuple(_layer(counts_XME[:, layer], ep, slots) for layer in range(len(info.layers)))
    stats = router_stats(counts_XME.sum(0)).layers
    return RoutingLoads(info.layers, stats, ranks, len(counted), int(counts_XME[:, 0].sum()) // info.top_k)


def _exchanges(trace: RoutingTrace, samples: int) -> Iterator[Counts]:
    """[layers, experts]: assignments of every exchange, in the order of steps and samples."""
    info = trace.info
    for step in trace.steps:
        found = [experts for _, experts in sorted(trace.samples(step).items())]
        for first in range(0, len(found), samples):
            yield count_experts(np.concatenate(found[first : first + samples]), info.num_experts)


def count_experts(experts_TMK: npt.NDArray[np.int16], num_experts: int) -> Counts:
    """[M, E]; padding, -1, is not counted."""
    layers = range(experts_TMK.shape[1])
    return np.stack(
        [np.bincount(chosen[chosen >= 0], minlength=num_experts) for chosen in (experts_TMK[:, m] for m in layers)]
    )


def _layer(counts_XE: Counts, ep: int, slots: int) -> RankLoads:
    sizes = EchoSizes(counts_XE.shape[1], ep, slots)
    half = max(len(counts_XE) // 2, 1)
    rank_of = np.array(deal_out(counts_XE[:half].sum(0).tolist(), ep))
    in_order, clones, placement = [], [], []
    for number, counts_E in enumerate(counts_XE):
        if not (total := int(counts_E.sum())):
            continue
        rows = counts_E.tolist()
        in_order.append(max(loads_with(rows, [], sizes)) * ep / total)
        clones.append(max(loads_with(rows, planned_clones(rows, sizes), sizes)) * ep / total)
        if number >= half or len(counts_XE) == 1:
            placement.append(np.bincount(rank_of, counts_E, minlength=ep).max() * ep / total)
    return RankLoads(*(float(np.mean(each)) if each else 1.0 for each in (in_order, clones, placement)))


def deal_out(rows: Sequence[int], ranks: int) -> list[int]:
    """The rank of each expert: the heaviest first, each to the emptiest rank that has a free place."""
    each = len(rows) // ranks
    load, held, rank_of = [0] * ranks, [0] * ranks, [0] * len(rows)
    for expert in sorted(range(len(rows)), key=lambda expert: -rows[expert]):
        rank = min((rank for rank in range(ranks) if held[rank] < each), key=lambda rank: load[rank])
        rank_of[expert] = rank
        load[rank] += rows[expert]
        held[rank] += 1
    return rank_of
