"""The fast suite stays fast: parameters left to CI are marked, and a test that computes long is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.marks import MAX_SECONDS, is_drawn, slow_except, too_long


def marked(params: list[Any]) -> list[tuple[Any, bool]]:
    return [(param.values, pytest.mark.slow.mark in [mark.mark for mark in param.marks]) for param in params]


def test_all_but_the_named_parameters_are_slow() -> None:
    assert marked(slow_except("abc", "b")) == [(("a",), True), (("b",), False), (("c",), True)]
    assert marked(slow_except([(1, 2), (3, 4)], (3, 4))) == [((1, 2), True), ((3, 4), False)]
    with pytest.raises(AssertionError, match="is not among"):
        slow_except("abc", "d")


def test_a_long_test_is_named_unless_it_is_marked() -> None:
    def report(name: str, seconds: float, *marks: str) -> Any:
        return SimpleNamespace(
            nodeid=name, keywords=dict.fromkeys(marks, 1), user_properties=[("cpu_seconds", seconds)]
        )

    reports = [report("short", MAX_SECONDS), report("long", 7.0), report("longer", 9.0), report("known", 9.0, "slow")]
    assert too_long(reports) == ["9.0 s longer", "7.0 s long"]


def test_parts_of_seeds_in_a_row_are_all_tests_once() -> None:
    names = [f"tests/a.py::test[{number}]" for number in range(90)]
    drawn = [[name for name in names if is_drawn(name, seed, 3)] for seed in (7, 8, 9)]
    assert sorted(name for part in drawn for name in part) == sorted(names) and all(
        20 < len(part) < 40 for part in drawn
    )
    assert all(is_drawn(name, seed, 1) for name in names for seed in range(3))
