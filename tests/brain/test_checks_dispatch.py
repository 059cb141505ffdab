"""Rules about dispatchers: a run that keeps each, one that breaks it, and where the problem is reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moefold.checks import messages, parallel
from moefold.checks.run_all import problems
from moefold.config.model import ModelConfig
from moefold.config.moe import CapacityConfig, MoEConfig
from moefold.config.parallel import EchoConfig, LinkConfig, ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.topology.folded_layout import fold


def over(pad: bool = False, **parallel: Any) -> RunConfig:
    capacity = CapacityConfig(pad=True) if pad else None
    return RunConfig(model=ModelConfig(moe=MoEConfig(capacity=capacity)), parallel=ParallelConfig(**parallel))


BOUNDED = over(ep=4, dispatcher="all_to_all_bounded")
CASES = [
    (
        parallel.padded_capacity_has_fixed_row_counts,
        over(pad=True, ep=2, dispatcher="all_to_all"),
        over(pad=True, ep=2, dispatcher="deduplicated"),
        "parallel.dispatcher",
    ),
    (
        parallel.ep_inner_divides_ep,
        over(ep=4, dispatcher="two_level", ep_inner=2),
        over(ep=4, dispatcher="two_level", ep_inner=3),
        "parallel.ep_inner",
    ),
    (
        parallel.link_costs_are_positive,
        over(link=LinkConfig(latency_us=0.0)),
        over(link=LinkConfig(reduce_scatter_gb_s=-1.0)),
        "parallel.link.reduce_scatter_gb_s",
    ),
    (
        parallel.ep_inner_is_used,
        over(ep=4, dispatcher="two_level", ep_inner=2),
        over(ep=4, dispatcher="deduplicated", ep_inner=2),
        "parallel.ep_inner",
    ),
    (
        parallel.row_bounds_hold_an_even_routing,
        over(ep=4, dispatcher="all_to_all_bounded", row_bound=1.0, pair_bound=1.0),
        over(ep=4, dispatcher="all_to_all_bounded", row_bound=0.9),
        "parallel.row_bound",
    ),
    (
        parallel.row_bounds_hold_an_even_routing,
        over(ep=4, dispatcher="all_to_all_bounded", row_bound=1.5),
        over(ep=4, dispatcher="all_to_all_bounded", row_bound=1.6),
        "parallel.pair_bound",
    ),
    (
        parallel.row_bounds_are_used,
        over(ep=4, dispatcher="all_to_all_bounded", row_bound=1.1),
        over(ep=4, row_bound=1.1),
        "parallel.row_bound",
    ),
    (
        parallel.bounded_rows_are_counted_on_the_device,
        over(pad=True, ep=4),
        over(pad=True, ep=4, dispatcher="all_to_all_bounded"),
        "parallel.dispatcher",
    ),
    (
        parallel.bounded_rows_are_counted_on_the_device,
        BOUNDED,
        replace(BOUNDED, precision=PrecisionConfig(recipe="mxfp8")),
        "parallel.dispatcher",
    ),
    (
        parallel.bounded_rows_are_counted_on_the_device,
        over(ep=4, echo=EchoConfig()),
        over(ep=4, dispatcher="all_to_all_bounded", echo=EchoConfig()),
        "parallel.dispatcher",
    ),
    (
        parallel.bounded_rows_are_counted_on_the_device,
        replace(BOUNDED, kernels=KernelsConfig(experts="fused")),
        replace(BOUNDED, kernels=KernelsConfig(experts="deepgemm")),
        "kernels.experts",
    ),
]


@pytest.mark.parametrize(("rule", "good", "bad", "path"), CASES)
def test_rule(rule: Any, good: RunConfig, bad: RunConfig, path: str) -> None:
    assert not rule(good)
    found = rule(bad)
    problem = found[0] if isinstance(found, list) else found
    assert problem.path == path and problem.fix
    assert problem in problems(bad)


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(parallel.DISPATCH_RULES)


@pytest.mark.parametrize(
    ("ranks_per_host", "degrees", "words"),
    [
        (2, {}, None),
        (4, {}, None),
        (2, {"ep": 4}, None),
        (4, {"tp": 2, "ep": 8}, None),
        (3, {}, "cut groups unequally"),
        (8, {}, "no group has several ranks on each of several hosts (dense_shard: 8 of 8"),
        (2, {"tp": 2, "ep": 8}, "no group has several"),
        (6, {"ep": 4}, "dense_shard of 8 ranks"),
    ],
)
def test_hosts_cut_every_sharding_group_alike(ranks_per_host: int, degrees: dict[str, Any], words: str | None) -> None:
    run = over(sharding="flat", param_sync="hierarchical", ranks_per_host=ranks_per_host, **degrees)
    found = messages.hosts_cut_sharding_groups_alike(run, fold(run.parallel, 8))
    assert [problem.path for problem in found] == ["parallel.ranks_per_host"] * (words is not None)
    assert all(words in problem.message and "direct" in problem.fix for problem in found if words)
