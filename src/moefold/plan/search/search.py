"""The search: which legal candidate makes the fastest step that fits, and the Pareto set of time and memory.

There are far too many candidates to predict them all (billions for thousands of ranks), and options interact, so the
search goes from coarse to fine:

1. every grid worth trying, with usual options and the lightest recompute that fits: one prediction each;
2. the best grids of every kind (per pp, ep and tp, and overall), each with its options varied one at a time;
3. the best few of those, by hill climbing: every legal neighbour in any option, until none is faster.

Memory is predicted first, because it is cheap and rules most out. Everything predicted on the way is kept, and those
that no other beats in both time and memory are the Pareto set. Nothing is random.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moefold.config.parallel import Sharding
from moefold.errors import MoefoldError
from moefold.plan.memory.peak import bytes_up_to, predict_memory, usable_bytes
from moefold.plan.memory.saving_steps import STEPS, Savings, SavingStep, is_retained, why_no_savings
from moefold.plan.search.candidates import (
    LayoutChoice,
    Limits,
    choice_of_workload,
    limits_of,
    why_illegal,
    workload_of_choice,
)
from moefold.plan.search.cheapest_savings import by_price, first_that_fits, ladder, trimmed
from moefold.plan.search.enumeration import first_choice, layouts, neighbours, other_orders, presets
from moefold.plan.search.space import Recompute, Space, usual_space
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS
from moefold.units import format_bytes

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]
# How many grids are looked at closer, and how many of those may climb.
_BEST_OVERALL, _BEST_OF_A_KIND, _CLIMBERS = 16, 3, 6
_OPTIONS = ("format", "dispatcher", "graphs", "sharding", "sequences", "replicate", "clones")
_ATTENTION: Recompute = frozenset({"attention"})
# Steps of a climb; each looks at about a hundred neighbours.
_LONGEST_CLIMB = 8


class NothingFitsError(MoefoldError):
    """No legal candidate fits, or none is legal; the message says which rules or bytes are in the way."""

    def __init__(self, message: str, lacks_memory: bool) -> None:
        super().__init__(message)
        self.lacks_memory = lacks_memory


@dataclass(frozen=True)
class Candidate:
    """A choice with what was predicted for it."""

    choice: LayoutChoice
    workload: Workload
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Result:
    """Best first; `pareto` from the fastest to the leanest."""

    ranked: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    # The template's own choice, if it is legal and fits.
    own: Candidate | None
    num_layouts: int
    num_memory: int
    num_time: int
    wall_seconds: float

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest that cuts the work differently, not just an option away."""
        return next((each for each in self.ranked if grid_of(each.choice) != grid_of(self.best.choice)), None)


def grid_of(choice: LayoutChoice) -> tuple[int, ...]:
    return choice[:6]


def search(
    template: Workload,
    space: Space | None = None,
    progress: Progress | None = None,
    from_own: bool = True,
    headroom: float = 0.0,
) -> Result:
    """The best candidates for the template's model, cluster, batch and framework.

    With ``from_own`` the template's own choice is one of the starts, so the answer is never slower than it.
    ``headroom`` is the share of the GPU's memory that must stay free.
    """
    began = time.monotonic()
    space = space or usual_space(template)
    looked = _Looked(template, limits_of(template), space, headroom)
    say = progress or (lambda what, done, total: None)
    coarse = _sweep(looked, say, from_own)
    if not coarse:
        raise NothingFitsError(looked.why_nothing(), lacks_memory=bool(looked.held))
    varied = [_vary(looked, start) for start in _counted(_starts(coarse), "varying options", say)]
    for start in _counted(_fastest(varied, _CLIMBERS), "climbing", say):
        looked.trim(_climb(looked, start))
    ranked = tuple(sorted(looked.timed.values(), key=looked.rank))
    own = looked.timed.get(choice_of_workload(template))
    found = (len(coarse), len(looked.held), len(looked.timed))
    return Result(ranked, pareto(ranked), own, *found, time.monotonic() - began)


def anything_fits(template: Workload, space: Space, headroom: float, progress: Progress | None = None) -> bool:
    """Whether `search` would find a candidate; without looking for the best one."""
    looked = _Looked(template, limits_of(template), space, headroom)
    starts = _counted(list(layouts(looked.limits, space)), "more GPUs", progress or (lambda what, done, total: None))
    return any(looked.lightest(start) is not None for start in starts)


