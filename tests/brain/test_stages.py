"""Stage strings mean what they say and nothing else; the automatic balance is the best there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.blueprint.model_shape import shape_of
from moefold.blueprint.stages import (
    StageSpec,
    balance,
    balanced_stages,
    parse_stages,
    part_costs,
    print_stages,
    stages_of,
)
from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.errors import ConfigError
from moefold.recipes.catalog import RECIPES

V3 = "Et*3|(tt|)*29m|L"


def test_the_reports_layout_of_deepseek_v3() -> None:
    stages = parse_stages(V3, num_layers=61, num_mtp=1)
    assert len(stages) == 32
    assert stages[0] == StageSpec(0, True, range(0, 3), (), False)
    assert [len(stage.layers) for stage in stages] == [3] + [2] * 29 + [0, 0]
    assert stages[30] == StageSpec(30, False, range(61, 61), (0,), False)
    assert stages[31] == StageSpec(31, False, range(61, 61), (), True)
    assert print_stages(stages) == V3


@pytest.mark.parametrize(
    ("text", "layers", "mtp", "per_stage"),
    [
        ("EttL", 2, 0, [2]),
        ("Et|tL", 2, 0, [1, 1]),
        ("E|t|t|L", 2, 0, [0, 1, 1, 0]),
        ("E||tt||L", 2, 0, [0, 0, 2, 0, 0]),
        ("E|*3tL", 1, 0, [0, 0, 0, 1]),
        ("Et|(tt|)*30L", 61, 0, [1] + [2] * 30 + [0]),
        ("E(t|(tt|)*2)*2mm|mL", 10, 3, [1, 2, 2, 1, 2, 2, 0, 0]),
        (" E t * 2 | t m*2 L ", 3, 2, [2, 1]),
    ],
)
def test_what_strings_mean(text: str, layers: int, mtp: int, per_stage: list[int]) -> None:
    stages = parse_stages(text, layers, mtp)
    assert [stage.index for stage in stages] == list(range(len(stages)))
    assert [len(stage.layers) for stage in stages] == per_stage
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [module for stage in stages for module in stage.mtp] == list(range(mtp))
    assert parse_stages(print_stages(stages), layers, mtp) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Etx|L", "character 3 ('x') of 'Etx|L' means nothing here"),
        ("Et*|tL", "character 3 ('*') of 'Et*|tL' says no number of times"),
        ("Et*0|ttL", "character 3 ('*')"),
        ("Et*2*2L", "character 5 ('*')"),
        ("*2EttL", "character 1 ('*')"),
        ("E(tt|L", "character 2 ('(') of 'E(tt|L' opens a group that is not closed"),
        ("Ett)|L", "character 4 (')') of 'Ett)|L' closes no group"),
        ("ttL", "no E: the embedding is on no stage; put E first"),
        ("Ett", "no L: the loss is on no stage; put L last"),
        ("EtE|tL", "character 3 ('E') is out of place: the embedding stands first, once"),
        ("|EttL", "character 2 ('E') is out of place"),
        ("EtL|t", "character 3 ('L') is out of place: the loss stands last, once"),
        ("EttL|", "character 4 ('L') is out of place"),
        ("EtmtL", "character 4 ('t') is out of place: layers come before MTP modules"),
        ("Et*3L", "3 t, but model.num_layers is 2; write 2 t in all"),
        ("EttmL", "1 m, but model.num_mtp is 0; leave m out"),
        ("", "no E"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stages(text, num_layers=2, num_mtp=0)
    assert message in str(caught.value)
    assert all(problem.path == "parallel.stages" and problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize(
    "hostile",
    [
        "E" + "(" * 40 + "t" + ")*999" * 40 + "L",
        "E" + "t*99999(" * 500,
        "Et*" + "9" * 5000 + "L",
        "(" * 100_000,
        "E|*999999L",
        "Et*٣L",
    ],
)
def test_hostile_strings_are_refused_quickly(hostile: str) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        parse_stages(hostile, 2, 0)
    assert time.process_time() - start < 3
    assert len(str(caught.value)) < 500


@st.composite
def stage_lists(draw: st.DrawFn) -> tuple[StageSpec, ...]:
    layers, mtp = draw(st.integers(0, 12)), draw(st.integers(0, 3))
    parts = "E" + "t" * layers + "m" * mtp + "L"
    cuts = sorted(draw(st.lists(st.integers(1, len(parts) - 1), max_size=12)))
    edges = [0, *cuts, len(parts)]
    return parse_stages("|".join(parts[a:b] for a, b in pairwise(edges)), layers, mtp)


@given(stage_lists())
def test_printing_and_parsing_are_inverse(stages: tuple[StageSpec, ...]) -> None:
    num_layers, num_mtp = sum(len(stage.layers) for stage in stages), sum(len(stage.mtp) for stage in stages)
    assert parse_stages(print_stages(stages), num_layers, num_mtp) == stages


# ---- balance ----


def largest_cost(costs: Sequence[float], cuts: Sequence[int]) -> float:
    edges = (0, *cuts, len(costs))
    return max(sum(costs[start:stop]) for start, stop in pairwise(edges))


def brute_force(costs: list[float], parts: int) -> float:
    inner = range(1, len(costs))
    return min(largest_cost(costs, cuts) for cuts in combinations_with_replacement(inner, parts - 1))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 5))
def test_no_cut_is_better(costs: list[int], parts: int) -> None:
    cuts = balance(costs, parts)
    assert len(cuts) == parts - 1
    assert cuts == sorted(cuts)
    assert all(1 <= cut <= len(costs) - 1 for cut in cuts)
    assert largest_cost(costs, cuts) == brute_force([*costs], parts)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=7), st.integers(1, 4))
def test_no_cut_is_better_in_fractions(costs: list[float], parts: int) -> None:
    assert largest_cost(costs, balance(costs, parts)) == pytest.approx(brute_force(costs, parts), rel=1e-12)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.integers(2, 4))
def test_an_expensive_end_does_not_excuse_the_others(costs: list[int], parts: int) -> None:
    """With a loss as dear as everything else together, the others are as even as they could be without it."""
    cuts = balance([*costs, sum(costs)], parts)
    edges = [0, *cuts]
    found = max(sum(costs[a:b]) for a, b in pairwise(edges))
    everything_first = [c for c in combinations_with_replacement(range(1, len(costs) + 1), parts - 2)]
    assert cuts[-1] == len(costs)
    assert found == min(largest_cost(costs, cuts) for cuts in everything_first)


def test_equal_layers_are_spread_evenly() -> None:
    for layers, parts in ((10, 4), (61, 16), (7, 3), (100, 64), (5, 5)):
        edges = [0, *balance([1] * layers, parts), layers]
        sizes = [b - a for a, b in pairwise(edges)]
        assert set(sizes) <= {layers // parts, -(-layers // parts)}, sizes


@pytest.mark.timing
def test_balance_is_fast_at_any_size() -> None:
    start = time.perf_counter()
    for layers, parts in ((100, 64), (10_000, 4_096), (10, 50_000)):
        balance([1 + layer % 3 for layer in range(layers)], parts)
    assert time.perf_counter() - start < 2


# ---- the stages of a run ----


def test_deepseek_v3_balances_itself() -> None:
    """In active parameters a dense layer equals an MoE layer; the head, used twice with MTP, is worth three."""
    model = replace(RECIPES["deepseek_v3"]().model, num_mtp=1)
    embedding, dense, *_, moe, module, loss = (
        cost / part_costs(shape_of(model))[3] for cost in part_costs(shape_of(model))
    )
    assert embedding < 0.001
    assert (dense, moe, module, loss) == pytest.approx((1, 1, 1.17, 3.17), abs=0.03)
    assert print_stages(balanced_stages(shape_of(model), 32)) == "Ett|(tt|)*29tm|L"
    assert print_stages(balanced_stages(shape_of(model), 16)) == "Et*5|(t*4|)*14mL"


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("vpp", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, 2, 5, 61])
@pytest.mark.parametrize("mtp", [0, 2])
def test_any_layer_count_on_any_number_of_stages(pp: int, vpp: int, layers: int, mtp: int) -> None:
    model = ModelConfig(num_layers=layers, num_mtp=mtp, num_dense_layers=layers // 3)
    stages = stages_of(model, ParallelConfig(pp=pp, vpp=vpp))
    assert len(stages) == pp * vpp
    assert [stage.embedding for stage in stages] == [True] + [False] * (pp * vpp - 1)
    assert [stage.loss for stage in stages] == [False] * (pp * vpp - 1) + [True]
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert parse_stages(print_stages(stages), layers, mtp) == stages


def test_the_runs_own_string_is_used_and_counted() -> None:
    model = ModelConfig(num_layers=3)
    assert stages_of(model, ParallelConfig(pp=2, stages="E|t*3L")) == parse_stages("E|t*3L", 3, 0)
    with pytest.raises(ConfigError, match=r"2 stages, but pp \* vpp = 2 \* 2 = 4; use 3 `\|`, such as E"):
        stages_of(model, ParallelConfig(pp=2, vpp=2, stages="E|t*3L"))
    with pytest.raises(ConfigError, match="at most"):
        stages_of(model, ParallelConfig(pp=2**40))
