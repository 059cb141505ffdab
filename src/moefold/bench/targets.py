"""What the project must show, as a table: a figure, what it is compared with, and the limit it must keep.

A goal holds for one shape in one setting. "best peer" is the fastest library that computes the same function, and for
memory the leanest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moefold.bench.results import ROUNDS_FOR_A_VERDICT, Contest

BEST_PEER = "best peer"
# Whichever of moefold's own is fastest.
FASTEST = "moefold, fastest"
AS_LAUNCHED, SAME = "as launched", "the same for all"
BOTH = (AS_LAUNCHED, SAME)
MIB = 2**20


@dataclass(frozen=True)
class Goal:
    """``ours`` may take ``limit`` times what ``base`` takes; without a base the limit is in bytes.

    ``stretch`` is what would be better still.
    """

    ours: str
    quantity: str
    base: str
    limit: float
    stretch: float | None = None
    allocators: tuple[str, ...] = BOTH


@dataclass(frozen=True)
class Verdict:
    """``reached`` is None where nothing can be said, and ``words`` say why."""

    goal: Goal
    routing: str
    found: float | None
    reached: bool | None
    words: str


FUSED = "moefold fused"
# By kind of contest and shape. All in bfloat16 with one thread per process.
GOALS: dict[tuple[str, str], tuple[Goal, ...]] = {
    ("layer", "a"): (
        Goal(FUSED, "time", "dense", 1.25),
        Goal(FUSED, "time", BEST_PEER, 1.0),
    ),
    ("layer", "b"): (
        Goal(FUSED, "time", "dense", 1.6, stretch=1.3),
        Goal(FUSED, "time", BEST_PEER, 1 / 2, allocators=(AS_LAUNCHED,)),
        Goal(FUSED, "time", BEST_PEER, 1 / 1.5, allocators=(SAME,)),
        Goal(FUSED, "saved", "", 45 * MIB),
        Goal(FUSED, "peak", BEST_PEER, 1.0),
    ),
    ("layer", "c"): (
        Goal(FUSED, "time", "grouped_mm", 0.9),
        Goal(FUSED, "time", BEST_PEER, 1 / 1.5),
    ),
    ("dispatch", "b"): (
        Goal("all_to_all", "time", "bare all-to-all", 1.2),
        Goal("deduplicated", "time", "bare all-to-all", 0.65),
    ),
    ("ep layer", "b"): (Goal(FASTEST, "time", "dense per rank", 2.0),),
    ("step", "debug_50m"): (
        Goal("moefold", "time", "hand-written", 1.03),
        Goal("moefold", "time", BEST_PEER, 1 / 1.5),
    ),
}


def verdicts(contest: Contest, goals: Sequence[Goal], allocator: str) -> list[Verdict]:
    """Speed in every routing that was measured, memory once."""
    found: list[Verdict] = []
    for goal in goals:
        if allocator not in goal.allocators:
            continue
        if goal.quantity == "time":
            found += [
                _judge(goal, routing, *_speed(contest, goal, routing), contest.rounds) for routing in contest.routings
            ]
        else:
            found.append(_judge(goal, "", *_memory(contest, goal), ROUNDS_FOR_A_VERDICT))
    return found


def _judge(goal: Goal, routing: str, found: float | None, base: str, rounds: int) -> Verdict:
    ours, limit = _shown(goal, found), _shown(goal, goal.limit)
    against = f" of {base}" if base else ""
    where = f", {routing} routing" if routing else ""
    claim = f"{goal.ours}: {goal.quantity} at most {limit}{against}{where}"
    if found is None:
        return Verdict(goal, routing, None, None, f"{claim}: not measured")
    if rounds < ROUNDS_FOR_A_VERDICT:
        words = f"{claim}: {ours} in {rounds} rounds; a verdict needs {ROUNDS_FOR_A_VERDICT}"
        return Verdict(goal, routing, found, None, words)
    reached = found <= goal.limit
    further = ""
    if goal.stretch is not None:
        further = f" (stretch {_shown(goal, goal.stretch)}: {'reached' if found <= goal.stretch else 'missed'})"
    return Verdict(goal, routing, found, reached, f"{claim}: {ours}, {'reached' if reached else 'MISSED'}{further}")


def _shown(goal: Goal, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}x" if goal.base else f"{value / MIB:.1f} MiB"


def _speed(contest: Contest, goal: Goal, routing: str) -> tuple[float | None, str]:
    base = contest.best_peer(routing) if goal.base == BEST_PEER else goal.base
    if base is None:
        return None, BEST_PEER
    ours = contest.fastest("ours", routing) if goal.ours == FASTEST else goal.ours
    ratio = None if ours is None else contest.ratio(ours, base, routing)
    words = f"{BEST_PEER} ({base})" if goal.base == BEST_PEER else base
    return None if ratio is None else ratio.median, words


def _memory(contest: Contest, goal: Goal) -> tuple[float | None, str]:
    standing = contest.find(goal.ours)
    mine = None if standing is None else getattr(standing, goal.quantity)
    if not goal.base or mine is None:
        return mine, ""
    peers = {peer.name: getattr(peer, goal.quantity) for peer in contest.fair_peers()}
    known = {name: value for name, value in peers.items() if value}
    leanest = min(known, key=lambda name: known[name], default=None)
    return (None, BEST_PEER) if leanest is None else (mine / known[leanest], f"{BEST_PEER} ({leanest})")
