"""The search: which legal candidate makes the fastest step that fits, and the Pareto set of time and memory.

There are far too many candidates to predict them all (billions for thousands of ranks), and options interact, so the
search goes from coarse to fine:

1. every grid worth trying, with usual options and the lightest recompute that fits: one prediction each;
2. the best grids of every kind (per pp, ep and tp, and overall), each with its options varied one at a time;
3. the best few of those, by hill climbing: every legal neighbour in any option, until none is faster.

A space that is small because most choices are pinned is tried whole instead.

Memory is predicted first, because it is cheap and rules most out. Everything predicted on the way is kept, and those
that no other beats in both time and memory are the Pareto set. Nothing is random.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from moefold.errors import MoefoldError
from moefold.plan.search.candidates import choice_of_workload, why_illegal
from moefold.plan.search.cheapest_savings import Candidate, Predictions
from moefold.plan.search.enumeration import (
    changes_numbers,
    combinations,
    everything,
    how_many_grids,
    layouts,
    neighbours,
    other_orders,
    presets,
    swaps,
)
from moefold.plan.search.space import LayoutChoice, Space, limits_of, usual_space
from moefold.plan.workload import Workload

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]
# A grid's usual options.
Grid = tuple[LayoutChoice, ...]
# How many grids are looked at closer, and how many of those may climb.
_BEST_OVERALL, _BEST_OF_A_KIND, _CLIMBERS = 16, 2, 6
# Grids whose step takes more than so many times the fastest are not looked at; of those beyond the second no variants
# are, and variants only up to the third.
_FAR, _VARIED, _NEAR = 2.0, 1.4, 1.15
_OPTIONS = ("format", "dispatcher", "graphs", "sharding", "sequences", "replicate", "clones")
_KINDS = ("pp", "ep", "tp", "cp", "vpp", "sequences", "sharding", "ep_overlap", "delay_wgrad")
# Of how many grids the best candidate's savings are exchanged one for one.
_SWAPPERS = 2
# Of no more grids each saving is looked at before options are varied; of more, before climbing.
_FEW_GRIDS = 120
# Of how many combinations a space is tried whole.
_SMALL = 4096
# Share of the step below which more memory is said to gain nothing.
_WORTH_TELLING = 0.001
# Steps of a climb; each looks at about a hundred neighbours.
_LONGEST_CLIMB = 8


# Layouts whose predicted steps differ by less are as fast: errors within one measured sweep differ by more in all of
# them (docs/planner-error.md). Among those, a tenth of the memory is worth leaving free: memory errs by about as much.
ALIKE, ROOMY = 0.03, 0.9


class NothingFitsError(MoefoldError):
    """No legal candidate fits, or none is legal; the message says which rules or bytes are in the way."""

    def __init__(self, message: str, lacks_memory: bool) -> None:
        super().__init__(message)
        self.lacks_memory = lacks_memory


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
    # What a GPU has for a run, and the share of it that had to stay free.
    memory: float = inf
    headroom: float = 0.0

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def preferred(self) -> Candidate:
        """The fastest, if it leaves a tenth of the memory; else of those that are as fast the first that does.

        If none does, the roomiest of them.
        """
        enough = ROOMY * self.memory
        alike = [each for each in self.ranked if each.seconds <= (1 + ALIKE) * self.best.seconds]
        return next((each for each in alike if each.bytes <= enough), min(alike, key=lambda each: each.bytes))

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest that cuts the work differently, not just an option away."""
        return next((each for each in self.ranked if grid_of(each.choice) != grid_of(self.preferred.choice)), None)

    def alike(self, spread: float) -> tuple[Candidate, ...]:
        """Those of the Pareto set that a planner with this error cannot tell from the fastest."""
        return tuple(each for each in self.pareto if each.seconds <= (1 + spread) * self.best.seconds)


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
    say = progress or (lambda what, done, total: None)
    limits = limits_of(template)
    looked, coarse = Predictions(template, limits, space, headroom), list[Candidate]()
    if combinations(space) <= _SMALL:
        coarse = _all(looked, say, from_own)
    else:
        # Where nothing else fits, short sequences are cut, and experts that could be distributed whole.
        grids = (list(layouts(limits, space, every_grid)) for every_grid in how_many_grids(space))
        for listed, part in ((listed, part) for listed in grids for part in _spaces(template, space)):
            looked = Predictions(template, limits, part, headroom)
            if coarse := _sweep(looked, listed, say, from_own):
                _refine(looked, coarse, say)
                break
    if not coarse:
        raise NothingFitsError(looked.why_nothing(), lacks_memory=bool(looked.held))
    ranked = tuple(sorted(looked.timed.values(), key=looked.rank))
    own = looked.timed.get(choice_of_workload(template))
    found = (len({grid_of(each.choice) for each in coarse}), len(looked.held), len(looked.timed))
    took = time.monotonic() - began
    return Result(ranked, pareto(ranked), own, *found, took, looked.capacity / (1 - headroom), headroom)


