"""docs/oracles.md names a test for every quantity; each of them exists, and none of tests/equations is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "oracles.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
KINDS = ("equation", "library", "published", "search", "machine")


def problems(page: str, root: Path = ROOT) -> list[str]:
    found = []
    for path, name in NAMED.findall(page):
        file = root / path
        if not file.is_file():
            found.append(f"{path} does not exist")
        elif name not in {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}:
            found.append(f"{path} has no {name}")
    for row in rows(page):
        quantity, _, tests = row
        if not NAMED.search(tests):
            found.append(f"{quantity!r} has no test")
        if any(not NAMED.fullmatch(test.strip()) for test in tests.split(",")):
            found.append(f"{quantity!r} names something that is no path::test")
    return found


def rows(page: str) -> list[list[str]]:
    """Quantity, oracle and tests of every row that is no header."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "quantity" and not set(row[0]) <= {"-"}]


def test_every_test_that_is_named_exists() -> None:
    assert len(rows(PAGE)) > 50
    assert problems(PAGE) == []


def test_every_oracle_is_of_a_known_kind() -> None:
    """But for kernels, whose reference is held by the rows above."""
    strange = [quantity for quantity, oracle, _ in rows(PAGE) if not oracle.startswith(KINDS)]
    assert all(quantity.startswith("kernels") for quantity in strange), strange


def test_every_file_of_equations_is_on_the_page() -> None:
    files = sorted((ROOT / "tests" / "equations").glob("test_*.py"))
    named = {path for path, _ in NAMED.findall(PAGE)}
    assert files and [file.name for file in files if str(file.relative_to(ROOT)) not in named] == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| a | equation | `tests/body/test_nothing.py::test_a` |", "does not exist"),
        ("| a | equation | `tests/body/test_rope.py::test_no_such` |", "has no test_no_such"),
        ("| a | equation | looks right |", "has no test"),
    ],
)
def test_what_is_wrong_is_found(row: str, problem: str) -> None:
    assert any(problem in found for found in problems(row))
