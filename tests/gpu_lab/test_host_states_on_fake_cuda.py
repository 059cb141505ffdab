"""Updates on fake GPUs with optimizer states in the host's memory: every wait between the streams is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: fake CUDA must be loaded before torch is imported. The words say where states are, and which
# line is left out.
PROGRAM = """
from moefold.dryrun.fake_cuda.load_guard import load_guard
load_guard()
import json, os, sys
import torch
from moefold.api.runs import load_run
from moefold.dryrun.fake_cuda import laboratory
from moefold.dryrun.fake_cuda.fake_device import FakeEvent, FakeStream
from moefold.dryrun.fake_cuda.stream_hazards import StreamHazards
from moefold.optim import chunked_adamw
from moefold.optim.state_staging import Staging
from tests.gpu_lab.lab_cases import case

on, fault, pinned, recorded, init = sys.argv[1], sys.argv[2], [], [], StreamHazards.__init__
chunked_adamw.CHUNK = 1 << 12
# The CPU build cannot pin, and torch's record_stream takes no fake stream.
torch.Tensor.pin_memory = lambda tensor: pinned.append(tensor.device.type) or tensor
torch.Tensor.record_stream = lambda tensor, stream: [hazards.record_stream(tensor, stream) for hazards in recorded]
StreamHazards.__init__ = lambda hazards: recorded.append(hazards) or init(hazards)
if fault == "no wait":
    # Waiting for an event that was never recorded returns at once.
    wait = Staging._wait
    Staging._wait = lambda staging, arrived: wait(staging, arrived._replace(event=FakeEvent()))
if fault == "no wait back":
    leave, wait_stream = Staging._leave, FakeStream.wait_stream
    def without_wait(staging, staged, arrived):
        FakeStream.wait_stream = lambda stream, other: None
        leave(staging, staged, arrived)
        FakeStream.wait_stream = wait_stream
    Staging._leave = without_wait
words = {"memory__optimizer": on, "precision__moments": "bfloat16", "precision__moments_rounding": "stochastic"}
named = case("deepseek_v3_proxy", 2, 1, **words)
report = laboratory.run_rank(load_run(named.recipe, named.changes), 2, 0, 1)
findings = [[each.kind, str(each)] for each in report.findings]
print(json.dumps({"findings": findings, "pinned": sorted(set(pinned)), "count": len(pinned)}), flush=True)
os._exit(0)
"""


def examined(on: str, fault: str = "none") -> list[tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, on, fault], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["pinned"] == ["cpu"] and said["count"]
    findings: list[tuple[str, str]] = said["findings"]
    return findings


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("on", ["host", "cpu"])
def test_nothing_is_found(on: str) -> None:
    assert examined(on) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["no wait", "no wait back"])
def test_a_line_that_is_left_out_is_found(fault: str) -> None:
    assert any(found == "no wait between streams" and "(optim/" in text for found, text in examined("host", fault))
