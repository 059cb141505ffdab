"""Optimizer settings that would lose something or do nothing are refused, with the numbers and what would work."""

from __future__ import annotations

import pytest

from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.errors import Problem
from moefold.recipes.catalog import recipe


def found(**changes: object) -> list[Problem]:
    return problems(override(recipe("debug_tiny"), {key.replace("__", "."): value for key, value in changes.items()}))


@pytest.mark.parametrize(
    ("format", "beta2", "refused"),
    [
        ("bfloat16", 0.999, True),
        ("bfloat16", 1 - 2**-8, False),
        ("bfloat16", 1 - 2**-8 + 2**-20, True),
        ("bfloat16", 0.95, False),
        ("float8", 0.95, True),
        ("float8", 0.9, False),
        ("float32", 0.999, False),
        (None, 0.999, False),
    ],
)
def test_nearest_rounding_is_refused_where_it_freezes_the_second_moment(
    format: str | None, beta2: float, refused: bool
) -> None:
    changes = {"precision__moments": format, "optim__beta2": beta2}
    seen = found(**changes)
    assert bool(seen) == refused
    if refused:
        (problem,) = seen
        assert problem.path == "precision.moments" and "optim.beta2" in problem.message
        assert f"{1 - beta2:.2g}" in problem.message and "stochastic" in problem.fix
        assert found(**changes, precision__moments_rounding="stochastic") == []


def test_moments_in_the_format_of_narrow_parameters_are_refused_too() -> None:
    narrow = {"precision__params": "bfloat16", "precision__compute": "bfloat16", "optim__beta2": 0.999}
    (problem,) = found(**narrow)
    assert problem.path == "precision.params"
    assert found(**narrow, precision__moments="float32") == []
    (first,) = found(precision__moments="bfloat16", optim__beta1=0.999)
    assert "optim.beta1" in first.message


def test_stochastic_rounding_needs_narrow_moments() -> None:
    (problem,) = found(precision__moments_rounding="stochastic")
    assert problem.path == "precision.moments_rounding" and "float32" in problem.message
    narrow = {"precision__params": "float64", "precision__compute": "float64", "precision__moments": "float32"}
    assert [each.path for each in found(**narrow)] == ["precision.moments"]


def test_a_remainder_needs_weights_that_are_kept() -> None:
    (problem,) = found(precision__master="remainder", precision__compute="bfloat16")
    assert problem.path == "precision.master" and "fsdp" in problem.message and "flat" in problem.fix


def test_groups_match_parameters_and_not_only_those_of_earlier_groups() -> None:
    def seen(*patterns: str) -> list[Problem]:
        return found(optim__groups=[{"match": pattern} for pattern in patterns])

    assert seen("*.router.weight", "layers.0.*", "*") == []
    (wrong,) = seen("*.router.wieght")
    assert wrong.path == "optim.groups.0.match" and "matches no parameter" in wrong.message
    (late,) = seen("layers.*", "layers.0.*")
    assert late.path == "optim.groups.1.match" and "'layers.*'" in late.message and "first" in late.fix


def test_numbers_of_groups_are_usable() -> None:
    groups = [{"match": "embedding.*", "lr_scale": -1.0}, {"match": "*", "weight_decay": -0.5}]
    assert [each.path for each in found(optim__groups=groups)] == [
        "optim.groups.0.lr_scale",
        "optim.groups.1.weight_decay",
    ]
