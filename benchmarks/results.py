"""Results of a comparison: every run of every candidate, and the statistics of them.

A machine's speed drifts, so candidates are compared round by round: the ratio of two runs of one round, then the median
over the rounds. The spread goes from the first quartile to the third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from moefold.bench.clock import Spread, spread

FIXED, CHANGING = "fixed", "changing"
# Of candidates without a router.
NO_ROUTING = ""
# Fewer rounds give no verdict.
MIN_ROUNDS_FOR_VERDICT = 7
CLOCKS = {"cpu": "CPU time of the process", "wall": "wall time"}


@dataclass(frozen=True)
class CandidateSpec:
    """A candidate's name in its kind's table, its role, and the options that it is built with.

    ``role`` is "baseline" for a lower bound, "moefold", or "peer" for another library.
    """

    name: str
    role: str
    options: dict[str, object]


@dataclass(frozen=True)
class Run:
    """Times of one run, and its page faults."""

    wall: float
    cpu: float
    faults: int


@dataclass(frozen=True)
class CandidateResult:
    """One candidate's measurements. ``failure`` says why it has none, ``remark`` which of them are missing."""

    spec: CandidateSpec
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
        return self.spec.name

    def finished(self, routing: str) -> bool:
        return not self.failure and bool(self.runs.get(routing))


def rounds_run(results: Sequence[CandidateResult]) -> int:
    """The fewest rounds of a routing."""
    return min((len(runs) for result in results if not result.failure for runs in result.runs.values()), default=0)


@dataclass(frozen=True)
class Comparison:
    """All results, in the order of the specs. Peers with an error above ``tolerance`` are not compared with."""

    title: str
    clock: str
    rounds: int
    results: tuple[CandidateResult, ...]
    tolerance: float = float("inf")
    # Mean number of cores that other processes kept busy.
    busy_cores_of_others: float | None = None

    @property
    def routings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(routing for result in self.results for routing in result.runs))

    def find(self, name: str) -> CandidateResult | None:
        return next((result for result in self.results if result.name == name), None)

    def times(self, name: str, routing: str, clock: str | None = None) -> list[float]:
        """Seconds, round by round; empty for one that did not finish."""
        result = self.find(name)
        if result is None or not result.finished(routing):
            return []
        return [getattr(run, clock or self.clock) for run in result.runs[routing]]

    def time(self, name: str, routing: str, clock: str | None = None) -> Spread | None:
        taken = self.times(name, routing, clock)
        return spread(taken) if taken else None

    def ratio(self, name: str, base: str, routing: str) -> Spread | None:
        """How many times longer than ``base`` it takes."""
        times, base_times = self.times(name, routing), self.times(base, routing)
        return spread([a / b for a, b in zip(times, base_times)]) if times and base_times else None

    def fair_peers(self) -> list[CandidateResult]:
        """Peers that compute the same function, within ``tolerance``."""
        peers = [each for each in self.results if each.spec.role == "peer" and not each.failure]
        return [each for each in peers if each.error is None or each.error <= self.tolerance]

    def best_peer(self, routing: str) -> str | None:
        """The one with the smallest median."""
        names = [each.name for each in self.fair_peers() if each.finished(routing)]
        return min(names, key=lambda name: median(self.times(name, routing)), default=None)

    def fastest(self, role: str, routing: str) -> str | None:
        names = [each.name for each in self.results if each.spec.role == role and each.finished(routing)]
        return min(names, key=lambda name: median(self.times(name, routing)), default=None)

    def faults(self, name: str, routing: str) -> int | None:
        result = self.find(name)
        if result is None or not result.finished(routing):
            return None
        return round(median(run.faults for run in result.runs[routing]))
