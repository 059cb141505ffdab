"""Published step times to which the planner's constants are fitted and with which they are compared.

A point is a workload, its measured step, and the groups it must be left out with: its **leak group** (the same model,
layout and GPU in any release, or a whole sweep), its GPU, and its family of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.errors import MoefoldError
from moefold.plan.published.record_details import completed, with_details
from moefold.plan.published.records import Record, workload_of_record
from moefold.plan.workload import Workload


@dataclass(frozen=True)
class Point:
    id: str
    workload: Workload
    seconds: float
    leak_group: str
    gpu: str
    family: str


def published_workload(record: Record) -> Workload:
    """The workload of a record, with what its source leaves unsaid filled in."""
    return with_details(record, workload_of_record(completed(record)))


def read_records(folder: Path) -> list[Record]:
    """All records of a collection, from its `published*.jsonl` files."""
    files = sorted(folder.glob("published*.jsonl"))
    if not files:
        raise MoefoldError(f"{folder}: no published*.jsonl here; name the folder that holds the collection")
    return [json.loads(line) for path in files for line in path.read_text("utf-8").splitlines() if line.strip()]


def points_of(records: Iterable[Record]) -> list[Point]:
    """Those records whose layout is complete and whose step time is known."""
    return [_point(record) for record in records if (record.get("use") or {}).get("time")]


def _point(record: Record) -> Point:
    target: dict[str, Any] = record["target"]
    return Point(
        id=record["id"],
        workload=published_workload(record),
        seconds=float(target["step_time_s"]),
        leak_group=record["leak_group"],
        gpu=record["hardware"]["gpu"],
        family=record["model"]["family"],
    )