def _all(looked: Predictions, say: Progress, from_own: bool) -> list[Candidate]:
    """Of a small space all candidates that fit, up to twice the fastest."""
    own = [looked.time(choice) for choice in _own_start(looked)] if from_own else []
    always, listed = looked.space.savings[0], list(everything(looked.limits, looked.space))
    exact = [choice for choice in listed if not changes_numbers(choice.savings - always)]
    for part in (exact, [choice for choice in listed if changes_numbers(choice.savings - always)]):
        # The fastest first: what they take is the bound of the others.
        for choice in sorted(_counted(part, "candidates", say), key=looked.seconds):
            looked.time(choice, _FAR * looked.best)
        if len(looked.timed) > len(own):
            break
    return list(looked.timed.values())


def _refine(looked: Predictions, coarse: Sequence[Candidate], say: Progress) -> None:
    """From the best of these on."""
    starts = _starts(coarse)
    if len({grid_of(each.choice) for each in coarse}) <= _FEW_GRIDS:
        looked.look_closely()
        starts = [looked.lightest(start.choice) or start for start in starts]
    varied = [_vary(looked, start) for start in _counted(starts, "varying options", say)]
    looked.look_closely()
    for start in _counted(_fastest(varied, _CLIMBERS), "climbing", say):
        looked.trim(_climb(looked, start))
    for start in _fastest(list(looked.timed.values()), _SWAPPERS):
        _swap(looked, start)
    _make_room(looked)


def _spaces(template: Workload, space: Space) -> tuple[Space, ...]:
    """Other frameworks recompute first. What they save of optimizer states takes seconds, or changes numbers: it is
    tried where nothing fits without."""
    if template.is_own or len(space.savings) == 1:
        return (space,)
    return replace(space, savings=space.savings[:1]), space


def tighter(template: Workload, space: Space, result: Result) -> Candidate | None:
    """What the headroom costs: a faster candidate that fits without it, from the best grids on; None if none does."""
    looked = Predictions(template, limits_of(template), space, 0.0)
    starts = [looked.lightest(each.choice) for each in _fastest(result.ranked, _CLIMBERS)]
    found = min((each for each in starts if each is not None), key=lambda each: each.seconds, default=None)
    found = _climb(looked, found) if found is not None else None
    return found if found is not None and found.seconds < (1 - _WORTH_TELLING) * result.best.seconds else None


def coarse_best(template: Workload, space: Space, headroom: float) -> Candidate | None:
    """The first part of a search alone, and the options of what it finds: to compare questions, not layouts."""
    looked = Predictions(template, limits_of(template), space, headroom)
    grids = list(layouts(looked.limits, space, how_many_grids(space)[0]))
    found = _fastest(_sweep(looked, grids, lambda what, done, total: None, from_own=False), 2)
    return min((_vary(looked, each) for each in found), key=lambda each: each.seconds, default=None)


