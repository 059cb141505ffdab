"""The cheapest savings with which a workload fits: those with the fewest seconds per byte first, and none too many.

Savings do not add up (two may free the same tensor, another rank may become the fullest), so a set is judged by whole
predictions. Each saving's price is found alone, in seconds per byte it frees. They are switched on in the order of
those prices, all exact ones before those that change numbers, until the workload fits; then those that turned out to
be unnecessary are switched off again, the dearest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saving_steps import Savings, SavingStep, conflicts, is_on_host, offered, saving, savings_of
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload

# Bytes of a workload with these savings, and its seconds.
Bytes = Callable[[Savings], float]


@dataclass(frozen=True)
class SwitchedOn:
    """A saving of a chosen workload: what the fullest rank would hold more and the step take less without it."""

    words: str
    entries: Savings
    bytes: float
    seconds: float


def by_price(steps: Sequence[SavingStep], start: Savings, size: Bytes, seconds: Bytes) -> tuple[SavingStep, ...]:
    """Those that free anything from ``start``, the cheapest first, those that change numbers last."""
    held, time = size(start), seconds(start)
    prices: dict[str, float] = {}
    for step in steps:
        made = start | step.entries
        if conflicts(made) or made == start:
            continue
        freed = held - size(made)
        if freed > 1e-3 * held:
            prices[step.name] = (seconds(made) - time) / freed
    return tuple(
        sorted((one for one in steps if one.name in prices), key=lambda one: (not one.exact, prices[one.name]))
    )


@lru_cache(maxsize=1024)
def ladder(steps: tuple[SavingStep, ...], start: Savings) -> tuple[Savings, ...]:
    """Sets from ``start`` on, each with one saving more; of two that set the same key the first stays."""
    sets = [start]
    for step in steps:
        made = sets[-1] | step.entries
        if not conflicts(made) and made != sets[-1]:
            sets.append(made)
    return tuple(sets)


def first_that_fits(sets: Sequence[Savings], fits: Callable[[Savings], bool], likely: int = 0) -> int | None:
    """The number of the first set that fits, or None; each holds less than the one before. ``likely`` is a guess."""
    number = min(likely, len(sets) - 1)
    if fits(sets[number]):
        while number and fits(sets[number - 1]):
            number -= 1
        return number
    if not fits(sets[-1]):
        return None
    return next(later for later in range(number + 1, len(sets)) if fits(sets[later]))


def trimmed(found: Savings, start: Savings, steps: Sequence[SavingStep], fits: Callable[[Savings], bool]) -> Savings:
    """Without what is not needed, the dearest first."""
    for step in reversed(steps):
        made = found - (step.entries - start)
        if step.entries <= found and made != found and fits(made):
            found = made
    return found


def cheapest_fit(workload: Workload, capacity: float, host: bool = True) -> Workload | None:
    """The workload with the cheapest savings that fit; None if all of them do not suffice.

    Without ``host`` nothing is sent to the host's memory: on CPU ranks that frees nothing.
    """
    start = savings_of(workload.run)
    known = tuple(step for step in offered(workload) if host or not is_on_host(step.entries))
    steps = by_price(known, start, lambda some: _size(workload, some), lambda some: _time(workload, some))

    def fits(some: Savings) -> bool:
        return _size(workload, some) <= capacity

    sets = ladder(steps, start)
    found = first_that_fits(sets, fits)
    return None if found is None else saving(workload, trimmed(sets[found], start, steps, fits))


def switched_on(workload: Workload, start: Savings) -> tuple[SwitchedOn, ...]:
    """What each saving beyond ``start`` frees and costs, the largest first."""
    now = savings_of(workload.run)
    held, seconds = _size(workload, now), _time(workload, now)
    found = []
    for step in offered_on(workload, now - start):
        without = now - (step.entries - start)
        found.append(
            SwitchedOn(step.words, step.entries, _size(workload, without) - held, seconds - _time(workload, without))
        )
    return tuple(sorted(found, key=lambda one: -one.bytes))


def offered_on(workload: Workload, entries: Savings) -> tuple[SavingStep, ...]:
    bare = saving(workload, savings_of(workload.run) - entries)
    return tuple(step for step in offered(bare) if step.entries <= entries)


def _size(workload: Workload, some: Savings) -> float:
    return predict_memory(saving(workload, some)).total


def _time(workload: Workload, some: Savings) -> float:
    return predict_time(saving(workload, some)).step_seconds
