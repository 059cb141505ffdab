"""How long the slowest pipeline rank waits in a step, by the order of microbatches.

An order of enough microbatches has a beginning and an end that do not depend on how many there are; between them the
slowest rank never waits. So its waiting time is a number of units for each order, a unit being one third of a stage's
time for one microbatch (forward, input gradient and weight gradient cost about the same). 1F1B and interleaved 1F1B
wait 3 (P - 1) units, by their closed form; other orders are simulated once.
"""

from __future__ import annotations

from functools import lru_cache

from moefold.schedule.names import schedule_named
from moefold.schedule.simulate import Durations, simulate

_CLOSED = ("gpipe", "1f1b", "interleaved")
PARTS = 3


@lru_cache(maxsize=1024)
def bubble_units(schedule: str, ranks: int, virtual: int) -> float:
    """Thirds of a stage's time."""
    if ranks == 1:
        return 0.0
    if schedule in _CLOSED:
        return float(PARTS * (ranks - 1))
    return simulated_units(schedule, ranks, virtual, 2 * ranks)


def simulated_units(schedule: str, ranks: int, virtual: int, microbatches: int) -> float:
    """The same by simulation: the time of the order less what the busiest rank has to do."""
    order = schedule_named(schedule).build(ranks, virtual, microbatches)
    timeline = simulate(order, Durations())
    return timeline.finish - max(timeline.busy)
