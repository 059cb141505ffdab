"""Which candidates a search looks at: coarse ones to start from, and the neighbours of one that it has.

`layouts` lists the coarse candidates. It leaves out what another candidate usually dominates: stages that only repeat
the depth of fewer ones, short sequences over several ranks, and experts sharded by etp where ep could distribute them
whole. `neighbours` differ from a candidate in one choice, or in one and what must follow it. Of a small space there is
a list of `everything`. All of them are legal (`plan/search/candidates.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations as subsets
from itertools import product
from math import prod

from moefold.config.parallel import Sharding
from moefold.plan.memory.saving_steps import Savings
from moefold.plan.search.candidates import dense_sizes, divides_copies, expert_sizes, why_illegal, why_no_grid
from moefold.plan.search.space import LayoutChoice, Limits, Recompute, Space
from moefold.plan.workload import Dispatcher

_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp")
# Up to how many combinations of degrees all grids are tried.
_FEW = 2000
# Tokens of a sequence that one rank can well hold.
_LONG = 8192


def layouts(limits: Limits, space: Space, every_grid: bool = False) -> Iterator[tuple[LayoutChoice, ...]]:
    """Coarse candidates: of every grid, or of those worth trying, its usual options (`presets`), with the first of all
    others."""
    start, contexts = first_choice(space), space.cp if every_grid else worthwhile_contexts(limits, space.cp)
    for pp, tp, cp, ep in product(space.pp, space.tp, contexts, space.ep):
        if limits.world % (tp * cp * pp) or (limits.world // pp) % ep:
            continue
        for vpp in space.vpp if every_grid else worthwhile_stages(limits.depth, pp, space.vpp):
            for etp in space.etp if every_grid else _worthwhile_widths(ep, limits, space):
                grid = start._replace(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)
                if why_no_grid(grid, limits) is None and (made := _of_first_format(grid, limits, space)):
                    yield made


def how_many_grids(space: Space) -> tuple[bool, ...]:
    """First those worth trying, and every one where nothing else fits. Where degrees are pinned there are few: all."""
    return (True,) if prod(len(getattr(space, name)) for name in _DEGREES) <= _FEW else (False, True)


def _of_first_format(grid: LayoutChoice, limits: Limits, space: Space) -> tuple[LayoutChoice, ...]:
    """In the first in which any are legal."""
    of_formats = (tuple(presets(grid._replace(format=format), limits, space)) for format in space.format)
    return next(filter(None, of_formats), ())


def combinations(space: Space) -> int:
    """How many there are of its values, legal or not."""
    sets_of_savings: int = 2 ** (len(space.savings) - 1)
    return sets_of_savings * prod(len(getattr(space, name)) for name in LayoutChoice._fields if name != "savings")


def everything(limits: Limits, space: Space) -> Iterator[LayoutChoice]:
    """All legal candidates, and all sets of savings of each."""
    start = first_choice(space)
    names = [name for name in LayoutChoice._fields if name not in ("savings", *_DEGREES)]
    saved = tuple(
        space.savings[0].union(*some)
        for number in range(len(space.savings))
        for some in subsets(space.savings[1:], number)
    )
    for sizes in product(*(getattr(space, name) for name in _DEGREES)):
        grid = start._replace(**dict(zip(_DEGREES, sizes)))
        if why_no_grid(grid, limits) is None:
            for *values, savings in product(*(getattr(space, name) for name in names), saved):
                made = grid._replace(**dict(zip(names, values)), savings=savings)
                if why_illegal(made, limits, space) is None:
                    yield made


def first_choice(space: Space) -> LayoutChoice:
    return LayoutChoice(*(getattr(space, name)[0] for name in LayoutChoice._fields))


def worthwhile_contexts(limits: Limits, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sequences are cut where they are long, or where there are too few of them for all ranks."""
    if len(sizes) == 1:
        return sizes
    least = max((cp for cp in sizes if cp * _LONG <= limits.seq_len), default=min(sizes))
    scarce = limits.world > limits.sequences * least
    return tuple(cp for cp in sizes if cp == least or cp == 2 * least > 2 or (scarce and cp > least))


def presets(choice: LayoutChoice, limits: Limits, space: Space) -> Iterator[LayoutChoice]:
    """The legal ones of this grid's usual options: with and without overlapped dispatch and deferred weight gradients,
    with the dispatcher that the choice has, if it sends at all."""
    spread = choice.ep * choice.etp > 1
    local: tuple[Dispatcher, ...] = ("local",)
    dispatchers = tuple(name for name in space.dispatcher if name != "local") if spread else local
    kept = choice.dispatcher in dispatchers or not dispatchers
    dispatcher = choice.dispatcher if kept else dispatchers[0]
    for sequences in space.sequences:
        for overlap in space.ep_overlap:
            for delay in space.delay_wgrad:
                for sharding in _usual_shardings(choice, limits, space):
                    made = choice._replace(
                        dispatcher=dispatcher,
                        sequences=sequences,
                        ep_overlap=overlap,
                        delay_wgrad=delay,
                        sharding=sharding,
                    )
                    if not divides_copies(made, limits):
                        copies = (made._replace(replicate=replicate) for replicate in space.replicate)
                        made = next((each for each in copies if divides_copies(each, limits)), made)
                    # Frameworks refuse some dispatchers and phases, which may be pinned, beside their first graphs.
                    for graphs in dict.fromkeys((made.graphs, space.graphs[-1])):
                        if why_illegal(made._replace(graphs=graphs), limits, space) is None:
                            yield made._replace(graphs=graphs)
                            break


