"""A profiled step on fake GPUs: stamps are events, the host waits for none of them inside of the step, and they are
read after it.

Time on a fake GPU is the order in which events are recorded. As torch does, an event that was made without timing, that
was never recorded, or that the host has not waited for yet, has no time to tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# In a process of its own: fake CUDA must be loaded before torch is imported. The last word says what is wrong.
PROGRAM = """
from moefold.dryrun.fake_cuda.load_guard import load_guard
load_guard()
import json, os, sys
import torch
from moefold.api.runs import load_run
from moefold.comm.spans import CudaClock, SpanRecorder
from moefold.dryrun import dry_run
from moefold.dryrun.fake_cuda import laboratory
from moefold.dryrun.fake_cuda.fake_device import FakeEvent
from moefold.parallel.fsdp import FsdpSharding
from moefold.parallel.fsdp_spans import stamp_fsdp
from moefold.pipeline.step import run_step
from moefold.train.profile.account import account
from tests.gpu_lab.lab_cases import CASES

fault, said = sys.argv[2], {"waits": {}, "reads": {}}
second_step, where = dry_run.second_step, "before"

def count(what):
    said[what][where] = said[what].get(where, 0) + 1

class TimedEvent(FakeEvent):
    recorded = reached = 0

    def __init__(self, enable_timing=False, **more):
        super().__init__()
        self.timing, self.order = enable_timing, None

    def record(self, stream=None):
        TimedEvent.recorded += 1
        self.order = TimedEvent.recorded
        return super().record(stream)

    def synchronize(self):
        count("waits")
        TimedEvent.reached = max(TimedEvent.reached, self.order)
        super().synchronize()

    def elapsed_time(self, other):
        count("reads")
        for event in (self, other):
            if not event.timing or event.order is None or event.order > TimedEvent.reached:
                raise RuntimeError("the event has no time yet")
        return float(other.order - self.order)

def synchronize(device=None):
    count("waits")
    TimedEvent.reached = TimedEvent.recorded

class WaitingClock(CudaClock):
    def now(self):
        event = super().now()
        event.synchronize()
        return event

class HastyClock(CudaClock):
    def seconds(self, stamps):
        return [self._origin.elapsed_time(stamp) * 1e-3 for stamp in stamps]

def steps(local_model, optimizer, batches, progress):
    global where
    torch.cuda.Event, torch.cuda.synchronize = TimedEvent, synchronize
    clock = {"waits in a step": WaitingClock, "reads too early": HastyClock}.get(fault, CudaClock)
    recorder = SpanRecorder(local_model.groups.rank, clock(local_model.device, lambda: 5.0))
    if isinstance(local_model.sharding, FsdpSharding):
        stamp_fsdp(local_model.sharding, "cuda")
    run_step(local_model, optimizer, batches)
    ledger = local_model.groups["world"].ledger
    recorder.begin(2)
    recorder.mark("step")
    ledger.spans, where = recorder, "step"
    run_step(local_model, optimizer, batches)
    ledger.spans, where = None, "after"
    try:
        taken = recorder.end()
    except RuntimeError as error:
        said["error"] = str(error)
        return second_step(local_model, optimizer, batches, progress)
    found = account([taken._replace(rank=0)])
    said["began"], said["streams"] = taken.began, len({span.stream for span in taken.spans})
    said["spans"], said["operations"] = len(taken.spans), len(taken.operations)
    said["inside"] = all(taken.began <= span.start <= span.end <= taken.ended for span in taken.spans)
    said["residue"], said["components"] = found.residue(), found.components[0]
    return second_step(local_model, optimizer, batches, progress)

dry_run.second_step = steps
case = CASES[sys.argv[1]]
report = laboratory.run_rank(load_run(case.recipe, case.changes), case.world, 0, case.microbatches)
said["findings"] = [[each.kind, str(each)] for each in report.findings]
print(json.dumps(said), flush=True)
os._exit(0)
"""


def examined(case: str, fault: str = "none") -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, case, fault]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "streams"), [("data parallel", 1), ("1f1b_overlapped", 2), ("flat buffers", 1)])
def test_stamps_are_read_after_the_step_alone(case: str, streams: int) -> None:
    said = examined(case)
    assert said["findings"] == []
    # Once for the device and once for the origin before the step, once after it.
    assert said["waits"] == {"before": 2, "after": 1}
    assert said["reads"].keys() == {"after"} and said["reads"]["after"] >= 2 * said["spans"]
    assert said["streams"] >= streams and said["operations"] > 0 and said["inside"] and said["began"] >= 5.0
    assert said["residue"] < 1e-9 and said["components"]["compute"] > 0
    assert any(name.startswith("comm.") for name in said["components"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clock_that_waits_or_reads_too_early_is_found() -> None:
    assert examined("data parallel", "waits in a step")["waits"]["step"] > 50
    assert "no time yet" in examined("data parallel", "reads too early")["error"]
