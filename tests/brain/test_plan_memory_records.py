"""Predicted memory of published runs, which are not part of the repository: MOEFOLD_PUBLISHED names their folder."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from moefold.plan.memory.peak import predict_memory
from moefold.plan.published.points import completed, with_details
from moefold.plan.published.predict_records import measured_bytes
from moefold.plan.published.records import workload_of_record

FOLDER = Path(os.environ.get("MOEFOLD_PUBLISHED", "none"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="MOEFOLD_PUBLISHED names no folder")
GIGA = {"gib": 2**30, "gb": 1e9}
KEYS = ("peak_allocated_gib", "peak_gib", "peak_reserved_gib", "peak_allocated_gb", "peak_gb", "total_gb")


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines() if line.strip()]


def measured(record: dict[str, Any]) -> float:
    key = next(key for key in KEYS if isinstance(record["memory"].get(key), (int, float)))
    return float(record["memory"][key]) * GIGA[key.rpartition("_")[2]]


def error(record: dict[str, Any]) -> float:
    workload = with_details(record, workload_of_record(completed(record)))
    return measured_bytes(record, workload) / measured(record) - 1


@pytest.mark.parametrize(("name", "most"), [("memory_peak", 0.08), ("memory_peak_moe", 0.10)])
def test_peaks(name: str, most: float) -> None:
    chosen = set(json.loads((FOLDER / "score_sets.json").read_text())[name]["ids"])
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records("published.jsonl"):
        if record["id"] in chosen:
            groups[record["leak_group"]].append(error(record))
    errors = [each for group in groups.values() for each in group]
    assert len(errors) == len(chosen)
    assert mean(mean(map(abs, group)) for group in groups.values()) <= most
    assert abs(mean(errors)) <= 0.05


def test_what_ran_fits_and_what_did_not_does_not() -> None:
    ran = [record for record in records("published.jsonl") if record["use"]["time"]]
    said_no = [record["id"] for record in ran if not fits(record)]
    assert len(said_no) <= 0.03 * len(ran), said_no
    failed = [record for record in records("feasibility.jsonl") if not record["fits"] and record["num_gpus"]]
    assert sum(fits(record) for record in failed) <= 1


def fits(record: dict[str, Any]) -> bool:
    return predict_memory(with_details(record, workload_of_record(completed(record)))).fits
