"""What slows a profiled step, named: a slow rank, a slow link, slow data, garbage collection, a wall.

Every cause is a comparison that the profile itself allows:

    slow rank   its own work (compute and host) against that of the ranks with the same layers; the others wait for it
    slow link   the rate of large messages over one group against the other groups of the same axis and operation. If
                all slow groups share one rank and no other group has it, it is that rank's link
    slow data   waiting for a batch, on the rank that waits longest
    gc          collections of garbage, on the rank where they take longest
    host        bookkeeping beyond the share at which the planner calls it the wall
    bubble, communication, imbalance   shares of the step that no single rank or link explains

The measured wall follows from the same shares by the planner's own rule, so that the two can be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from moefold.plan.predict import wall_of_shares
from moefold.plan.prediction import Wall
from moefold.train.profile.step_account import Link, StepAccount, mean_of_ranks, together, typical, wall_seconds
from moefold.units import format_seconds

# A rank is slow if its own work is this many times that of its peers; a link if its rate is this fraction of others'.
SLOW_RANK, SLOW_LINK = 1.3, 0.5
# Shares of the step from which something is worth a line.
WORTH_A_LINE = {"rank": 0.05, "link": 0.05, "data": 0.05, "gc": 0.03, "bubble": 0.2, "imbalance": 0.15}
# A host's memory is shared, and a device needs some of it: from this share of it on, memory is the wall.
MEMORY_BINDS = 0.95


@dataclass(frozen=True)
class Cause:
    """``kind`` is rank, link, data, gc, host, bubble, communication or imbalance; ``seconds`` are lost per step."""

    kind: str
    seconds: float
    share: float
    what: str
    ranks: tuple[int, ...] = ()


def causes_of(accounts: Sequence[StepAccount]) -> list[Cause]:
    """The costliest first."""
    accounts = [each for each in accounts if len(each.wall) == len(accounts[-1].wall)]
    ranks, wall = typical(accounts), wall_seconds(accounts)
    named = [*_data(ranks, wall), *_gc(ranks, wall), *_slow_ranks(accounts, ranks, wall), *_links(accounts, wall)]
    found = [cause for cause in named if cause.share >= WORTH_A_LINE[cause.kind]]
    found += _shares(ranks, wall, bool(found))
    return sorted(found, key=lambda cause: -cause.seconds)


def measured_wall(accounts: Sequence[StepAccount]) -> Wall:
    """As the planner decides from a prediction: memory, communication, host or compute."""
    last = accounts[-1]
    if last.memory_bytes and last.capacity_bytes and max(last.memory_bytes) >= MEMORY_BINDS * last.capacity_bytes:
        return "memory"
    shares = measured_shares(accounts)
    return wall_of_shares(shares["communication"], shares["host"])


def measured_shares(accounts: Sequence[StepAccount]) -> dict[str, float]:
    """Of the mean rank's step. Waiting for slower ranks is no communication; the host collects garbage, and it is the
    host that a late batch comes from."""
    mean = together(mean_of_ranks(typical(accounts)))
    total = sum(mean.values())
    mean["host"] += mean["gc"] + mean["data"]
    return {name: seconds / total for name, seconds in mean.items()}


def _data(ranks: Sequence[dict[str, float]], wall: float) -> Iterator[Cause]:
    rank, seconds = _largest(ranks, "data")
    what = f"slow data: rank {rank} waits {format_seconds(seconds)} per step for its batch"
    yield Cause("data", seconds, seconds / wall, f"{what}; try data.prefetch, or faster storage", (rank,))


def _gc(ranks: Sequence[dict[str, float]], wall: float) -> Iterator[Cause]:
    rank, seconds = _largest(ranks, "gc")
    what = f"garbage collection: rank {rank} stands still for {format_seconds(seconds)} per step"
    yield Cause("gc", seconds, seconds / wall, f"{what}; try train.host.gc: manual", (rank,))


def _largest(ranks: Sequence[dict[str, float]], name: str) -> tuple[int, float]:
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank].get(name, 0.0))
    return rank, ranks[rank].get(name, 0.0)


def _slow_ranks(accounts: Sequence[StepAccount], ranks: Sequence[dict[str, float]], wall: float) -> Iterator[Cause]:
    own = [parts.get("compute", 0.0) + parts.get("host", 0.0) for parts in ranks]
    stages = accounts[-1].stages or [0] * len(ranks)
    for rank, seconds in enumerate(own):
        same = [own[peer] for peer in range(len(own)) if peer != rank and stages[peer] == stages[rank]]
        peers = same or [own[peer] for peer in range(len(own)) if peer != rank]
        if not peers or seconds < SLOW_RANK * (usual := median(peers)):
            continue
        which = f"its {len(same)} peer(s)" if same else "ranks of other stages, which hold other layers,"
        what = f"slow rank: rank {rank} works {format_seconds(seconds)} per step, {which} {format_seconds(usual)}"
        yield Cause("rank", seconds - usual, (seconds - usual) / wall, what, (rank,))


def _links(accounts: Sequence[StepAccount], wall: float) -> Iterator[Cause]:
    links = _added(accounts)
    slow: list[tuple[Link, float]] = []
    quick: list[Link] = []
    for link in links:
        others = [
            each.mb_s for each in links if (each.axis, each.operation) == (link.axis, link.operation) and each != link
        ]
        if others and link.mb_s < SLOW_LINK * median(others):
            slow.append((link, median(others)))
        else:
            quick.append(link)
    if not slow:
        return
    shared = set.intersection(*(set(link.ranks) for link, _ in slow)) - {rank for link in quick for rank in link.ranks}
    worst, usual = max(slow, key=lambda each: each[0].seconds / len(each[0].ranks))
    # Every rank of a group adds its seconds.
    lost = sum(link.seconds * (1 - link.mb_s / rate) / len(link.ranks) for link, rate in slow) / len(accounts)
    where = f"of rank {min(shared)}" if len(shared) == 1 and len(slow) > 1 else f"between ranks {_words(worst.ranks)}"
    what = f"slow link {where}: {worst.operation} over {worst.axis} at {worst.mb_s:,.1f} MB/s, other groups "
    ranks = tuple(sorted(shared)) if len(shared) == 1 and len(slow) > 1 else worst.ranks
    yield Cause("link", lost, lost / wall, f"{what}{usual:,.1f} MB/s; see `moefold bench links`", ranks)


def _added(accounts: Sequence[StepAccount]) -> list[Link]:
    """The links of all steps together."""
    total: dict[tuple[str, tuple[int, ...], str], Link] = {}
    for link in (link for each in accounts for link in each.links):
        key = link.axis, link.ranks, link.operation
        sums = total.setdefault(key, Link(*key))
        sums.calls, sums.bytes, sums.seconds = (
            sums.calls + link.calls,
            sums.bytes + link.bytes,
            sums.seconds + link.seconds,
        )
    return list(total.values())


def _words(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _shares(ranks: Sequence[dict[str, float]], wall: float, explained: bool) -> Iterator[Cause]:
    """What no single rank or link is the cause of."""
    mean = mean_of_ranks(ranks)
    parts = together(mean)
    shares = {name: seconds / wall for name, seconds in parts.items()}
    binds = wall_of_shares(shares["communication"], shares["host"] + shares["gc"])
    if binds == "communication":
        axes: dict[str, float] = defaultdict(float, {n[5:]: s for n, s in mean.items() if n.startswith("comm.")})
        most = max(axes, key=lambda axis: axes[axis])
        what = f"communication: transfers that nothing hides, most of them over {most}"
        yield Cause("communication", parts["communication"], shares["communication"], what)
    if binds == "host":
        yield Cause("host", parts["host"], shares["host"], "host: bookkeeping between the operations of a step")
    if shares["bubble"] >= WORTH_A_LINE["bubble"]:
        what = "bubble: waiting for other stages; more microbatches, or another"
        yield Cause("bubble", parts["bubble"], shares["bubble"], f"{what} parallel.schedule, make it smaller")
    if shares["imbalance"] >= WORTH_A_LINE["imbalance"] and not explained:
        what = "imbalance: ranks wait for each other, now for one, now for another"
        yield Cause("imbalance", parts["imbalance"], shares["imbalance"], what)
