"""The price of clones: bytes and break-even by hand, and step times that clones shorten where they are worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.config.data import DataConfig
from moefold.config.parallel import EchoConfig, ParallelConfig
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.clone_loads import EchoSizes, cloned, loads_with, skewed_rows
from moefold.plan.echo_cost import break_even_rows, clone_bytes, expert_bytes, least_rows, row_seconds
from moefold.plan.memory.page_pools import pairs_alive
from moefold.plan.memory.peak import memory_at
from moefold.plan.predict import predict
from moefold.plan.search.search import search
from moefold.plan.search.space import narrowed, usual_space
from moefold.plan.search.what_if import answers
from moefold.plan.workload import Workload
from moefold.recipes.catalog import RECIPES


def test_a_clone_of_deepseek_v3_is_88_megabytes_and_pays_from_5300_rows() -> None:
    """Gate, up and down of 7168 x 2048 in two bytes; 50 GB/s against 400 TFLOP/s; 450 GB/s inside of a host."""
    run = replace(RECIPES["deepseek_v3"](), parallel=ParallelConfig(ep=64))
    each_way = expert_bytes(run)
    assert each_way == 3 * 7168 * 2048 * 2 == pytest.approx(88e6, rel=0.01)
    row = row_seconds(7168, 2048, 4e14)
    # A row: 3 matrices, 2 FLOPs per entry, forward and twice that backward.
    assert row == pytest.approx((2 + 4) * 3 * 7168 * 2048 / 4e14)
    assert break_even_rows(each_way, 50e9, row) == pytest.approx(5300, rel=0.01)
    assert break_even_rows(each_way, 450e9, row) == pytest.approx(590, rel=0.01)


@pytest.mark.parametrize("imbalance", [1.1, 1.8, 3.0])
@pytest.mark.parametrize("sizes", [EchoSizes(64, 8, 1), EchoSizes(256, 64, 1), EchoSizes(16, 4, 2)])
def test_a_skewed_router_has_the_imbalance_and_clones_lower_it(sizes: EchoSizes, imbalance: float) -> None:
    rows = skewed_rows(sizes, imbalance)
    assert max(loads_with(rows, [], sizes)) / 10_000 == pytest.approx(imbalance, rel=0.01)
    found = cloned(sizes, imbalance)
    assert 1.0 <= found.busiest < imbalance and 1 <= found.most_sent <= found.clones <= sizes.num_ranks * sizes.slots
    assert found.busiest < 1.2
    assert cloned(sizes, imbalance, min_share=10.0) == (imbalance, 0, 0)


def test_a_balanced_router_has_no_clones() -> None:
    assert cloned(EchoSizes(64, 8, 1), 1.0) == (1.0, 0, 0)


def workload(sequences: int, imbalance: float, echo: EchoConfig | None) -> Workload:
    run = RunConfig(
        model=RECIPES["deepseek_v3"]().model,
        parallel=ParallelConfig(ep=64, pp=4, echo=echo, sharding="flat"),
        precision=replace(RECIPES["deepseek_v3"]().precision, recipe=None, compute="bfloat16"),
        data=DataConfig(4096, 64 * 8 * sequences, sequences),
    )
    return Workload(run, cluster_of("H100", 256), imbalance=imbalance)


def seconds(sequences: int, imbalance: float, echo: EchoConfig | None) -> float:
    return predict(workload(sequences, imbalance, echo)).time.step_seconds


def test_clones_shorten_steps_of_many_rows_and_lengthen_those_of_few() -> None:
    """At 32,768 rows of a rank and sequence, 88 MB clones over the network: with one sequence they lose."""
    echo = EchoConfig(slots=1)
    assert seconds(8, 2.0, echo) < 0.9 * seconds(8, 2.0, None)
    assert seconds(1, 1.05, echo) > seconds(1, 1.05, None)
    assert seconds(1, 1.0, echo) == seconds(1, 1.0, None)


def test_break_even_decides_which_clones_are_made() -> None:
    """With `min_rows` above what any clone would get there are none, and the step costs what it did."""
    assert seconds(1, 1.05, EchoConfig(min_rows=5300)) == seconds(1, 1.05, None)
    assert workload(8, 2.0, EchoConfig(min_rows=5300)).clones.clones > 0


# ---- memory, and the search ----


def test_clones_are_held_from_a_forward_to_its_backward() -> None:
    """In every slot of every MoE layer of the microbatches in flight, which another walk counts."""
    with_clones, without = workload(8, 2.0, EchoConfig(slots=2)), workload(8, 2.0, None)
    for rank in range(4):
        (line,) = (each for each in memory_at(with_clones, rank).lines if each.name == "clones of hot experts")
        pairs = pairs_alive(with_clones.run, with_clones.microbatches, rank)
        assert line.bytes == clone_bytes(with_clones.run) * pairs == 2 * 3 * 7168 * 2048 * 2 * pairs
    assert not any(each.name == "clones of hot experts" for each in memory_at(without, 0).lines)


GRID = "tp=1,cp=1,pp=1,vpp=1,ep=8,etp=1,ep_overlap=false,delay_wgrad=false,sharding=flat,replicate=1"


def smaller(sequences: int, imbalance: float) -> Workload:
    """Sixteen GPUs, of which eight share their experts."""
    recipe = RECIPES["qwen3_30b_a3b"]()
    run = RunConfig(
        model=recipe.model,
        parallel=ParallelConfig(ep=8, sharding="flat"),
        precision=replace(recipe.precision, recipe=None, compute="bfloat16"),
        data=DataConfig(4096, 64 * sequences, sequences),
    )
    return Workload(run, cluster_of("H100", 16), imbalance=imbalance)


@pytest.mark.parametrize(
    ("sequences", "imbalance", "wanted"),
    [(4, 2.0, True), (4, 1.2, True), (1, 1.2, False), (1, 1.05, False), (4, 1.05, False), (4, 1.0, False)],
)
def test_the_search_clones_where_that_is_faster_and_declines_where_not(
    sequences: int, imbalance: float, wanted: bool
) -> None:
    asked = smaller(sequences, imbalance)
    space = narrowed(usual_space(asked), f"{GRID},sequences={sequences}")
    best, without = search(asked, space).best, search(asked, narrowed(space, "clones=0")).best
    assert bool(best.choice.clones) == wanted
    assert best.seconds < without.seconds if wanted else best.seconds == without.seconds
    if wanted:
        echo = best.workload.parallel.echo
        assert echo is not None and echo.slots == best.choice.clones
        # From the break-even on, by the time of the exchange and of a row.
        assert echo.min_rows == least_rows(best.workload) > 100


def test_what_if_says_what_clones_would_change() -> None:
    asked = {each.question: each for each in answers(workload(1, 1.05, None))}
    answer = asked["ranks had 1 spare slots for hot experts"]
    assert answer.prediction is not None and answer.faster(predict(workload(1, 1.05, None))) <= 0
    assert not any("hot experts" in each.question for each in answers(workload(1, 1.0, None)))
