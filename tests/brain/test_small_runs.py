"""Rows of vTrain's table as records: read, predicted, and told apart from those that the collection has."""

from __future__ import annotations

import pytest

from benchmarks.small_runs import Row, error, read_table, record_of, row_of, section
from moefold.errors import MoefoldError
from moefold.plan.published.points import published_workload
from moefold.plan.timing.step_time import step_time

# Two rows of the table itself.
TABLE = """\ufeff# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,...
2,16,8,1024,16,24,1024,1,1,2,372.160408
8,32,4,1024,16,24,1024,2,2,2,219.732754
"""


def test_a_row_is_a_run_of_the_collection() -> None:
    first, second = read_table(TABLE).items()
    assert first == (Row(2, 16, 8, 1024, 16, 24, 1024, 1, 1, 2), 0.372160408)
    at = published_workload(record_of(second[0]))
    parallel, data = at.parallel, at.run.data
    assert (parallel.tp, parallel.pp, at.dp, at.microbatches, at.cluster.num_gpus) == (2, 2, 2, 4, 8)
    assert (data.global_batch, data.micro_batch, data.seq_len) == (32, 4, 1024)
    assert (at.model.dim, len(at.model.layers), at.framework.name, at.framework.attention) == (
        1024, 24, "deepspeed", "unfused"
    )  # fmt: skip
    assert all(row_of(record_of(row)) == row for row in read_table(TABLE))


def test_both_rows_are_predicted_within_a_quarter() -> None:
    for row, seconds in read_table(TABLE).items():
        predicted = step_time(published_workload(record_of(row))).total
        assert error(row, predicted) == 0 and error(row, 2 * predicted) == -0.5
        assert abs(error(row, seconds)) < 0.25


def test_rows_that_the_collection_has_are_left_out() -> None:
    table = read_table(TABLE)
    first, second = table
    assert "| all | 2 |" in section(table, set())
    made = section(table, {first})
    assert "| tp 2 | 1 |" in made and "tp 1" not in made and "| all | 1 |" in made
    with pytest.raises(MoefoldError, match="line 2: 3 columns"):
        read_table("# head\n1,2,3\n")
    assert second.tp == 2