def anything_fits(template: Workload, space: Space, headroom: float, progress: Progress | None = None) -> bool:
    """Whether `search` would find a candidate; without looking for the best one."""
    say = progress or (lambda what, done, total: None)
    looked = Predictions(template, limits_of(template), space, headroom)
    if combinations(space) <= _SMALL:
        return any(looked.fits(choice) for choice in everything(looked.limits, space))
    for every_grid in how_many_grids(space):
        grids = _counted(list(layouts(looked.limits, space, every_grid)), "more GPUs", say)
        starts = (start for grid in grids for start in _usual(grid))
        if any((looked.lightest(start) or _leaner(looked, start, inf)) is not None for start in starts):
            return True
    return False


def pareto(ranked: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Of candidates in the order of their time, those that hold less than every faster one."""
    kept: list[Candidate] = []
    for each in ranked:
        if not kept or each.bytes < kept[-1].bytes * (1 - 1e-9):
            kept.append(each)
    return tuple(kept)


# ---- from coarse to fine ----


def _sweep(looked: Predictions, grids: Sequence[Grid], say: Progress, from_own: bool) -> list[Candidate]:
    """The lightest of every grid, and of its variants that could be among the fastest."""
    found: list[Candidate | None] = []
    for own in _own_start(looked) if from_own else ():
        grids = [*grids, (own,)]
        # With its own savings too, which others may not choose.
        found.append(looked.time(own))
    # The fastest first: what they take is the bound of the others.
    grids = sorted(grids, key=lambda grid: looked.bound(grid[0]))
    for grid in _counted(grids, "grids", say):
        for number, start in enumerate(_usual(grid)):
            near = _NEAR * looked.best
            found.append(looked.lightest(start, near if number else _FAR * looked.best) or _leaner(looked, start, near))
    # Now it is known what fits and how fast that is.
    close = [grid for grid in grids if looked.best < inf and looked.bound(grid[0]) <= _VARIED * looked.best]
    for start in (each for grid in close for each in grid):
        near = _NEAR * looked.best
        found.append(looked.lightest(start, near) or _leaner(looked, start, near))
    # A larger microbatch, or another format, can make a grid twice as fast as its first variant.
    for start in (each for grid in grids if looked.best < inf for each in _close_otherwise(looked, grid)):
        found.append(looked.lightest(start, _NEAR * looked.best))
    return list({each.choice: each for each in found if each is not None}.values())


def _close_otherwise(looked: Predictions, grid: Sequence[LayoutChoice]) -> Iterator[LayoutChoice]:
    """All variants, if the one of the largest microbatch could be among the fastest, and in a format that is faster."""
    most = max(grid, key=lambda each: (each.sequences, each.ep_overlap))
    usual = looked.bound(most)
    for format in looked.space.format:
        made = most._replace(format=format)
        if format != most.format and not (looked.is_legal(made) and looked.bound(made) < usual):
            continue
        if looked.bound(made) <= _NEAR * looked.best:
            yield from (each._replace(format=format) for each in grid)


def _usual(grid: Sequence[LayoutChoice]) -> list[LayoutChoice]:
    """The first of every sharding, with and without overlapped dispatch, which needs memory."""
    firsts: dict[tuple[str, bool], LayoutChoice] = {}
    for each in grid:
        firsts.setdefault((each.sharding, each.ep_overlap), each)
    return list(firsts.values())


def _leaner(looked: Predictions, start: LayoutChoice, within: float) -> Candidate | None:
    """Where a grid does not fit as it is: with what holds less."""
    if within < inf and looked.bound(start) > within:
        return None
    for made in _leaner_variants(start, looked.space, looked.limits.ours):
        legal = made != start and why_illegal(made, looked.limits, looked.space) is None
        if legal and (found := looked.lightest(made, within)) is not None:
            return found
    return None


def _leaner_variants(start: LayoutChoice, space: Space, ours: bool) -> Iterator[LayoutChoice]:
    """Ours has savings, and dispatchers hold more or less. Frameworks refuse some savings beside graphs; beside
    overlapped dispatch too, but grids are also tried without it."""
    if ours:
        return (start._replace(dispatcher=name) for name in space.dispatcher)
    return (start._replace(format=format, graphs=space.graphs[-1]) for format in space.format)


def _own_start(looked: Predictions) -> tuple[LayoutChoice, ...]:
    """The template's own choice, if it is legal and not excluded."""
    own, space = choice_of_workload(looked.template), looked.space
    names = (name for name in own._fields if name != "savings")
    within = own.savings >= space.savings[0] and all(getattr(own, name) in getattr(space, name) for name in names)
    return (own,) if within and why_illegal(own, looked.limits, space) is None else ()


def _starts(coarse: Sequence[Candidate]) -> list[Candidate]:
    """The fastest overall, and the fastest of every kind."""
    ordered = sorted(coarse, key=lambda each: each.seconds)
    chosen = dict.fromkeys(each.choice for each in ordered[:_BEST_OVERALL])
    for axis in _KINDS:
        seen: Counter[int] = Counter()
        for each in ordered:
            size = getattr(each.choice, axis)
            seen[size] += 1
            if seen[size] <= _BEST_OF_A_KIND and each.seconds < _FAR * ordered[0].seconds:
                chosen[each.choice] = None
    return [each for each in ordered if each.choice in chosen]


def _vary(looked: Predictions, start: Candidate) -> Candidate:
    """One option at a time, each time keeping the fastest; twice, because options interact."""
    best = start
    for _ in range(2):
        before = best
        for made in presets(best.choice, looked.limits, looked.space):
            best = _faster(best, looked.lightest(made, best.seconds))
        for made in other_orders(best.choice, looked.limits, looked.space):
            best = _faster(best, looked.lightest(made, best.seconds))
        for name in _OPTIONS:
            for value in getattr(looked.space, name):
                made = best.choice._replace(**{name: value})
                if made != best.choice and why_illegal(made, looked.limits, looked.space) is None:
                    best = _faster(best, looked.lightest(made, best.seconds))
        if best is before:
            break
    return best


def _climb(looked: Predictions, start: Candidate) -> Candidate:
    """To the fastest neighbour, and on from there."""
    best = _faster(start, looked.lightest(start.choice))
    for _ in range(_LONGEST_CLIMB):
        before = best
        for made in neighbours(before.choice, looked.limits, looked.space):
            same = (made.recompute, made.savings) == (before.choice.recompute, before.choice.savings)
            # Other savings are a step by themselves; elsewhere the lightest that fit go along.
            best = _faster(best, (looked.lightest if same else looked.time)(made, best.seconds))
        if best is before:
            break
    return best


def _swap(looked: Predictions, start: Candidate) -> Candidate:
    """One saving in the place of another: without the one it does not fit, and with both it is slower."""
    best = start
    for _ in range(_LONGEST_CLIMB):
        before = best
        for made in swaps(before.choice, looked.limits, looked.space):
            best = _faster(best, looked.time(made, best.seconds))
        if best is before:
            break
        best = _climb(looked, best)
    return best


def _make_room(looked: Predictions) -> None:
    """Looks for candidates as fast as the fastest that leave a tenth of the memory, one change after the other."""
    enough, within = ROOMY / (1 - looked.headroom) * looked.capacity, looked.best * (1 + ALIKE)
    for _ in range(_LONGEST_CLIMB):
        alike = (each for each in looked.timed.values() if each.seconds <= within)
        before = min(alike, key=lambda each: each.bytes)
        if before.bytes <= enough:
            return
        for made in neighbours(before.choice, looked.limits, looked.space):
            looked.time(made, within)
        if min(looked.timed.values(), key=lambda each: (each.seconds > within, each.bytes)) is before:
            return


def _faster(best: Candidate, other: Candidate | None) -> Candidate:
    return other if other is not None and other.seconds < best.seconds else best


def _fastest(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """Of different grids, so that climbs do not begin at one place."""
    by_grid: dict[tuple[int, ...], Candidate] = {}
    for each in sorted(found, key=lambda each: each.seconds):
        by_grid.setdefault(grid_of(each.choice), each)
    return list(by_grid.values())[:most]


def _counted(items: Sequence[Item], what: str, say: Progress) -> Iterator[Item]:
    for number, item in enumerate(items):
        say(what, number, len(items))
        yield item
    say(what, len(items), len(items))
