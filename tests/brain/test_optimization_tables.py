"""The page has the tables that the planner gives today, and what it says about them is true."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.optimization_tables import FOLDING, GB200, MEGASCALE, PAGE, TABLES, Table, predictions, section


def test_the_page_has_the_tables_of_today() -> None:
    assert section() in PAGE.read_text("utf-8"), "python -m benchmarks.optimization_tables"


@pytest.mark.parametrize("table", TABLES, ids=["gb200", "megascale", "folding"])
def test_every_step_is_predicted_to_help_or_cannot_be_seen(table: Table) -> None:
    found = predictions(table)
    for before, after in pairwise(found):
        if after.row.published > before.row.published:
            assert after.throughput >= before.throughput


def test_what_the_page_says_of_single_tables() -> None:
    last = predictions(GB200)[-1]
    assert last.throughput == pytest.approx(last.row.published, rel=0.02)
    unseen = sum(row.published - before.published for before, row in pairwise(GB200.rows) if row.change is None)
    assert round(100 * unseen / GB200.rows[0].published) == 48
    assert round(100 * (GB200.rows[-1].published / GB200.rows[0].published - 1)) == 96
    bf16, folded, fp8, both = predictions(FOLDING)
    for first, second in ((bf16, folded), (fp8, both), (bf16, fp8)):
        gain = second.throughput / first.throughput - second.row.published / first.row.published
        assert abs(gain) < 0.04
    assert all(0.7 < each.throughput / each.row.published < 0.85 for each in (bf16, folded, fp8, both))
    assert predictions(MEGASCALE)[1].throughput > 1.13
