"""The table of faults says what was measured, and names tests that exist and that `make nightly` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fault_matrix import MATRIX, PAGE, Row, with_table

ROOT = Path(__file__).parents[1]


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `python -m tests.fault_matrix --write`"


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.number)
def test_what_shows_a_row_exists_and_is_run(row: Row) -> None:
    nightly = (ROOT / "Makefile").read_text()
    for name in row.tests:
        if "/" in name:
            assert "def test_" in (ROOT / "tests" / name).read_text()
        else:
            module = ROOT / "tests" / name.replace(".", "/")
            assert module.with_suffix(".py").exists() and f"-m tests.{name}" in nightly


def test_rows_are_in_order() -> None:
    numbers = [row.number for row in MATRIX]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers, key=lambda number: (number[0] == "B", int(number[1:].rstrip("n")), number))
