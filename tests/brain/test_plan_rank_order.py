"""The planner knows which groups an order of ranks keeps inside a domain, and takes the order that is faster."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefold.checks.run_all import problems
from moefold.config.parallel import ParallelConfig, RankOrderConfig
from moefold.errors import ConfigError
from moefold.hardware.cluster import cluster_of
from moefold.plan.launch_command import changes_to_run
from moefold.plan.predict import predict
from moefold.plan.prediction import Prediction
from moefold.plan.search.candidates import choice_of_workload, limits_of
from moefold.plan.search.enumeration import other_orders
from moefold.plan.search.explain import rank_order_words
from moefold.plan.search.search import search
from moefold.plan.search.space import narrowed, usual_space
from moefold.plan.traffic import data_reach, dense_reach, expert_data_reach, expert_grid_reach, expert_reach, reach
from moefold.plan.workload import Workload, changed, workload_of_run
from moefold.recipes.catalog import recipe
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS, fold

USUAL, EDP_INNERMOST = RankOrderConfig(), RankOrderConfig(expert="etp-edp-ep-pp")
SIZES = st.sampled_from([1, 1, 2, 4, 8])


def workload(name: str, gpus: int, batch: int, seq_len: int, **degrees: Any) -> Workload:
    run = recipe(name)
    data = replace(run.data, global_batch=batch, micro_batch=1, seq_len=seq_len)
    return workload_of_run(replace(run, parallel=ParallelConfig(**degrees), data=data), cluster_of("H100", gpus))


def wide_ep(sharding: str = "fsdp", order: RankOrderConfig = USUAL) -> Workload:
    """Four nodes of experts, and eight times the same experts."""
    return workload("qwen3_30b_a3b", 256, 256, 1024, ep=32, sharding=sharding, rank_order=order)


@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(DENSE_ORDERS), st.sampled_from(EXPERT_ORDERS))
def test_ranks_inside_a_domain_are_those_of_the_layout(
    tp: int, cp: int, dp: int, ep: int, dense: str, expert: str
) -> None:
    """Counted over every group of the grids that the trainer makes; sizes are powers of two, as domains are."""
    world = tp * cp * dp * ep
    assume(world <= 512)
    parallel = ParallelConfig(tp=tp, cp=cp, ep=ep, rank_order=RankOrderConfig(dense, expert))
    layout, run = fold(parallel, world), recipe("qwen3_30b_a3b")
    for domain in (4, 8, 64):
        made = Workload(replace(run, parallel=parallel), cluster_of("H100", world, domain=domain))
        found = {
            "tp": dense_reach(made, "tp"),
            "cp": dense_reach(made, "cp"),
            "dense_shard": data_reach(made),
            "ep": expert_reach(made),
            "edp": expert_data_reach(made),
            "expert_block": expert_grid_reach(made, "ep", "etp"),
        }
        for name, where in found.items():
            for rank in range(0, world, max(1, world // 9)):
                ranks = layout.ranks(name, rank)
                together = set(Counter(other // domain for other in ranks).values())
                assert (where.size, {where.inside}) == (len(ranks), together), (name, ranks, domain)


@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([1, 3, 8, 72]))
def test_the_usual_order_is_predicted_as_before(tp: int, cp: int, ep: int, edp: int, domain: int) -> None:
    world = tp * cp * ep * edp
    run = replace(recipe("qwen3_30b_a3b"), parallel=ParallelConfig(tp=tp, cp=cp, ep=ep))
    made = Workload(run, cluster_of("H100", world, domain=domain))
    usable = made.cluster.usable_domain
    assert data_reach(made) == reach(made.dp * cp, tp, usable) and dense_reach(made, "cp") == reach(cp, tp, usable)
    assert expert_reach(made) == reach(ep, 1, usable) and expert_data_reach(made) == reach(made.edp, ep, usable)


def lines(prediction: Prediction) -> dict[str, float]:
    return {line.name: line.seconds for line in prediction.time.lines}


def test_experts_that_leave_the_domain_anyway_let_their_gradients_stay_inside() -> None:
    """ep 32 has 8 of its ranks in a node at most: 3/4 of the rows cross in the usual order, and 31/32 with edp
    innermost. But weights and gradients of experts, 8 of whose replicas fit into a node, no longer cross at all."""
    usual, other = wide_ep(), wide_ep(order=EDP_INNERMOST)
    assert (expert_reach(usual).inside, expert_data_reach(usual).inside) == (8, 1)
    assert (expert_reach(other).inside, expert_data_reach(other).inside) == (1, 8)
    first, second = predict(usual), predict(other)
    assert second.time.step_seconds < 0.93 * first.time.step_seconds
    assert first.memory.total == second.memory.total
    assert lines(second)["sharded parameters"] < 0.5 * lines(first)["sharded parameters"]
    assert lines(second)["expert dispatch and combine"] > lines(first)["expert dispatch and combine"]


def test_with_many_rows_per_weight_the_usual_order_stays() -> None:
    """Gradients are summed once per step, rows travel with every microbatch."""
    long = workload("deepseek_v3", 1024, 1024, 4096, ep=64, pp=8, sharding="flat")
    other = changed(long, parallel={"rank_order": EDP_INNERMOST})
    assert predict(long).time.step_seconds < 0.98 * predict(other).time.step_seconds


def test_the_search_takes_the_faster_order_and_says_so() -> None:
    own = wide_ep()
    fixed = "tp=1,cp=1,pp=1,ep=32,etp=1,sequences=1,sharding=fsdp,replicate=1,format=bfloat16,dispatcher=all_to_all"
    found = search(own, narrowed(usual_space(own), fixed)).best
    assert found.choice.expert_order == "etp-edp-ep-pp" and found.choice.dense_order == USUAL.dense
    usual = search(own, narrowed(usual_space(own), f"{fixed},expert_order={USUAL.expert}")).best
    assert found.seconds < 0.95 * usual.seconds
    assert problems(found.workload.run, 256) == []
    changes = changes_to_run(found.workload, own.run)
    assert changes["parallel.rank_order.expert"] == "etp-edp-ep-pp" and "parallel.rank_order.dense" not in changes
    said = rank_order_words(found.workload)
    assert "edp inside one domain" in said and "ep over 32" in said and "slower" in said
    assert rank_order_words(usual.workload) == ""


def test_only_orders_that_number_ranks_differently_are_tried() -> None:
    own = wide_ep()
    space, limits = usual_space(own), limits_of(own)
    assert space.dense_order == DENSE_ORDERS and space.expert_order == EXPERT_ORDERS
    # Only dp has several ranks in the attention grid, ep and edp in the other.
    tried = list(other_orders(choice_of_workload(own), limits, space))
    assert [(each.dense_order, each.expert_order) for each in tried] == [(USUAL.dense, "etp-edp-ep-pp")]
    three = choice_of_workload(own)._replace(tp=2, cp=2, etp=2)
    assert len(list(other_orders(three, limits, space))) == 10


def test_on_one_domain_and_for_other_frameworks_the_order_is_the_runs_own() -> None:
    small = workload("qwen3_30b_a3b", 8, 8, 1024, ep=8, rank_order=EDP_INNERMOST)
    assert usual_space(small).expert_order == ("etp-edp-ep-pp",)
    theirs = replace(wide_ep(), framework=replace(wide_ep().framework, name="megatron"))
    assert usual_space(theirs).expert_order == (USUAL.expert,)
    with pytest.raises(ConfigError, match="choose etp-ep-edp-pp, etp-edp-ep-pp"):
        narrowed(usual_space(small), "expert_order=ep")
