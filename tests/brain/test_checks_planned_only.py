"""Values that other frameworks have: every one can be written down and planned, and none can be trained or proved."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from moefold.checks.planned_only import PLANNED_ONLY, PlannedOnly
from moefold.checks.run_all import problems
from moefold.config.loading import dump_run, override, parse_run
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.launch_command import beyond_moefold, changes_to_run
from moefold.plan.predict import predict
from moefold.plan.workload import Framework, Workload
from moefold.recipes.catalog import RECIPES, recipe


def offered(row: PlannedOnly) -> tuple[object, ...]:
    """What the key's type allows; items, where it is a tuple."""
    section, _, key = row.path.rpartition(".")
    hints = get_type_hints(type(attrgetter(section)(RunConfig())))
    return tuple(chain.from_iterable(_values(part) for part in (get_args(hints[key]) or (hints[key],))))


def _values(part: Any) -> tuple[object, ...]:
    known: dict[Any, tuple[object, ...]] = {int: (0, 2), float: (0.5,), Ellipsis: (), NoneType: (None,)}
    if part in known:
        return known[part]
    inner = get_args(part)
    return tuple(chain.from_iterable(_values(each) for each in inner)) if inner else (part,)


def with_value(run: RunConfig, path: str, value: object) -> RunConfig:
    section, _, key = path.rpartition(".")
    before: Any = attrgetter(section)(run)
    wanted = (value,) if isinstance(getattr(before, key), tuple) else value
    changed = replace(before, **{key: wanted})
    return with_value(run, section, changed) if "." in section else replace(run, **{section: changed})


# Written out, so that a row that is missing from the table is missed.
MUST_BE_REFUSED: dict[str, object] = {
    "parallel.dispatcher": "hybridep",
    "parallel.sharding": "zero1",
    "parallel.overlap": "ep",
    "precision.recipe": "fp8_rowwise",
    "precision.params": "float8",
    "precision.gradients": "bfloat16",
    "precision.master": "float32",
    "precision.moments": "float16",
    "memory.recompute": "norms",
    "memory.offload": "moe_act",
    "memory.offload_layers": 1,
    "kernels.graphs": "full",
    "kernels.graph_scope": "moe_preprocess",
}
VALUES = [(row, value) for row in PLANNED_ONLY for value in offered(row)]


@pytest.mark.parametrize(("row", "value"), VALUES, ids=lambda each: getattr(each, "path", str(each)))
def test_a_value_is_trained_or_refused_with_what_would_work(row: PlannedOnly, value: object) -> None:
    run = with_value(recipe("debug_tiny"), row.path, value)
    assert parse_run(dump_run(run)) == run
    refused = [problem for problem in problems(run) if "plan only" in problem.message]
    if value in row.trained:
        assert refused == []
        return
    (problem,) = refused
    assert problem.path == row.path and str(value) in problem.message and problem.fix.startswith("use ")


@pytest.mark.parametrize(("path", "value"), MUST_BE_REFUSED.items())
def test_every_key_of_other_frameworks_is_refused(path: str, value: object) -> None:
    (problem,) = problems(with_value(recipe("debug_tiny"), path, value))
    assert problem.path == path and "plan only" in problem.message
    assert {row.path for row in PLANNED_ONLY} == set(MUST_BE_REFUSED)


def test_the_table_names_values_that_exist_and_the_defaults_are_trained() -> None:
    for row in PLANNED_ONLY:
        assert set(row.trained) <= set(offered(row)), row.path
        assert set(offered(row)) - set(row.trained), f"{row.path}: everything is trained, so the row can go"
        assert row.values(RunConfig()) == ()


@pytest.mark.parametrize(("row", "value"), VALUES, ids=lambda each: getattr(each, "path", str(each)))
def test_what_is_planned_only_is_predicted_and_said(row: PlannedOnly, value: object) -> None:
    asked = override(recipe("qwen3_30b_a3b"), {"parallel.ep": 8, "data.global_batch": 64})
    workload = Workload(with_value(asked, row.path, value), cluster_of("H100", 8), Framework("megatron"))
    assert predict(workload).time.step_seconds > 0
    if value in row.trained:
        return
    said = beyond_moefold(workload)
    if row.path == "parallel.overlap":
        # moefold has schedules that overlap, and the command takes one where it fits.
        assert said or "parallel.schedule" in changes_to_run(workload, asked)
    else:
        assert any(str(value) in words for words in said)
        assert not problems(override(asked, changes_to_run(workload, asked)), 8)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_none(name: str) -> None:
    assert [row.path for row in PLANNED_ONLY if row.values(recipe(name))] == []