def pareto(ranked: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Of candidates in the order of their time, those that hold less than every faster one."""
    kept: list[Candidate] = []
    for each in ranked:
        if not kept or each.bytes < kept[-1].bytes * (1 - 1e-9):
            kept.append(each)
    return tuple(kept)


class _Looked:
    """Predictions made so far."""

    def __init__(self, template: Workload, limits: Limits, space: Space, headroom: float) -> None:
        self.template, self.limits, self.space = template, limits, space
        # Bytes where a candidate fits, else a lower bound that exceeds the capacity.
        self.held: dict[LayoutChoice, float] = {}
        self.timed: dict[LayoutChoice, Candidate] = {}
        self.capacity = usable_bytes(template) * (1 - headroom)
        self.milestones = _milestones(space.recompute)
        self._steps: dict[Sharding, tuple[SavingStep, ...]] = {}
        # How many savings the last layout needed: the next one needs about as many.
        self._likely: dict[tuple[Sharding, int], int] = {}
        self._lightest: dict[LayoutChoice, Candidate | None] = {}

    def workload(self, choice: LayoutChoice) -> Workload:
        return workload_of_choice(choice, self.template, self.limits, self.space)

    def size(self, choice: LayoutChoice) -> float:
        """Of candidates that do not fit too."""
        self.held[choice] = predict_memory(self.workload(choice)).total
        return self.held[choice]

    def fits(self, choice: LayoutChoice) -> bool:
        if choice not in self.held:
            self.held[choice] = bytes_up_to(self.workload(choice), self.capacity)
        return self.held[choice] <= self.capacity

    def time(self, choice: LayoutChoice) -> Candidate | None:
        """None if it does not fit, or has slots in which no clone is worth its exchange."""
        if choice not in self.timed and self.fits(choice):
            workload = self.workload(choice)
            if choice.clones and not workload.clones.clones:
                return None
            self.timed[choice] = Candidate(choice, workload, predict_time(workload).step_seconds, self.held[choice])
        return self.timed.get(choice)

    def lightest(self, choice: LayoutChoice) -> Candidate | None:
        """With the cheapest savings among those that fit; those that change numbers only where nothing else does."""
        bare = choice._replace(savings=self.space.savings[0])
        if bare not in self._lightest:
            self._lightest[bare] = self._find_lightest(bare)
        return self._lightest[bare]

    def _find_lightest(self, bare: LayoutChoice) -> Candidate | None:
        if self.fits(bare):
            return self.time(bare)
        steps = self.steps_by_price(bare)
        exact = tuple(step for step in steps if step.exact)
        if any(is_retained(step.entries) for step in steps):
            # Single steps cost less than whole phases, and save less; queries, keys and values have one only in MLA.
            phases = [self.space.recompute[0]]
            if not self.limits.latent and _ATTENTION in self.space.recompute:
                phases += [self.milestones[-1], _ATTENTION]
            starts = [bare._replace(recompute=phase) for phase in dict.fromkeys(phases)]
            return self._fastest_of(starts, exact) or self._fastest_of(starts, steps)
        found = self._with_phases(bare)
        return found or self._with_savings(bare._replace(recompute=self.milestones[-1]), steps)

    def _fastest_of(self, starts: Sequence[LayoutChoice], steps: tuple[SavingStep, ...]) -> Candidate | None:
        found = (self._with_savings(start, steps) for start in starts)
        return min((each for each in found if each is not None), key=lambda each: each.seconds, default=None)

    def _with_phases(self, choice: LayoutChoice) -> Candidate | None:
        """The recompute set that is cheapest among those that fit."""
        if not self.fits(choice._replace(recompute=self.milestones[-1])):
            return None
        found = (self.time(choice._replace(recompute=recompute)) for recompute in self.milestones)
        return next((each for each in found if each is not None), None)

    def _with_savings(self, choice: LayoutChoice, steps: tuple[SavingStep, ...]) -> Candidate | None:
        legal = self._legal(choice, steps)
        sets, where = ladder(legal, choice.savings), (choice.sharding, len(legal))
        number = first_that_fits(
            sets, lambda some: self.fits(choice._replace(savings=some)), self._likely.get(where, len(sets) // 2)
        )
        if number is None:
            return None
        self._likely[where] = number
        return self.time(choice._replace(savings=sets[number]))

    def steps_by_price(self, choice: LayoutChoice) -> tuple[SavingStep, ...]:
        """Found once per sharding, on the first layout that needs them: prices differ little between layouts."""
        if choice.sharding not in self._steps:

            def size(some: Savings) -> float:
                return self.size(plain._replace(savings=some))

            def seconds(some: Savings) -> float:
                return predict_time(self.workload(plain._replace(savings=some))).step_seconds

            plain = choice._replace(recompute=self.space.recompute[0])
            known = (step for step in STEPS if step.entries in self.space.savings[1:])
            legal = self._legal(plain, known)
            self._steps[choice.sharding] = by_price(legal, plain.savings, size, seconds) if legal else ()
        return self._steps[choice.sharding]

    @staticmethod
    def _legal(choice: LayoutChoice, steps: Iterable[SavingStep]) -> tuple[SavingStep, ...]:
        """Those that a legal candidate may add."""
        savings, beside = choice.savings, (choice.sharding, choice.recompute, choice.cp)
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
        reasons = Counter(why_illegal(made, self.limits, self.space) for made in _grids(start, self.space))
        listed = "; ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common(4) if reason)
        return f"no legal layout: {listed}"


def _grids(start: LayoutChoice, space: Space) -> Iterator[LayoutChoice]:
    for pp in space.pp:
        for tp in space.tp:
            for ep in space.ep:
                yield start._replace(pp=pp, tp=tp, ep=ep)


def described(choice: LayoutChoice) -> str:
    """A candidate in a few words: what it cuts, and the options that are on."""
    axes = ("tp", "cp", "pp", "vpp", "ep", "etp")
    sizes = [f"{axis}{getattr(choice, axis)}" for axis in axes if getattr(choice, axis) > 1] or ["dp only"]
    options = [f"mbs{choice.sequences}", choice.format, choice.dispatcher * (choice.dispatcher != "local")]
    options += [order for order in choice[-2:] if order not in (DENSE_ORDERS[0], EXPERT_ORDERS[0])]
    options += [f"{choice.clones} clones a rank" if choice.clones else ""]
    options += ["overlap" * choice.ep_overlap, "delayed wgrad" * choice.delay_wgrad]
    options += [f"{choice.graphs} graphs" if choice.graphs != "none" else "", choice.sharding]
    options += [f"x{choice.replicate} copies" if choice.replicate > 1 else ""]
    options += [f"recompute {'+'.join(sorted(choice.recompute))}" if choice.recompute else ""]
    options += sorted(entry.removeprefix("memory.").removeprefix("precision.") for entry in choice.savings)
    return " ".join(filter(None, [*sizes, *options]))


# ---- from coarse to fine ----


def _sweep(looked: _Looked, say: Progress, from_own: bool) -> list[Candidate]:
    starts = list(layouts(looked.limits, looked.space))
    own = choice_of_workload(looked.template)
    if from_own and why_illegal(own, looked.limits, looked.space) is None and _within(own, looked.space):
        starts.append(own)
    found = (looked.lightest(start) for start in _counted(starts, "grids", say))
    return [each for each in found if each is not None]


def _within(choice: LayoutChoice, space: Space) -> bool:
    names = (name for name in choice._fields if name != "savings")
    return choice.savings >= space.savings[0] and all(getattr(choice, name) in getattr(space, name) for name in names)


def _starts(coarse: Sequence[Candidate]) -> list[Candidate]:
    """The fastest overall, and the fastest of every pp, ep and tp."""
    ordered = sorted(coarse, key=lambda each: each.seconds)
    chosen = dict.fromkeys(each.choice for each in ordered[:_BEST_OVERALL])
    for axis in ("pp", "ep", "tp"):
        seen: Counter[int] = Counter()
        for each in ordered:
            size = getattr(each.choice, axis)
            seen[size] += 1
            if seen[size] <= _BEST_OF_A_KIND and each.seconds < 2 * ordered[0].seconds:
                chosen[each.choice] = None
    return [each for each in ordered if each.choice in chosen]


def _vary(looked: _Looked, start: Candidate) -> Candidate:
    """One option at a time, each time keeping the fastest; twice, because options interact."""
    best = start
    for _ in range(2):
        before = best
        for made in presets(best.choice, looked.limits, looked.space):
            best = _faster(best, looked.lightest(made))
        for made in other_orders(best.choice, looked.limits, looked.space):
            best = _faster(best, looked.lightest(made))
        for name in _OPTIONS:
            for value in getattr(looked.space, name):
                made = best.choice._replace(**{name: value})
                if made != best.choice and why_illegal(made, looked.limits, looked.space) is None:
                    best = _faster(best, looked.lightest(made))
        if best is before:
            break
    return best


def _climb(looked: _Looked, start: Candidate) -> Candidate:
    """To the fastest neighbour, and on from there."""
    best = start
    for _ in range(_LONGEST_CLIMB):
        before = best
        for made in neighbours(before.choice, looked.limits, looked.space):
            same = (made.recompute, made.savings) == (before.choice.recompute, before.choice.savings)
            # Other savings are a step by themselves; elsewhere the lightest that fit go along.
            best = _faster(best, looked.lightest(made) if same else looked.time(made))
        if best is before:
            break
    return best


def _faster(best: Candidate, other: Candidate | None) -> Candidate:
    return other if other is not None and other.seconds < best.seconds else best


def _fastest(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """Of different grids, so that climbs do not begin at one place."""
    by_grid: dict[tuple[int, ...], Candidate] = {}
    for each in sorted(found, key=lambda each: each.seconds):
        by_grid.setdefault(grid_of(each.choice), each)
    return list(by_grid.values())[:most]


def _milestones(sets: Sequence[Recompute]) -> tuple[Recompute, ...]:
    """A few sets from nothing to everything, each holding the one before where there is such a one."""
    kept = [sets[0]]
    for each in sets[1:]:
        if each > kept[-1]:
            kept.append(each)
    return tuple(dict.fromkeys((*kept, sets[-1])))


def _counted(items: Sequence[Item], what: str, say: Progress) -> Iterator[Item]:
    for number, item in enumerate(items):
        say(what, number, len(items))
        yield item
    say(what, len(items), len(items))
