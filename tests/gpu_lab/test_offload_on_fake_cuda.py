"""Steps on fake GPUs whose activations wait in pinned memory of the host: every wait between streams is needed, and is
there. The last word says which line of ``nn/offload.py`` is left out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: fake CUDA must be loaded before torch is imported.
PROGRAM = """
from moefold.dryrun.fake_cuda.load_guard import load_guard
load_guard()
import json, os, sys
import torch
from moefold.api.runs import load_run
from moefold.dryrun.fake_cuda import laboratory
from moefold.dryrun.fake_cuda.fake_device import FakeEvent
from moefold.dryrun.fake_cuda.stream_hazards import StreamHazards
from moefold.nn import offload
from tests.gpu_lab.lab_cases import CASES

fault, pinned, recorded, taken = sys.argv[2], [], [], []
init, send = StreamHazards.__init__, offload.Offload.send
# The CPU build cannot pin, and torch's record_stream takes no fake stream.
torch.Tensor.pin_memory = lambda tensor: pinned.append(tensor) or tensor
torch.Tensor.record_stream = lambda tensor, stream: [hazards.record_stream(tensor, stream) for hazards in recorded]
StreamHazards.__init__ = lambda hazards: recorded.append(hazards) or init(hazards)
def sent(self, group):
    self.least = 1
    before = self.bytes_out
    send(self, group)
    taken.append(self.bytes_out - before)
offload.Offload.send = sent
if fault == "no record_stream":
    torch.Tensor.record_stream = lambda tensor, stream: None
if fault == "no wait for the copy back":
    copy_back = offload.Offload._copy_back
    def back(self, slot):
        copy_back(self, slot)
        slot.back = FakeEvent()
    offload.Offload._copy_back = back
if fault == "no wait for the computation":
    copy_out = offload.Offload._copy_out
    def out(self, slot, here, host):
        wait = type(self._streams[0]).wait_stream
        type(self._streams[0]).wait_stream = lambda stream, other: None
        try:
            copy_out(self, slot, here, host)
        finally:
            type(self._streams[0]).wait_stream = wait
    offload.Offload._copy_out = out

case = CASES[sys.argv[1]]
steps = ("attention_norm", "latent_norm", "mla_up", "core", "feed_norm", "rows", "gate_up", "activation", "shared")
changes = case.changes | {f"memory.retain.{step}": "offload" for step in steps}
report = laboratory.run_rank(load_run(case.recipe, changes), case.world, 0, case.microbatches if fault == "none" else 2)
findings = [[each.kind, str(each)] for each in report.findings]
print(json.dumps({"findings": findings, "pinned": len(pinned), "bytes": sum(taken)}), flush=True)
os._exit(0)
"""


def examined(case: str, fault: str = "none") -> tuple[list[tuple[str, str]], dict[str, int]]:
    command = [sys.executable, "-c", PROGRAM, case, fault]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return said["findings"], said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        "1f1b",
        "dualpipe_v",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("interleaved", "1f1b_overlapped")),
    ],
)
def test_nothing_is_found(case: str) -> None:
    findings, said = examined(case)
    assert findings == []
    assert said["pinned"] and said["bytes"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("no wait for the copy back", "no wait between streams"),
        ("no wait for the computation", "no wait between streams"),
        ("no record_stream", "no record_stream"),
    ],
)
def test_a_line_that_is_left_out_is_found(fault: str, kind: str) -> None:
    findings, _ = examined("1f1b", fault)
    assert any(found == kind for found, _ in findings), findings
