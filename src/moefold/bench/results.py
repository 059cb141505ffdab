"""What a contest found: every run of every contestant, and the numbers that are made of them.

A machine's speed drifts, so contestants are compared round by round: the ratio of two neighbours in time, then the
median over the rounds. The spread is the middle half of the rounds, from the first quartile to the third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

FIXED, CHANGING = "fixed", "changing"
# What has no routing to change.
ALIKE = ""
# Fewer rounds say too little for a verdict.
ROUNDS_FOR_A_VERDICT = 7
CLOCKS = {"cpu": "CPU time of the process", "wall": "wall time"}


@dataclass(frozen=True)
class Entrant:
    """Who takes part: its name in its kind's table, how it is to be built, and what it is.

    ``role`` is "bare" for the engine alone, "ours", or "peer".
    """

    name: str
    role: str
    options: dict[str, object]


@dataclass(frozen=True)
class Run:
    """One turn."""

    wall: float
    cpu: float
    faults: int


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Standing:
    """What one contestant did. ``failure`` says why there is nothing, or no more, and ``remark`` what is missing."""

    entrant: Entrant
    runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    allocator: str = ""
    saved: int | None = None
    peak: int | None = None
    held: int | None = None
    error: float | None = None
    failure: str = ""
    remark: str = ""

    @property
    def name(self) -> str:
        return self.entrant.name

    def finished(self, routing: str) -> bool:
        return not self.failure and bool(self.runs.get(routing))


@dataclass(frozen=True)
class Contest:
    """All standings, in the order in which they were entered. ``tolerance`` is the largest error of a fair answer."""

    title: str
    clock: str
    rounds: int
    standings: tuple[Standing, ...]
    tolerance: float = float("inf")
    # How many cores other programs kept busy meanwhile.
    others: float | None = None

    @property
    def routings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(routing for standing in self.standings for routing in standing.runs))

    def find(self, name: str) -> Standing | None:
        return next((standing for standing in self.standings if standing.name == name), None)

    def times(self, name: str, routing: str, clock: str | None = None) -> list[float]:
        """Seconds, round by round; empty for one that did not finish."""
        standing = self.find(name)
        if standing is None or not standing.finished(routing):
            return []
        return [getattr(run, clock or self.clock) for run in standing.runs[routing]]

    def time(self, name: str, routing: str, clock: str | None = None) -> Spread | None:
        taken = self.times(name, routing, clock)
        return spread(taken) if taken else None

    def ratio(self, name: str, base: str, routing: str) -> Spread | None:
        """How many times longer than ``base`` it takes."""
        mine, other = self.times(name, routing), self.times(base, routing)
        return spread([a / b for a, b in zip(mine, other)]) if mine and other else None

    def fair_peers(self) -> list[Standing]:
        """Those that compute the same function: one that rounds more than the format asks for is not counted."""
        peers = [each for each in self.standings if each.entrant.role == "peer" and not each.failure]
        return [each for each in peers if each.error is None or each.error <= self.tolerance]

    def best_peer(self, routing: str) -> str | None:
        """The one with the smallest median."""
        names = [each.name for each in self.fair_peers() if each.finished(routing)]
        return min(names, key=lambda name: median(self.times(name, routing)), default=None)

    def fastest(self, role: str, routing: str) -> str | None:
        names = [each.name for each in self.standings if each.entrant.role == role and each.finished(routing)]
        return min(names, key=lambda name: median(self.times(name, routing)), default=None)

    def faults(self, name: str, routing: str) -> int | None:
        standing = self.find(name)
        if standing is None or not standing.finished(routing):
            return None
        return round(median(run.faults for run in standing.runs[routing]))


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)
