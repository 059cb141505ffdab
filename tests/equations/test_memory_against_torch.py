"""The memory of a step as the dry run counts it, against what torch's own allocator reports to its profiler.

The dry run and the planner count storages as they come and go (`dryrun/storage_tracker.py`), and are compared with each
other to the byte. Here the same forward and backward is seen from below, by the allocator.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from tests.staged_runs import microbatches, share_on
from torch.profiler import ProfilerActivity, profile

from moefold.config.loading import override
from moefold.dryrun.storage_tracker import StorageTracker
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.runtime import run_schedule
from moefold.recipes.catalog import recipe

RUNS = {
    "gqa": override(recipe("debug_small"), ["--kernels.experts=sequential"]),
    "mla": override(recipe("deepseek_v3_proxy"), ["--kernels.experts=sequential", "--model.num_mtp=1"]),
}
SHAPES = ((128, 70), (128,))


def changes_seen(share: LocalModel) -> list[int]:
    with StorageTracker() as watch:
        run_schedule(share, microbatches(share.run, SHAPES))
    return [event.change for event in watch.events]


def changes_of_the_allocator(share: LocalModel, path: Path) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_schedule(share, microbatches(share.run, SHAPES))
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_is_that_of_torchs_allocator(name: str, tmp_path: Path) -> None:
    share = share_on(RUNS[name])
    run_schedule(share, microbatches(share.run, SHAPES))  # what is made once is there
    share.model.zero_grad()
    ours = list(accumulate(changes_seen(share)))
    share.model.zero_grad()
    theirs = list(accumulate(changes_of_the_allocator(share, tmp_path / "trace.json")))
    gradients = sum(p.grad.nbytes for p in share.model.parameters() if p.grad is not None)
    assert torch.tensor(ours).max() > 1.5 * gradients, "a step that keeps activations"
    # A kernel's own buffers are the allocator's alone.
    assert max(theirs) == pytest.approx(max(ours), rel=2e-3)
    assert theirs[-1] == pytest.approx(ours[-1], rel=2e-3) and ours[-1] >= gradients
