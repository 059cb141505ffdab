"""Profiled steps of real ranks under many layouts: the components of every rank add up to the time that passed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.marks import slow_except

import moefold
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.profile.step_account import StepAccount, read_profile, typical

SETTINGS: dict[str, Any] = {
    "model.num_layers": 4,
    "data.seq_len": 64,
    "data.global_batch": 8,
    "data.micro_batch": 1,
    "data.validation": None,
    "optim.lr_schedule.warmup": 0,
    "train.steps": 4,
    "train.log_every": 1,
    "train.saving.every": 0,
    "train.profile.every": 1,
    "train.profile.trace": True,
}
# By name: ranks, changes, and the axes that must be seen.
LAYOUTS: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "one rank": (1, {}, set()),
    "fsdp": (2, {}, {"dp"}),
    "flat": (2, {"parallel.sharding": "flat"}, {"dp"}),
    "replicas": (2, {"parallel.dp_replicate": 2, "parallel.edp_replicate": 2}, {"dp"}),
    "tp": (2, {"parallel.tp": 2}, {"tp"}),
    "cp": (2, {"parallel.cp": 2}, {"cp"}),
    "ep": (2, {"parallel.ep": 2}, {"ep"}),
    "etp": (2, {"parallel.etp": 2}, {"etp"}),
    "pp": (2, {"parallel.pp": 2}, {"pp"}),
    "interleaved": (2, {"parallel.pp": 2, "parallel.vpp": 2, "parallel.schedule": "interleaved"}, {"pp"}),
    "zero bubble": (2, {"parallel.pp": 2, "parallel.schedule": "zb_h1"}, {"pp"}),
    "overlap": (2, {"parallel.ep": 2, "parallel.schedule": "1f1b_overlapped"}, {"ep"}),
    "dualpipe_v": (2, {"parallel.pp": 2, "parallel.vpp": 2, "parallel.schedule": "dualpipe_v"}, {"pp"}),
    "pp, ep, flat": (4, {"parallel.pp": 2, "parallel.ep": 2, "parallel.sharding": "flat"}, {"pp", "ep"}),
    "tp, ep, etp": (4, {"parallel.tp": 2, "parallel.ep": 2, "parallel.etp": 2}, {"tp", "ep", "etp"}),
}


def profiled(folder: Path, changes: dict[str, Any], nproc: int) -> tuple[list[StepAccount], list[float], Path]:
    """The accounts, the loop's own total of every step, and the run's directory."""
    run = moefold.load_run("debug_small", SETTINGS | {"train.directory": str(folder)} | changes)
    assert moefold.Trainer(run, reporters=[JsonLines()], nproc=nproc).fit() == "finished"
    lines = map(json.loads, (folder / run.name / "metrics.jsonl").read_text().splitlines())
    totals = [line["seconds"]["total"] for line in lines if line["kind"] == "step"]
    return read_profile(folder / run.name), totals, folder / run.name


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "one rank"))
def test_components_add_up_within_two_per_cent(layout: str, tmp_path: Path) -> None:
    nproc, changes, axes = LAYOUTS[layout]
    accounts, totals, directory = profiled(tmp_path, changes, nproc)
    assert [each.step for each in accounts] == [1, 2, 3, 4]
    assert max(each.residue() for each in accounts) < 0.02
    # Of the first step torch initialises much; of a busy machine one step may be cut anywhere.
    assert sorted(each.other() for each in accounts[1:])[1] < 0.02
    # The loop reads its own clock: from the end of a step to the end of the next, with what profiling took between.
    explained = sum(sum(each.components[0].values()) for each in accounts[1:])
    explained += sum(each.overhead for each in accounts[1:])
    assert explained == pytest.approx(sum(totals[1:]), rel=0.02)
    for rank, parts in enumerate(typical(accounts)):
        assert parts["compute"] > 0 and parts["host"] > 0, (rank, parts)
        seen = {name.split(".")[1] for name in parts if "." in name}
        assert seen >= axes and seen <= axes | {"world", "dp", "edp", "pp"}, (rank, parts)
        assert ("bubble" in parts) == (accounts[0].stages[-1] > 0), (rank, parts)
    check_trace(directory, accounts[-1])


def check_trace(directory: Path, found: StepAccount) -> None:
    """The row of components has no gaps and no overlaps, and the same sums."""
    trace = json.loads((directory / "profile" / f"step_{found.step:08d}.trace.json").read_text())
    for rank, wall in enumerate(found.wall):
        row = [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, 0)]
        assert sum(event["dur"] for event in row) == pytest.approx(wall * 1e6, rel=1e-3)
        for one, other in pairwise(row):
            assert one["ts"] + one["dur"] == pytest.approx(other["ts"], abs=1.0)
