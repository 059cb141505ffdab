"""Folding, for every legal set of sizes that hypothesis can think of."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefold.config.parallel import ParallelConfig, RankOrderConfig
from moefold.errors import LayoutError
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS, GROUPS, FoldedLayout, fold, locality

LARGE = ParallelConfig(pp=16, tp=4, cp=2, ep=64)


@st.composite
def folds(draw: st.DrawFn) -> tuple[ParallelConfig, int]:
    """Both grids of one stage are drawn as factors of the same number, so every draw is legal."""
    sizes = st.sampled_from([1, 1, 2, 3, 4])
    tp, cp, dp_replicate, dp_shard, pp = (draw(sizes) for _ in range(5))
    stage = tp * cp * dp_replicate * dp_shard
    etp = draw(st.sampled_from(divisors(stage)))
    ep = draw(st.sampled_from(divisors(stage // etp)))
    edp_replicate = draw(st.sampled_from(divisors(stage // etp // ep)))
    assume(stage * pp <= 512)
    order = RankOrderConfig(draw(st.sampled_from(DENSE_ORDERS)), draw(st.sampled_from(EXPERT_ORDERS)))
    parallel = ParallelConfig(
        tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp_replicate=dp_replicate, edp_replicate=edp_replicate, rank_order=order
    )
    return parallel, stage * pp


def layouts() -> st.SearchStrategy[FoldedLayout]:
    return folds().map(lambda drawn: fold(*drawn))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@given(layouts())
def test_groups_of_each_name_are_the_world_with_each_rank_once(layout: FoldedLayout) -> None:
    for name, spec in GROUPS.items():
        groups = list(layout.grid_of(spec).groups(spec.axes))
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        assert {len(group) for group in groups} == {layout.size(name)}


@given(layouts(), st.data())
def test_a_rank_finds_itself(layout: FoldedLayout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world - 1))
    for grid in (layout.attention, layout.expert):
        assert sum(at * grid.stride(axis) for axis, at in grid.coordinates(rank).items()) == rank
        assert all(layout.coordinate(rank, axis) == at for axis, at in grid.coordinates(rank).items())
    for name, spec in GROUPS.items():
        group = layout.ranks(name, rank)
        assert group[layout.index(name, rank)] == rank
        assert group == tuple(sorted(group))
        assert group in set(layout.grid_of(spec).groups(spec.axes))


@given(layouts())
def test_pipeline_stages_are_the_same_ranks_in_both_grids(layout: FoldedLayout) -> None:
    assert list(layout.attention.groups(("pp",))) == list(layout.expert.groups(("pp",)))
    experts = ("edp_replicate", "edp_shard", "ep", "etp")
    assert set(layout.attention.groups(GROUPS["stage"].axes)) == set(layout.expert.groups(experts))


@given(layouts(), st.sampled_from([1, 2, 3, 7, 8, 72]))
def test_locality_counts_what_enumeration_counts(layout: FoldedLayout, domain: int) -> None:
    for spec in GROUPS.values():
        spans = [len({rank // domain for rank in group}) for group in layout.grid_of(spec).groups(spec.axes)]
        found = locality(layout, spec, domain)
        assert (found.num_groups, found.fewest_domains, found.most_domains) == (len(spans), min(spans), max(spans))
        assert found.num_leaving == sum(span > 1 for span in spans)


def by_loops(order: str, sizes: dict[str, int]) -> list[dict[str, int]]:
    """Coordinates of every rank: count up, the axis that the order names first the fastest, dp's shards before its
    replicas."""
    axes = []
    for name in order.split("-"):
        axes += [f"{name}_shard", f"{name}_replicate"] if name in ("dp", "edp") else [name]
    found = [dict.fromkeys(axes, 0)]
    while True:
        following = dict(found[-1])
        for axis in axes:
            following[axis] += 1
            if following[axis] < sizes[axis]:
                break
            following[axis] = 0
        else:
            return found
        found.append(following)


@given(folds())
def test_coordinates_and_groups_are_those_of_an_odometer(drawn: tuple[ParallelConfig, int]) -> None:
    parallel, world = drawn
    layout = fold(parallel, world)
    orders = {"attention": parallel.rank_order.dense, "expert": parallel.rank_order.expert}
    for name, grid in (("attention", layout.attention), ("expert", layout.expert)):
        places = by_loops(orders[name], dict(grid.axes))
        assert [grid.coordinates(rank) for rank in range(world)] == places
        for group, spec in GROUPS.items():
            if spec.grid != name:
                continue
            others = [axis for axis, _ in grid.axes if axis not in spec.axes]
            for rank in range(0, world, max(1, world // 7)):
                here = [places[rank][axis] for axis in others]
                expected = [each for each in range(world) if [places[each][axis] for axis in others] == here]
                assert layout.ranks(group, rank) == tuple(expected)


@given(folds())
def test_samples_go_to_coordinates_whatever_the_order_of_ranks_is(drawn: tuple[ParallelConfig, int]) -> None:
    """Places of tokens are dp, then cp, then tp: loops over coordinates find the rank of each."""
    parallel, world = drawn
    layout, at = fold(parallel, world), {}
    for rank in range(world):
        at[tuple(layout.coordinate(rank, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))] = rank
    stage = world // parallel.pp
    assert [layout.token_place(at[key]) for key in sorted(at)] == list(range(stage)) * parallel.pp
    for rank in range(world):
        assert layout.context_place(rank) == layout.token_place(rank) // parallel.tp
        assert layout.context_ranks(rank, parallel.cp) == layout.ranks("cp", rank)
        assert layout.context_place(rank) % parallel.cp == layout.index("cp", rank)
    if parallel.rank_order.dense.index("cp") < parallel.rank_order.dense.index("dp"):
        # Groups of dynamic context parallelism: neighbours by place, ascending in rank.
        for size in layout.context_sizes(dynamic=True):
            ranks = layout.context_ranks(at[min(at)], size)
            assert ranks == tuple(sorted(ranks)) and [layout.context_place(rank) for rank in ranks] == [*range(size)]


def test_another_axis_may_have_neighbouring_ranks() -> None:
    """The replicas of experts inside a domain of 8, and ep over all domains."""
    inner_edp = ParallelConfig(ep=8, rank_order=RankOrderConfig(expert="etp-edp-ep-pp"))
    layout = fold(inner_edp, 64)
    assert layout.ranks("edp", 9) == tuple(range(8, 16)) and layout.ranks("ep", 9) == tuple(range(1, 64, 8))
    assert locality(layout, GROUPS["edp"], 8).num_leaving == 0 and locality(layout, GROUPS["ep"], 8).most_domains == 8
    usual = fold(ParallelConfig(ep=8), 64)
    assert locality(usual, GROUPS["ep"], 8).num_leaving == 0 and locality(usual, GROUPS["edp"], 8).most_domains == 8


def test_by_hand() -> None:
    layout = fold(ParallelConfig(tp=2, cp=2, pp=2, ep=8), 32)
    assert layout.ranks("tp", 5) == (4, 5)
    assert layout.ranks("cp", 5) == (5, 7)
    assert layout.ranks("dp", 5) == (1, 5, 9, 13)
    assert layout.ranks("pp", 5) == (5, 21)
    assert layout.ranks("ep", 5) == tuple(range(8))
    assert layout.ranks("edp", 5) == (5, 13)
    assert layout.ranks("dense_shard", 5) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert (layout.size("dp"), layout.size("edp"), layout.index("dp", 5)) == (4, 2, 1)
    assert layout.attention.coordinates(5) == {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 1}


@pytest.mark.timing
def test_sixteen_thousand_ranks_and_a_hundred_times_as_many_are_quick() -> None:
    for world in (16_384, 1_638_400):
        start = time.thread_time()  # not the clock on the wall: other tests share the cores
        layout = fold(LARGE, world)
        for name, spec in GROUPS.items():
            assert layout.index(name, world - 1) == layout.size(name) - 1
            if spec.axes != GROUPS["world"].axes:
                locality(layout, spec, 72)
        assert time.thread_time() - start < 1.0
    assert Counter(len(group) for group in fold(LARGE, 16_384).expert.groups(("ep",))) == {64: 256}


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        (
            ParallelConfig(tp=2, ep=3),
            8,
            "parallel.ep: experts cannot fold: etp*ep = 1*3 does not divide tp*cp*dp = 2*1*4 = 8, "
            "the ranks of one stage; choose ep from [1, 2, 4, 8]",
        ),
        (
            ParallelConfig(tp=3, pp=2),
            8,
            "world: attention does not fit: tp*cp*pp = 3*1*2 = 6 does not divide the world of 8; "
            "use a multiple of 6 ranks, such as 12",
        ),
        (
            ParallelConfig(ep=4, dp_replicate=3, edp_replicate=4),
            8,
            "parallel.dp_replicate: 3 replicas do not divide dp = 8/(1*1*1) = 8; "
            "choose dp_replicate from [1, 2, 4, 8]\n"
            "parallel.edp_replicate: 4 replicas do not divide edp = 8/(1*4) = 2; choose edp_replicate from [1, 2]",
        ),
        (
            ParallelConfig(tp=2, rank_order=RankOrderConfig("tp-pp-cp-dp", "ep-etp")),
            8,
            "parallel.rank_order.dense: 'tp-pp-cp-dp' is not an order of tp, cp, dp with pp last: with pp further in, "
            "a pipeline stage would not be the same ranks in both grids; innermost first: tp-cp-dp-pp, tp-dp-cp-pp, "
            "cp-tp-dp-pp, cp-dp-tp-pp, dp-tp-cp-pp, dp-cp-tp-pp\n"
            "parallel.rank_order.expert: 'ep-etp' is not an order of etp, ep, edp with pp last; innermost first: "
            "etp-ep-edp-pp, etp-edp-ep-pp, ep-etp-edp-pp, ep-edp-etp-pp, edp-etp-ep-pp, edp-ep-etp-pp",
        ),
        (
            ParallelConfig(tp=0, ep=-2),
            8,
            "parallel.tp: a size cannot be 0; use 1 or more\nparallel.ep: a size cannot be -2; use 1 or more",
        ),
    ],
)
def test_an_impossible_fold_says_what_would_work(parallel: ParallelConfig, world: int, expected: str) -> None:
    with pytest.raises(LayoutError) as error:
        fold(parallel, world)
    assert str(error.value) == expected


def test_huge_sizes_neither_hang_nor_crash() -> None:
    start = time.thread_time()  # not the clock on the wall: other tests share the cores
    with pytest.raises(LayoutError):
        fold(ParallelConfig(ep=10**40 + 1), 10**60)
    assert fold(ParallelConfig(ep=10**40), 10**60).size("edp") == 10**20
    assert time.thread_time() - start < 1
