"""The figures of docs/sharding.md are those that the planner counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moefold.api.runs import load_run
from moefold.plan.collective_counts import messages

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
ROWS = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)


def gigabytes(sharding: str, pp: int, microbatches: int) -> float:
    changes = {"precision.compute": "bfloat16", "parallel.ep": 8, "parallel.pp": pp, "parallel.sharding": sharding}
    run = load_run("qwen3_30b_a3b", changes | {"data.global_batch": 16 * microbatches})
    found = messages(run, 16 * pp)
    return sum(each.bytes for each in found if each.group.endswith(("_shard", "_replicate"))) / 1e9


def test_there_are_rows_with_and_without_a_pipeline() -> None:
    assert {pp for pp, *_ in ROWS} == {"1", "2"}


@pytest.mark.parametrize(("pp", "microbatches", "fsdp", "flat"), ROWS)
def test_bytes_of_a_step(pp: str, microbatches: str, fsdp: str, flat: str) -> None:
    for sharding, written in (("fsdp", fsdp), ("flat", flat)):
        assert f"{gigabytes(sharding, int(pp), int(microbatches)):.1f}" == written
