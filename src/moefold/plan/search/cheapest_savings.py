"""The cheapest savings with which a workload fits: those with the fewest seconds per byte first, and none too many.

`Predictions` asks for them on behalf of a search, for one candidate after the other, and keeps every answer. Savings
take time, so a candidate without any is predicted first: if that is not fast enough, its memory is not asked for.

Savings do not add up (two may free the same tensor, another rank may become the fullest), so a set is judged by whole
predictions. Each saving's price is found alone, in seconds per byte it frees. They are switched on in the order of
those prices, all exact ones before those that change numbers, until the workload fits; then those that turned out to
be unnecessary are switched off again, the dearest first. Where a search comes near the fastest, it leaves out what was
switched on first wherever the last one suffices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf

from moefold.config.parallel import Sharding
from moefold.plan.memory.peak import bytes_up_to, least_bytes, predict_memory, usable_bytes
from moefold.plan.memory.saving_steps import (
    Savings,
    SavingStep,
    conflicts,
    is_on_host,
    is_retained,
    offered,
    saving,
    savings_of,
    steps_of,
    why_no_savings,
)
from moefold.plan.search.candidates import described, why_illegal, workload_of_choice
from moefold.plan.search.enumeration import changes_numbers, first_choice, milestones
from moefold.plan.search.space import LayoutChoice, Limits, Recompute, Space
from moefold.plan.timing.step_time import step_time
from moefold.plan.workload import Workload
from moefold.units import format_bytes

_ATTENTION: Recompute = frozenset({"attention"})
# What a saving may take off the step (less travels) instead of adding to it, so that bounds stay bounds.
_QUICKER = 1.02
# Of candidates that take longer than so many times the fastest, savings are not looked at one by one.
_NEARLY = 1.25
# How many sets of savings are tried of those that made a step the fastest.
_WINNERS = 3
# Bytes of a workload with these savings, and its seconds.
Bytes = Callable[[Savings], float]


@dataclass(frozen=True)
class Candidate:
    """A choice with what was predicted for it."""

    choice: LayoutChoice
    workload: Workload
    seconds: float
    bytes: float


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
    start = savings_of(workload.run, workload.is_own)
    known = tuple(step for step in offered(workload) if host or not is_on_host(step.entries))
    steps = by_price(known, start, lambda some: _size(workload, some), lambda some: _time(workload, some))

    def fits(some: Savings) -> bool:
        return _size(workload, some) <= capacity

    sets = ladder(steps, start)
    found = first_that_fits(sets, fits)
    return None if found is None else saving(workload, trimmed(sets[found], start, steps, fits))


def _size(workload: Workload, some: Savings) -> float:
    return predict_memory(saving(workload, some)).total


def _time(workload: Workload, some: Savings) -> float:
    return step_time(saving(workload, some)).total


# ---- of one candidate after the other ----


class Predictions:
    """Those made so far, and the fastest candidate that fits."""

    def __init__(self, template: Workload, limits: Limits, space: Space, headroom: float) -> None:
        self.template, self.limits, self.space = template, limits, space
        # Bytes where a candidate fits, else a lower bound that exceeds the capacity.
        self.held: dict[LayoutChoice, float] = {}
        self.timed: dict[LayoutChoice, Candidate] = {}
        self.headroom = headroom
        self.capacity = usable_bytes(template) * (1 - headroom)
        # Seconds of the fastest candidate that fits.
        self.best = inf
        # Whether savings are looked at once more, one by one.
        self.closely = False
        self._seconds: dict[LayoutChoice, float] = {}
        self._last: tuple[LayoutChoice, Workload] | None = None
        self.milestones = milestones(space.recompute)
        self._known = tuple(step for step in steps_of(template) if step.entries in space.savings[1:])
        # Whether all single steps that save what phases do may be chosen.
        self._every_step = all(step in self._known for step in offered(template) if is_retained(step.entries))
        self._steps: dict[Sharding, tuple[SavingStep, ...]] = {}
        # How many savings the last layout needed: the next one needs about as many.
        self._likely: dict[tuple[Sharding, int], int] = {}
        self._lightest: dict[LayoutChoice, Candidate | None] = {}
        self._exceeded: dict[LayoutChoice, bool] = {}
        # Recomputed phases and savings of the candidates that were the fastest, the last one first.
        self._winners: list[tuple[Recompute, Savings]] = []

    def workload(self, choice: LayoutChoice) -> Workload:
        if self._last is None or self._last[0] != choice:
            self._last = choice, workload_of_choice(choice, self.template, self.limits, self.space)
        return self._last[1]

    def seconds(self, choice: LayoutChoice) -> float:
        """Of candidates that do not fit too; infinite with slots in which no clone is worth its exchange."""
        if choice not in self._seconds:
            workload = self.workload(choice)
            useless = choice.clones and not workload.clones.clones
            self._seconds[choice] = inf if useless else step_time(workload).total
        return self._seconds[choice]

    def without_savings(self, choice: LayoutChoice) -> LayoutChoice:
        return choice._replace(savings=self.space.savings[0], recompute=self.space.recompute[0])

    def bound(self, choice: LayoutChoice) -> float:
        """Seconds that no savings make less."""
        return self.seconds(self.without_savings(choice)) / _QUICKER

    def size(self, choice: LayoutChoice) -> float:
        """Of candidates that do not fit too."""
        self.held[choice] = predict_memory(self.workload(choice)).total
        return self.held[choice]

    def fits(self, choice: LayoutChoice) -> bool:
        if choice not in self.held:
            self.held[choice] = bytes_up_to(self.workload(choice), self.capacity)
        return self.held[choice] <= self.capacity

    def is_legal(self, choice: LayoutChoice) -> bool:
        return why_illegal(choice, self.limits, self.space) is None

    def time(self, choice: LayoutChoice, within: float = inf) -> Candidate | None:
        """None if it is illegal, takes longer than ``within``, or does not fit."""
        if choice not in self.timed:
            if not self.is_legal(choice):
                return None
            seconds = self.seconds(choice)
            if seconds > within or seconds == inf or not self.fits(choice):
                return None
            self.timed[choice] = Candidate(choice, self.workload(choice), seconds, self.held[choice])
            if seconds < self.best:
                self._win(choice, seconds)
        return self.timed[choice]

    def _win(self, choice: LayoutChoice, seconds: float) -> None:
        self.best, pair = seconds, (choice.recompute, choice.savings)
        if not changes_numbers(choice.savings):
            self._winners = [pair, *(each for each in self._winners if each != pair)][:_WINNERS]

    def lightest(self, choice: LayoutChoice, within: float = inf) -> Candidate | None:
        """With the cheapest savings among those that fit; those that change numbers only where nothing else does.

        None if none fits, or none could be faster than ``within``.
        """
        bare = self.without_savings(choice)
        if bare not in self._lightest:
            if within < inf and self.bound(bare) > within:
                return None
            self._lightest[bare] = self._find_lightest(bare)
        return self._lightest[bare]

    def look_closely(self) -> None:
        """From now on, and once more at what was looked at."""
        if not self.closely:
            self.closely = True
            self._lightest.clear()

    def _find_lightest(self, bare: LayoutChoice) -> Candidate | None:
        if self._exceeded_by_states(bare):
            return None
        if self.is_legal(bare) and self.fits(bare):
            return self.time(bare)
        found = self._first_that_fits(bare)
        # Prices differ between layouts: what made another one the fastest may be cheaper here too.
        for recompute, savings in tuple(self._winners):
            other = self.time(bare._replace(recompute=recompute, savings=savings), found.seconds if found else inf)
            found = other if found is None or (other and other.seconds < found.seconds) else found
        return found

    def _exceeded_by_states(self, bare: LayoutChoice) -> bool:
        """Whether weights, gradients and optimizer states alone are too many, with all savings there are of them."""
        usual = first_choice(self.space)
        same = bare._replace(dispatcher=usual.dispatcher, graphs=usual.graphs, clones=usual.clones)
        if same not in self._exceeded:
            self._exceeded[same] = self._states_of_most_savings(bare) > self.capacity
        return self._exceeded[same]

    def _states_of_most_savings(self, bare: LayoutChoice) -> float:
        steps = self._legal(bare, self._known)
        of_states = bare.savings.union(*(step.entries for step in steps if not is_retained(step.entries)))
        bound = least_bytes(self.workload(bare._replace(savings=of_states)))
        if bound > self.capacity:
            # Counted as one candidate, with everything that saves.
            phases = (bare._replace(recompute=recompute) for recompute in reversed(self.milestones))
            most = next(filter(self.is_legal, phases), bare)
            self.held[most._replace(savings=ladder(self._legal(most, steps), bare.savings)[-1])] = bound
        return bound

    def _first_that_fits(self, bare: LayoutChoice) -> Candidate | None:
        steps = self.steps_by_price(bare)
        exact = tuple(step for step in steps if step.exact)
        if any(is_retained(step.entries) for step in steps):
            # Single steps cost less than whole phases, and save less; queries, keys and values have one only in MLA.
            phases = [self.space.recompute[0]]
            if not self.limits.latent and _ATTENTION in self.space.recompute:
                phases += [self.milestones[-1], _ATTENTION]
            starts = [bare._replace(recompute=phase) for phase in phases]
            starts = list(dict.fromkeys(starts if self._every_step else [*starts, *self._with_most(bare)]))
            return self._fastest_of(starts, exact) or self._fastest_of(starts, steps)
        return self._with_phases(bare) or self._fastest_of(self._with_most(bare), steps)

    def _fastest_of(self, starts: Sequence[LayoutChoice], steps: tuple[SavingStep, ...]) -> Candidate | None:
        found = (self._with_savings(start, steps) for start in starts)
        return min((each for each in found if each is not None), key=lambda each: each.seconds, default=None)

    def _with_phases(self, choice: LayoutChoice) -> Candidate | None:
        """The recompute set that is cheapest among those that fit."""
        sets = (choice._replace(recompute=recompute) for recompute in self.milestones)
        legal = [made for made in sets if self.is_legal(made)]
        if not legal or not self.fits(legal[-1]):
            return self._with_other_phases(choice, legal[-1].recompute if legal else frozenset())
        return self.time(next(made for made in legal if self.fits(made)))

    def _with_other_phases(self, choice: LayoutChoice, most: Recompute) -> Candidate | None:
        """Where the most of these does not suffice: of sets that are no part of it the first that fits."""
        others = [each for each in self.space.recompute if not (each <= most or "full" in most)]
        for recompute in others:
            made = choice._replace(recompute=recompute)
            if self.is_legal(made) and self.fits(made):
                return self.time(made)
        return None

    def _with_most(self, bare: LayoutChoice) -> list[LayoutChoice]:
        """With the legal sets of phases that are no part of another one: which is largest depends on the layout."""
        legal = [each for each in self.space.recompute if self.is_legal(bare._replace(recompute=each))]
        largest = [each for each in reversed(legal) if not any(each < other for other in legal)]
        return [bare._replace(recompute=each) for each in largest]

    def _with_savings(self, choice: LayoutChoice, steps: tuple[SavingStep, ...]) -> Candidate | None:
        legal = self._legal(choice, steps)
        sets, where = ladder(legal, choice.savings), (choice.sharding, len(legal))
        number = first_that_fits(
            sets, lambda some: self.fits(choice._replace(savings=some)), self._likely.get(where, len(sets) // 2)
        )
        # Where nothing fits, the next one may not fit either, which its last set says.
        self._likely[where] = len(sets) - 1 if number is None else number
        found = None if number is None else self.time(choice._replace(savings=sets[number]))
        if found is None or not self.closely or found.seconds > _NEARLY * self.best:
            return found
        return self._with_fewer(found)

    def _with_fewer(self, found: Candidate) -> Candidate:
        """Without savings that were passed on the way to the last one, if that one suffices. Offloads are free alone,
        and share the path to the host."""
        best = found
        for entry in sorted(found.choice.savings - self.space.savings[0]):
            fewer = best.choice._replace(savings=best.choice.savings - {entry})
            if self.seconds(fewer) < best.seconds:
                best = self.time(fewer) or best
        return best

    def steps_by_price(self, choice: LayoutChoice) -> tuple[SavingStep, ...]:
        """Found once per sharding, on the first layout that needs them: prices differ little between layouts."""
        if choice.sharding not in self._steps:

            def size(some: Savings) -> float:
                return self.size(plain._replace(savings=some))

            def seconds(some: Savings) -> float:
                return step_time(self.workload(plain._replace(savings=some))).total

            plain = choice._replace(recompute=self.space.recompute[0])
            legal = self._legal(plain, self._known)
            self._steps[choice.sharding] = by_price(legal, plain.savings, size, seconds) if legal else ()
        return self._steps[choice.sharding]

    def _legal(self, choice: LayoutChoice, steps: Iterable[SavingStep]) -> tuple[SavingStep, ...]:
        """Those that a legal candidate may add."""
        savings, beside = choice.savings, (choice.sharding, choice.recompute, choice.cp, self.limits.ours)
        return tuple(step for step in steps if why_no_savings(savings | step.entries, *beside) is None)

    def trim(self, found: Candidate) -> Candidate | None:
        """Without savings that turn out to be unnecessary."""
        choice, start = found.choice, self.space.savings[0]
        kept = trimmed(
            choice.savings,
            start,
            self.steps_by_price(choice),
            lambda some: self.fits(choice._replace(savings=some)),
        )
        return self.time(choice._replace(savings=kept))

    def rank(self, each: Candidate) -> tuple[float, float, int]:
        """Fastest first; among equals the leanest, then the one of most usual values."""
        places = (
            getattr(self.space, name).index(value)
            for name, value in zip(LayoutChoice._fields, each.choice)
            if name != "savings" and value in getattr(self.space, name)
        )
        return each.seconds, each.bytes, sum(places) + len(each.choice.savings)

    def _leanest(self) -> LayoutChoice:
        """The first of those with fewest bytes: no candidate is leaner than its bound, so few are predicted whole."""
        order = {choice: number for number, choice in enumerate(self.held)}
        found: list[tuple[float, int, LayoutChoice]] = []
        for bound, number, choice in sorted((self.held[choice], order[choice], choice) for choice in order):
            if found and min(found)[0] < bound:
                break
            found.append((self.size(choice), number, choice))
        return min(found)[2]

    def why_nothing(self) -> str:
        if self.held:
            least = self._leanest()
            return (
                f"nothing fits: of {len(self.held):,} candidates the leanest needs "
                f"{format_bytes(self.held[least])} of {format_bytes(self.capacity)} "
                f"({described(least)})"
            )
        start = first_choice(self.space)
        sizes = product(self.space.pp, self.space.tp, self.space.ep)
        grids = (start._replace(pp=pp, tp=tp, ep=ep) for pp, tp, ep in sizes)
        reasons = Counter(why_illegal(made, self.limits, self.space) for made in grids)
        listed = "; ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common(4) if reason)
        return f"no legal layout: {listed}"
