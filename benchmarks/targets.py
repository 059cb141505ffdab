"""Performance targets of the project: a quantity, what it is compared with, and its limit.

A target holds for one shape in one setting. "best peer" is the fastest library that computes the same function, and for
memory the one with the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results import MIN_ROUNDS_FOR_VERDICT, Comparison

BEST_PEER = "best peer"
# The fastest of moefold's candidates.
FASTEST = "moefold, fastest"
AS_LAUNCHED, SAME = "as launched", "the same for all"
BOTH = (AS_LAUNCHED, SAME)
MIB = 2**20


@dataclass(frozen=True)
class Target:
    """``name`` may take ``limit`` times what ``base`` takes; without a base the limit is in bytes.

    ``stretch`` is a tighter limit that is reported and not required.
    """

    name: str
    quantity: str
    base: str
    limit: float
    stretch: float | None = None
    allocators: tuple[str, ...] = BOTH


@dataclass(frozen=True)
class Verdict:
    """``reached`` is None where it was not measured, and ``text`` says why."""

    target: Target
    routing: str
    found: float | None
    reached: bool | None
    text: str


FUSED = "moefold fused"
# By kind of comparison and shape. All in bfloat16 with one thread per process.
TARGETS: dict[tuple[str, str], tuple[Target, ...]] = {
    ("layer", "a"): (
        Target(FUSED, "time", "dense", 1.25),
        Target(FUSED, "time", BEST_PEER, 1.0),
    ),
    ("layer", "b"): (
        Target(FUSED, "time", "dense", 1.6, stretch=1.3),
        Target(FUSED, "time", BEST_PEER, 1 / 2, allocators=(AS_LAUNCHED,)),
        Target(FUSED, "time", BEST_PEER, 1 / 1.5, allocators=(SAME,)),
        Target(FUSED, "saved", "", 45 * MIB),
        Target(FUSED, "peak", BEST_PEER, 1.0),
    ),
    ("layer", "c"): (
        Target(FUSED, "time", "grouped_mm", 0.9),
        Target(FUSED, "time", BEST_PEER, 1 / 1.5),
    ),
    ("dispatch", "b"): (
        Target("all_to_all", "time", "bare all-to-all", 1.2),
        Target("deduplicated", "time", "bare all-to-all", 0.65),
    ),
    ("ep layer", "b"): (Target(FASTEST, "time", "dense per rank", 1.6),),
    ("step", "debug_50m"): (
        Target("moefold", "time", "hand-written", 1.03),
        Target("moefold", "time", BEST_PEER, 1 / 1.5),
    ),
}


def verdicts(comparison: Comparison, targets: Sequence[Target], allocator: str) -> list[Verdict]:
    """Speed in every routing that was measured, memory once."""
    found: list[Verdict] = []
    for target in targets:
        if allocator not in target.allocators:
            continue
        if target.quantity == "time":
            found += [
                _verdict(target, routing, *_speed(comparison, target, routing), comparison.rounds)
                for routing in comparison.routings
            ]
        else:
            found.append(_verdict(target, "", *_memory(comparison, target), MIN_ROUNDS_FOR_VERDICT))
    return found


def _verdict(target: Target, routing: str, found: float | None, base: str, rounds: int) -> Verdict:
    value, limit = _format(target, found), _format(target, target.limit)
    against = f" of {base}" if base else ""
    where = f", {routing} routing" if routing else ""
    claim = f"{target.name}: {target.quantity} at most {limit}{against}{where}"
    if found is None:
        return Verdict(target, routing, None, None, f"{claim}: not measured")
    if rounds < MIN_ROUNDS_FOR_VERDICT:
        text = f"{claim}: {value} in {rounds} rounds; a verdict needs {MIN_ROUNDS_FOR_VERDICT}"
        return Verdict(target, routing, found, None, text)
    reached = found <= target.limit
    stretch_text = ""
    if target.stretch is not None:
        stretch_text = (
            f" (stretch {_format(target, target.stretch)}: {'reached' if found <= target.stretch else 'missed'})"
        )
    return Verdict(
        target, routing, found, reached, f"{claim}: {value}, {'reached' if reached else 'MISSED'}{stretch_text}"
    )


def _format(target: Target, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}x" if target.base else f"{value / MIB:.1f} MiB"


def _speed(comparison: Comparison, target: Target, routing: str) -> tuple[float | None, str]:
    base = comparison.best_peer(routing) if target.base == BEST_PEER else target.base
    if base is None:
        return None, BEST_PEER
    name = comparison.fastest("moefold", routing) if target.name == FASTEST else target.name
    ratio = None if name is None else comparison.ratio(name, base, routing)
    against = f"{BEST_PEER} ({base})" if target.base == BEST_PEER else base
    return None if ratio is None else ratio.median, against


def _memory(comparison: Comparison, target: Target) -> tuple[float | None, str]:
    result = comparison.find(target.name)
    value = None if result is None else getattr(result, target.quantity)
    if not target.base or value is None:
        return value, ""
    peers = {peer.name: getattr(peer, target.quantity) for peer in comparison.fair_peers()}
    known = {peer: size for peer, size in peers.items() if size}
    smallest = min(known, key=lambda name: known[name], default=None)
    return (None, BEST_PEER) if smallest is None else (value / known[smallest], f"{BEST_PEER} ({smallest})")