def _usual_shardings(choice: LayoutChoice, limits: Limits, space: Space) -> tuple[Sharding, ...]:
    """moefold: in a pipeline flat buffers first, which gather once per step."""
    flat: tuple[Sharding, ...] = ("flat",) if limits.ours and choice.pp > 1 and "flat" in space.sharding else ()
    return tuple(dict.fromkeys((*flat, *space.sharding)))


def worthwhile_stages(depth: int, pp: int, virtual: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of virtual stages of which each makes the deepest stage shallower than the one before."""
    if len(virtual) == 1:
        return virtual
    if pp == 1:
        return tuple(vpp for vpp in virtual if vpp == 1)
    fewest: dict[int, int] = {}
    for vpp in sorted(virtual):
        if pp * vpp <= depth + 2:
            fewest.setdefault(-(-depth // (pp * vpp)), vpp)
    return tuple(fewest.values())


def _worthwhile_widths(ep: int, limits: Limits, space: Space) -> tuple[int, ...]:
    """etp is tried only where ep cannot distribute experts further, or where the user pins it."""
    if len(space.etp) == 1 or ep == limits.experts or ep == max(space.ep):
        return space.etp
    return tuple(etp for etp in space.etp if etp == 1)


ORDERS = ("dense_order", "expert_order")


def other_orders(choice: LayoutChoice, limits: Limits, space: Space) -> Iterator[LayoutChoice]:
    """With another order of the axes of one grid, one for each different numbering of the ranks: axes of one rank are
    anywhere."""
    for name, sizes in zip(ORDERS, (dense_sizes(choice, limits), expert_sizes(choice, limits)), strict=True):
        several = {axis for axis, size in sizes if size > 1}

        def numbering(order: str, several: set[str] = several) -> tuple[str, ...]:
            return tuple(axis for axis in order.split("-") if axis in several)

        found = {numbering(getattr(choice, name))}
        for order in getattr(space, name):
            if numbering(order) not in found:
                found.add(numbering(order))
                yield choice._replace(**{name: order})


def neighbours(choice: LayoutChoice, limits: Limits, space: Space) -> Iterator[LayoutChoice]:
    """Legal candidates that differ in one choice, or in one and what must follow it."""
    for made in _steps(choice, limits, space):
        if made != choice and why_illegal(made, limits, space) is None:
            yield made


def _steps(choice: LayoutChoice, limits: Limits, space: Space) -> Iterator[LayoutChoice]:
    for name in choice._fields:
        for value in getattr(space, name) if name not in ("savings", *ORDERS) else ():
            yield choice._replace(**{name: value})
    yield from other_orders(choice, limits, space)
    for step in space.savings[1:]:
        # One more, or one less.
        less = choice.savings - (step - space.savings[0])
        if less != choice.savings or not changes_numbers(step):
            yield choice._replace(savings=choice.savings | step if less == choice.savings else less)
    for pp in space.pp:
        for vpp in worthwhile_stages(limits.depth, pp, space.vpp):
            yield choice._replace(pp=pp, vpp=vpp)
    for ep in space.ep:
        # What is fastest inside of a host is not between hosts.
        for dispatcher in ("local",) if ep * choice.etp == 1 else space.dispatcher:
            yield choice._replace(ep=ep, dispatcher=dispatcher, ep_overlap=choice.ep_overlap and ep > 1)
    for tp in space.tp:
        for etp in space.etp:
            yield choice._replace(tp=tp, etp=etp)
    # Tokens are cut by either.
    for tp in space.tp:
        for cp in space.cp:
            if tp * cp == choice.tp * choice.cp:
                yield choice._replace(tp=tp, cp=cp)
    for overlap in space.ep_overlap:
        for delay in space.delay_wgrad:
            yield choice._replace(ep_overlap=overlap, delay_wgrad=delay)


def swaps(choice: LayoutChoice, limits: Limits, space: Space) -> Iterator[LayoutChoice]:
    """Legal candidates that save one thing in the place of another that changes no numbers."""
    steps = [(step, step - space.savings[0]) for step in space.savings[1:]]
    for _, one in steps:
        for other, entries in steps:
            if one <= choice.savings and not entries <= choice.savings and not changes_numbers(other):
                made = choice._replace(savings=(choice.savings - one) | other)
                if why_illegal(made, limits, space) is None:
                    yield made


def changes_numbers(step: Savings) -> bool:
    """What changes numbers is not worth its speed alone."""
    return any(entry.startswith("precision.moments=") for entry in step)


def milestones(sets: Sequence[Recompute]) -> tuple[Recompute, ...]:
    """A few sets from nothing to everything, each holding the one before where there is such a one."""
    kept = [sets[0]]
    for each in sets[1:]:
        if each > kept[-1]:
            kept.append(each)
    return tuple(dict.fromkeys((*kept, sets[-1])))
