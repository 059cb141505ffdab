"""Two grids over the same ranks (parallel folding), the groups of ranks that code asks for by name, and where they lie.

Every rank has coordinates in two grids. The attention grid places tokens and dense weights, the expert grid places
experts. Axes are listed from the outermost to the innermost, which has neighbouring ranks. Both grids have `pp`
outermost and of the same size, so a pipeline stage is the same set of ranks in both: that is what makes folding legal.
The axes inside of a stage may have any order (`parallel.rank_order`), each grid its own: it decides which groups stay
inside an NVLink domain, and nothing that is computed. So nothing outside of this file may assume a stride.

The data-parallel axes have two parts. Over `*_shard` a parameter is sharded, over `*_replicate` the shards are
replicated (hybrid sharding); with one replica the shard part is the whole axis.

The last axis varies fastest, so coordinates are the digits of a rank in a mixed base and a group is a first rank plus a
fixed list of offsets. No list here is as long as the world: a question about one rank of a hundred thousand costs as
much as about one of eight. Process groups are made in `comm/process_groups.py`, only those that a rank is in.

`locality` says which groups stay inside an NVLink domain. Rank r is in domain r // size. The domains that a group
touches depend only on its first rank modulo the domain, so it is enough to know how many groups start at each such
offset, and that follows from the strides of the axes the group does not use. This is exact for any world, and a domain
size that does not divide it (72 and a power of two) needs no special case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, permutations, product
from math import gcd, prod
from types import MappingProxyType
from typing import Literal

from moefold.config.parallel import ParallelConfig
from moefold.errors import LayoutError, Problem

_DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "edp_replicate")
# How far and how many sizes that would work are looked for and listed.
_SEARCHED, _LISTED = 4096, 16


@dataclass(frozen=True)
class Grid:
    """Axes with their sizes, from outermost to innermost."""

    axes: tuple[tuple[str, int], ...]

    @cached_property
    def world(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Axis -> (size, distance between neighbours along it)."""
        sizes = [size for _, size in self.axes]
        return {name: (size, prod(sizes[i + 1 :])) for i, (name, size) in enumerate(self.axes)}

    def size(self, axis: str) -> int:
        return self._places[axis][0]

    def stride(self, axis: str) -> int:
        """How far apart in rank number two neighbours along this axis are."""
        return self._places[axis][1]

    def coordinate(self, rank: int, axis: str) -> int:
        size, stride = self._places[axis]
        return rank // stride % size

    def coordinates(self, rank: int) -> dict[str, int]:
        return {name: self.coordinate(rank, name) for name in self._places}

    def offsets(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """How far each member of a group is from its first, in group order: ascending in rank."""
        chosen = [name for name, _ in self.axes if name in axes]
        steps = [range(0, self.size(name) * self.stride(name), self.stride(name)) for name in chosen]
        return tuple(map(sum, product(*steps)))

    def group_of(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one only along `axes`, itself among them."""
        first = rank - sum(self.coordinate(rank, axis) * self.stride(axis) for axis in axes)
        return tuple(first + offset for offset in self.offsets(axes))

    def groups(self, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """All groups along `axes`; together they are the world, each rank once."""
        offsets = self.offsets(axes)
        for first in self.offsets(tuple(name for name, _ in self.axes if name not in axes)):
            yield tuple(first + offset for offset in offsets)


@dataclass(frozen=True)
class FoldedLayout:
    """The same ranks in the attention grid and in the expert grid; see `GROUPS` for the names of groups."""

    attention: Grid
    expert: Grid

    @property
    def world(self) -> int:
        return self.attention.world

    def grid_of(self, spec: GroupSpec) -> Grid:
        return self.attention if spec.grid == "attention" else self.expert

    def ranks(self, name: str, rank: int) -> tuple[int, ...]:
        """The group called `name` that this rank is in, ascending."""
        spec = GROUPS[name]
        return self.grid_of(spec).group_of(rank, spec.axes)

    def size(self, name: str) -> int:
        """How many ranks each group called `name` has."""
        spec = GROUPS[name]
        return prod(self.grid_of(spec).size(axis) for axis in spec.axes)

    def index(self, name: str, rank: int) -> int:
        """This rank's position within its group called `name`."""
        spec = GROUPS[name]
        grid, position = self.grid_of(spec), 0
        for axis in (axis for axis, _ in grid.axes if axis in spec.axes):
            position = position * grid.size(axis) + grid.coordinate(rank, axis)
        return position

    def coordinate(self, rank: int, axis: str) -> int:
        """This rank's coordinate along one axis of either grid."""
        grid = self.attention if axis in ATTENTION_AXES else self.expert
        return grid.coordinate(rank, axis)

    def context_sizes(self, dynamic: bool) -> tuple[int, ...]:
        """Over how many ranks a microbatch may be sharded: cp, or any power of two that fits."""
        if not dynamic:
            return (self.size("cp"),)
        most = self.size("dp") * self.size("cp")
        return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)

    def context_ranks(self, rank: int, size: int) -> tuple[int, ...]:
        """The ranks over which this rank's microbatch is sharded: ``size`` neighbours along dp and cp."""
        place = self.context_place(rank)
        # The rank of place 0 that has this one's other coordinates.
        base, first = self.attention.group_of(rank, _CONTEXT_AXES)[0], place - place % size
        return tuple(base + self._context_offset(first + number) for number in range(size))

    def context_place(self, rank: int) -> int:
        """This rank's number along dp and cp together; aligned runs of neighbours may be context-parallel groups.

        cp varies fastest whatever the order of ranks is, so which samples a coordinate reads does not depend on it.
        """
        place = 0
        for axis in _CONTEXT_AXES:
            place = place * self.attention.size(axis) + self.attention.coordinate(rank, axis)
        return place

    def _context_offset(self, place: int) -> int:
        offset = 0
        for axis in reversed(_CONTEXT_AXES):
            place, coordinate = divmod(place, self.attention.size(axis))
            offset += coordinate * self.attention.stride(axis)
        return offset

    def token_place(self, rank: int) -> int:
        """The number of this rank's tokens among those of its stage: dp, then cp, then tp, whatever the order of
        ranks is."""
        return self.context_place(rank) * self.attention.size("tp") + self.attention.coordinate(rank, "tp")


def levels(ranks: tuple[int, ...], rank: int, set_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks in sets of neighbours: those with this rank's index in every set, and those of its own set."""
    place = ranks.index(rank)
    return ranks[place % set_size :: set_size], ranks[place // set_size * set_size :][:set_size]


def ranks_inside(layout: FoldedLayout, name: str, ranks_per_host: int) -> int | None:
    """How many ranks of a group called ``name`` are on one host, neighbours in the group; None where hosts differ.

    Consecutive ranks of a group are one stride apart, so hosts cut all groups alike where one size divides the other.
    """
    spec, size = GROUPS[name], layout.size(name)
    grid = layout.grid_of(spec)
    stride = min(grid.stride(axis) for axis in spec.axes)
    if size == 1 or stride % ranks_per_host == 0:
        return 1
    each, uneven = divmod(ranks_per_host, stride)
    smaller, larger = sorted((each, size))
    return None if uneven or larger % smaller else smaller


def fold(parallel: ParallelConfig, world: int) -> FoldedLayout:
    """Lay both grids over `world` ranks; dp and edp are what is left."""
    problems = (*_size_problems(parallel, world), *order_problems(parallel)) or tuple(_fold_problems(parallel, world))
    if problems:
        raise LayoutError(*problems)
    p, stage = parallel, world // parallel.pp
    sizes = {axis: getattr(p, axis) for axis in _DEGREES}
    sizes["dp_shard"] = stage // (p.tp * p.cp * p.dp_replicate)
    sizes["edp_shard"] = stage // (p.ep * p.etp * p.edp_replicate)
    grids = (Grid(tuple((axis, sizes[axis]) for axis in axes_of(order))) for order in orders_of(p))
    return FoldedLayout(*grids)


def orders_of(parallel: ParallelConfig) -> tuple[str, str]:
    """Of the attention grid and of the expert grid."""
    return parallel.rank_order.dense, parallel.rank_order.expert


def axes_of(order: str) -> tuple[str, ...]:
    """The axes of a grid, outermost first, from an order that names the innermost first.

    >>> axes_of("tp-cp-dp-pp")
    ('pp', 'dp_replicate', 'dp_shard', 'cp', 'tp')
    """
    found: list[str] = []
    for name in reversed(order.split("-")):
        found += [f"{name}_replicate", f"{name}_shard"] if name in ("dp", "edp") else [name]
    return tuple(found)


def _orders(*axes: str) -> tuple[str, ...]:
    return tuple("-".join((*each, "pp")) for each in permutations(axes))


# Every legal order; the first of each is what a run has that says nothing.
DENSE_ORDERS, EXPERT_ORDERS = _orders("tp", "cp", "dp"), _orders("etp", "ep", "edp")


def order_problems(parallel: ParallelConfig) -> Iterator[Problem]:
    """Orders that are not one of all axes with pp last."""
    known = {"dense": DENSE_ORDERS, "expert": EXPERT_ORDERS}
    for (name, legal), order in zip(known.items(), orders_of(parallel), strict=True):
        if order in legal:
            continue
        why = f"{order[:60]!r} is not an order of {', '.join(legal[0].split('-')[:-1])} with pp last"
        if sorted(order.split("-")) == sorted(legal[0].split("-")):
            why += ": with pp further in, a pipeline stage would not be the same ranks in both grids"
        yield Problem(f"parallel.rank_order.{name}", why, f"innermost first: {', '.join(legal)}")


def _size_problems(parallel: ParallelConfig, world: int) -> Iterator[Problem]:
    sizes = {"world": world} | {f"parallel.{axis}": getattr(parallel, axis) for axis in _DEGREES}
    for path, size in sizes.items():
        if size < 1:
            yield Problem(path, f"a size cannot be {size}", "use 1 or more")


def _fold_problems(p: ParallelConfig, world: int) -> Iterator[Problem]:
    model = p.tp * p.cp * p.pp
    if world % model:
        yield Problem(
            "world",
            f"attention does not fit: tp*cp*pp = {p.tp}*{p.cp}*{p.pp} = {model} does not divide the world of {world}",
            f"use a multiple of {model} ranks, such as {-(-world // model) * model}",
        )
        return
    dp = world // model
    stage = world // p.pp
    if dp % p.dp_replicate:
        yield Problem(
            "parallel.dp_replicate",
            f"{p.dp_replicate} replicas do not divide dp = {world}/({p.tp}*{p.cp}*{p.pp}) = {dp}",
            f"choose dp_replicate from {_divisors(dp)}",
        )
    if stage % (p.etp * p.ep):
        yield _expert_problem(p, stage, dp)
    elif (edp := stage // (p.etp * p.ep)) % p.edp_replicate:
        yield Problem(
            "parallel.edp_replicate",
            f"{p.edp_replicate} replicas do not divide edp = {stage}/({p.etp}*{p.ep}) = {edp}",
            f"choose edp_replicate from {_divisors(edp)}",
        )


def _expert_problem(p: ParallelConfig, stage: int, dp: int) -> Problem:
    what = (
        f"experts cannot fold: etp*ep = {p.etp}*{p.ep} does not divide tp*cp*dp = {p.tp}*{p.cp}*{dp} = {stage}, "
        f"the ranks of one stage"
    )
    if stage % p.etp:
        return Problem("parallel.etp", what, f"choose etp from {_divisors(stage)}")
    return Problem("parallel.ep", what, f"choose ep from {_divisors(stage // p.etp)}")


def _divisors(number: int) -> str:
    found = [n for n in range(1, min(number, _SEARCHED) + 1) if number % n == 0]
    more = len(found) > _LISTED or number > _SEARCHED
    return f"[{', '.join(map(str, found[:_LISTED]))}{', ...' if more else ''}]"


GridName = Literal["attention", "expert"]

ATTENTION_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")
# Along which samples and parts of them are distributed.
_CONTEXT_AXES = ("dp_replicate", "dp_shard", "cp")


@dataclass(frozen=True)
class GroupSpec:
    """The ranks that differ only along these axes of this grid."""

    grid: GridName
    axes: tuple[str, ...]
    purpose: str


GROUPS = MappingProxyType(
    {
        # One axis of the attention grid.
        "tp": GroupSpec("attention", ("tp",), "shard heads, hidden dims and vocabulary"),
        "cp": GroupSpec("attention", ("cp",), "shard one sequence"),
        "dp": GroupSpec("attention", ("dp_replicate", "dp_shard"), "see different sequences"),
        "pp": GroupSpec("attention", ("pp",), "hold different layers"),
        # One axis of the expert grid.
        "etp": GroupSpec("expert", ("etp",), "shard one expert's hidden dim"),
        "ep": GroupSpec("expert", ("ep",), "hold different experts"),
        "edp": GroupSpec("expert", ("edp_replicate", "edp_shard"), "hold the same experts"),
        # Where parameters are sharded and replicated.
        "dense_shard": GroupSpec("attention", ("dp_shard", "cp"), "shard dense parameters and their optimizer states"),
        "dense_replicate": GroupSpec("attention", ("dp_replicate",), "replicate these shards"),
        "expert_shard": GroupSpec("expert", ("edp_shard",), "shard expert parameters and their optimizer states"),
        "expert_replicate": GroupSpec("expert", ("edp_replicate",), "replicate these shards"),
        # Where tokens are exchanged.
        "expert_block": GroupSpec("expert", ("ep", "etp"), "hold one full set of experts"),
        "stage": GroupSpec("attention", ("dp_replicate", "dp_shard", "cp", "tp"), "hold the same layers"),
        "world": GroupSpec("attention", ATTENTION_AXES, "all ranks"),
    }
)


def chunk_sizes(tokens: Sequence[int], chunks: int) -> list[tuple[int, ...]]:
    """By chunk, of every rank: its tokens in parts that differ by one at most. Chunks without a token are left out."""
    first, *others = zip(*(shard_sizes(count, chunks) for count in tokens), strict=True)
    return [first, *(sizes for sizes in others if any(sizes))]


def shard_sizes(total: int, num_shards: int) -> tuple[int, ...]:
    """Sizes of contiguous shards that differ by at most one; the first ones are the larger."""
    base, extra = divmod(total, num_shards)
    return tuple(base + (i < extra) for i in range(num_shards))


def shard_starts(total: int, num_shards: int) -> tuple[int, ...]:
    """Where each of these shards starts."""
    return (0, *accumulate(shard_sizes(total, num_shards)))[:-1]


@dataclass(frozen=True)
class Locality:
    """How the groups of one kind lie over domains of one size."""

    domain: int
    num_groups: int
    # Groups whose ranks are not all in one domain.
    num_leaving: int
    # Domains touched by a group: by the one that touches least and by the one that touches most.
    fewest_domains: int
    most_domains: int


def locality(layout: FoldedLayout, spec: GroupSpec, domain: int) -> Locality:
    """Over all groups of this kind, how many leave a domain of `domain` consecutive ranks."""
    grid = layout.grid_of(spec)
    offsets = grid.offsets(spec.axes)
    others = tuple(name for name, _ in grid.axes if name not in spec.axes)
    starts = _groups_by_start(grid, others, domain)
    spans = {start: len({(start + offset) // domain for offset in offsets}) for start in starts}
    return Locality(
        domain=domain,
        num_groups=sum(starts.values()),
        num_leaving=sum(count for start, count in starts.items() if spans[start] > 1),
        fewest_domains=min(spans.values()),
        most_domains=max(spans.values()),
    )


def _groups_by_start(grid: Grid, axes: tuple[str, ...], domain: int) -> Counter[int]:
    """First rank modulo the domain -> how many groups start there."""
    starts = Counter({0: 1})
    for axis in axes:
        steps = _multiples(grid.size(axis), grid.stride(axis), domain)
        added: Counter[int] = Counter()
        for start, groups in starts.items():
            for step, times in steps.items():
                added[(start + step) % domain] += groups * times
        starts = added
    return starts


def _multiples(count: int, stride: int, domain: int) -> dict[int, int]:
    """How often each remainder occurs among the first `count` multiples of `stride`; they repeat soon."""
    period = domain // gcd(stride, domain)
    rounds, rest = divmod(count, period)
    return {i * stride % domain: rounds + (i < rest) for i in range(min(period, count))}
