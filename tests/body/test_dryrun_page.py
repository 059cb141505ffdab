"""The tables of the dry run's page are what their commands find."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.dryrun_page import commands, rows_of, table_of, tables

PAGE = (Path(__file__).parents[2] / "docs" / "dryrun.md").read_text("utf-8")
RENEW = "python -m benchmarks.dryrun_page docs/dryrun.md renews it"
COMMANDS = commands(PAGE)


def test_every_command_has_its_table() -> None:
    assert len(COMMANDS) >= 2
    for words, table in zip(COMMANDS, tables(PAGE), strict=True):
        stages = int(words[words.index("--parallel.pp") + 1])
        assert table.count("\n") == stages + 2, RENEW


# GiB of DeepSeek-V3: without options that save memory; with flat buffers and discarded steps; with everything; the
# second of them on 1,024 ranks.
@pytest.mark.parametrize(("number", "bound"), enumerate((205, 140, 75, 70)))
def test_tables_are_within_what_the_layouts_are_held_to(number: int, bound: float) -> None:
    """Every pipeline rank; weight copies are below 1 GiB."""
    for row in tables(PAGE)[number].splitlines()[2:]:
        _, total, _, _, copies, *_ = _cells(row)
        assert total <= bound and copies < 1


def test_mxfp8_keeps_less_of_activations_and_copies_of_weights() -> None:
    """Against the second table, which discards the same steps; experts' inputs are 2 bytes there, 1 + 1/32 here. Copies
    have 1 + 1/32 bytes in each direction; weights, of which some stay wide, 2."""
    for wide, narrow in zip(tables(PAGE)[1].splitlines()[2:], tables(PAGE)[4].splitlines()[2:], strict=True):
        (_, _, parameters, *_, before, _, _), (_, _, _, _, copies, *_, after, _, _) = _cells(wide), _cells(narrow)
        assert 0.75 < after / before < 0.85
        assert 0.85 < copies / (parameters * 33 / 32) <= 1


@pytest.mark.slow
def test_one_row_of_the_page() -> None:
    row = tables(PAGE)[-1].splitlines()[-1]
    words = ["--rank=" + row.split()[1] if word == "--rank" else word for word in COMMANDS[-1] if word != "stages"]
    assert [f"| {' | '.join(cells)} |" for cells in rows_of(words)] == [row], RENEW


def _cells(row: str) -> list[float]:
    return [float(cell) for cell in row.strip("| ").split(" | ")]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_every_row_of_the_page(number: int) -> None:
    assert table_of(COMMANDS[number]) == tables(PAGE)[number], RENEW
