"""On hardware with published layouts, the search finds one that is at least as fast by the same model.

Needs the collection of published runs: MOEFOLD_PUBLISHED names its folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.plan.predict import predict
from moefold.plan.published.records import workload_of_record
from moefold.plan.search.candidates import choice_of_workload, described, why_illegal
from moefold.plan.search.search import search
from moefold.plan.search.space import limits_of, usual_space
from moefold.plan.workload import Workload

FOLDER = os.environ.get("MOEFOLD_PUBLISHED", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER, reason="the published collection is not here")]


def questions() -> dict[str, list[Workload]]:
    """Layouts by what they have in common: cluster, batch, format, framework and its date."""
    found: dict[str, list[Workload]] = {}
    for line in (Path(FOLDER) / "published.jsonl").open() if FOLDER else ():
        record: dict[str, Any] = json.loads(line)
        if record["model"]["key"] == "deepseek_v3" and record["use"]["time"]:
            workload = workload_of_record(record)
            key = (
                workload.cluster.gpu.name,
                workload.cluster.num_gpus,
                round(workload.global_tokens),
                workload.run.precision,
                workload.framework.name,
            )
            found.setdefault(f"{key} {workload.framework.date:.2f}", []).append(workload)
    return found


@pytest.mark.parametrize("jobs", questions().values(), ids=list(questions()))
def test_no_published_layout_is_faster(jobs: list[Workload]) -> None:
    space = replace(usual_space(jobs[0]), format=(jobs[0].format,))
    best = search(jobs[0], space, from_own=False).best
    for workload in jobs:
        found = predict(workload)
        # A layout that is predicted not to fit cannot be proposed.
        if found.memory.fits and why_illegal(choice_of_workload(workload), limits_of(workload), space) is None:
            assert best.seconds <= found.time.step_seconds * 1.0001, described(choice_of_workload(workload))
