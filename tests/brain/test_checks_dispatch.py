"""Rules about dispatchers: a run that keeps each, one that breaks it, and where the problem is reported."""

from __future__ import annotations

from typing import Any

import pytest

from moefold.checks import dispatch
from moefold.checks.run_all import problems
from moefold.config.model import ModelConfig
from moefold.config.moe import CapacityConfig, MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig


def over(pad: bool = False, **parallel: Any) -> RunConfig:
    capacity = CapacityConfig(pad=True) if pad else None
    return RunConfig(model=ModelConfig(moe=MoEConfig(capacity=capacity)), parallel=ParallelConfig(**parallel))


CASES = [
    (
        dispatch.padded_slots_have_known_counts,
        over(pad=True, ep=2, dispatcher="all_to_all"),
        over(pad=True, ep=2, dispatcher="deduplicated"),
        "parallel.dispatcher",
    ),
    (
        dispatch.hosts_divide_ep,
        over(ep=4, dispatcher="two_level", ep_inner=2),
        over(ep=4, dispatcher="two_level", ep_inner=3),
        "parallel.ep_inner",
    ),
    (
        dispatch.hosts_are_used,
        over(ep=4, dispatcher="two_level", ep_inner=2),
        over(ep=4, dispatcher="deduplicated", ep_inner=2),
        "parallel.ep_inner",
    ),
]


@pytest.mark.parametrize(("rule", "good", "bad", "path"), CASES)
def test_rule(rule: Any, good: RunConfig, bad: RunConfig, path: str) -> None:
    assert rule(good) is None
    problem = rule(bad)
    assert problem is not None and problem.path == path and problem.fix
    assert problem in problems(bad)


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(dispatch.RULES)
