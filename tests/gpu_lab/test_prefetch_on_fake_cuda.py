"""Steps on fake GPUs whose batches a thread reads ahead and copies on a stream: every wait is needed, and is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: fake CUDA must be loaded before torch is imported. Four steps take their batches from a
# Prefetcher; the last word says which line of it is left out.
PROGRAM = """
from moefold.dryrun.fake_cuda.load_guard import load_guard
load_guard()
import json, os, sys
import torch
from moefold.api.runs import load_run
from moefold.dryrun import dry_run
from moefold.dryrun.fake_cuda import laboratory
from moefold.dryrun.fake_cuda.fake_device import FakeEvent
from moefold.dryrun.fake_cuda.stream_hazards import StreamHazards
from moefold.nn.batch import move_batch
from moefold.pipeline.step import run_step
from moefold.train.batches import LocalStep, StepData
from moefold.train.prefetch import Prefetcher
from tests.gpu_lab.lab_cases import CASES

fault, read, pinned, recorded = sys.argv[2], [], [], []
second_step, init = dry_run.second_step, StreamHazards.__init__
# The CPU build cannot pin, and torch's record_stream takes no fake stream.
torch.Tensor.pin_memory = lambda tensor: pinned.append(tensor) or tensor
torch.Tensor.record_stream = lambda tensor, stream: [hazards.record_stream(tensor, stream) for hazards in recorded]
StreamHazards.__init__ = lambda hazards: recorded.append(hazards) or init(hazards)
if fault == "no wait":
    # Waiting for an event that was never recorded returns at once.
    wait = Prefetcher._wait
    Prefetcher._wait = lambda prefetcher, ahead: wait(prefetcher, ahead._replace(copied=FakeEvent()))
if fault == "no record_stream":
    torch.Tensor.record_stream = lambda tensor, stream: None

def steps(local_model, optimizer, batches, progress):
    host = [move_batch(batch, lambda tensor: tensor.cpu()) for batch in batches]
    def read_step(first):
        read.append(first)
        return LocalStep(StepData(list(host), "", 0), None)
    with Prefetcher(read_step, local_model.groups, local_model.device) as ahead:
        for number in range(4):
            here = ahead.take(number, range(number + 1, 4)[:1]).batches
            assert all(batch.tokens_S.device == local_model.device for batch in here)
            run_step(local_model, optimizer, here)
            del here
    return second_step(local_model, optimizer, batches, progress)

dry_run.second_step = steps
case = CASES[sys.argv[1]]
rank = case.world - 1
report = laboratory.run_rank(load_run(case.recipe, case.changes), case.world, rank, case.microbatches)
findings = [[each.kind, str(each)] for each in report.findings]
print(json.dumps({"findings": findings, "read": read, "pinned": len(pinned)}), flush=True)
os._exit(0)
"""


def examined(case: str, fault: str = "none") -> tuple[list[tuple[str, str]], dict[str, list[int]]]:
    command = [sys.executable, "-c", PROGRAM, case, fault]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return said["findings"], said


@pytest.mark.slow
@pytest.mark.parametrize("case", ["data parallel", "1f1b_overlapped", "padded documents"])
def test_nothing_is_found(case: str) -> None:
    findings, said = examined(case)
    assert findings == []
    assert said["read"] == [0, 1, 2, 3] and said["pinned"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("no wait", "no wait between streams", "(train/prefetch.py"),
        ("no record_stream", "no record_stream", "may be reused"),
    ],
)
def test_a_line_that_is_left_out_is_found(fault: str, kind: str, words: str) -> None:
    findings, _ = examined("data parallel", fault)
    assert any(found == kind and words in text for found, text in findings), findings
