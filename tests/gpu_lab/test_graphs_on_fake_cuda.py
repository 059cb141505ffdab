"""Captured phases on fake GPUs: the code that captures on a GPU runs as it is, and a replay is one launch.

Shown is that what is captured waits for nothing, allocates from its slot's pool and reads memory that is still there;
that a replay launches copies and the graph alone; and that each line that makes it so is missed if it is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# In a process of its own: fake CUDA must be loaded before torch is imported.
PROGRAM = """
from moefold.dryrun.fake_cuda.load_guard import load_guard
load_guard()
import json, os, sys
from collections import Counter
from contextlib import contextmanager, nullcontext
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from moefold.api.runs import load_run
from moefold.dryrun.fake_cuda import laboratory
from moefold.model.block import Block
from moefold.nn.cuda_graphs import CudaGraphEngine
from moefold.nn.phase_graphs import PhaseGraphs, Region
from moefold.prove.faults import graph_faults
from tests.gpu_lab.lab_cases import CASES

fault, logs, replayed, made = sys.argv[2], [], Counter(), []

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        replayed[str(op.overloadpacket)] += 1
        return op(*args, **(kwargs or {}))

def watched(name, graph):
    work = getattr(Region, name)
    def run(region, *given):
        with nullcontext() if getattr(region, graph) is None else Operations():
            return work(region, *given)
    setattr(Region, name, run)

watched("__call__", "forward")
watched("go_back", "backward")
fake_graphs, init = laboratory.fake_graphs, PhaseGraphs.__init__

@contextmanager
def logged(hazards):
    with fake_graphs(hazards) as log:
        logs.append(log)
        yield log

laboratory.fake_graphs = logged
PhaseGraphs.__init__ = lambda graphs, *given: made.append(graphs) or init(graphs, *given)
if fault == "a slot that is taken":
    graph_faults.slot_of_the_microbatch_before()
if fault == "one pool":
    CudaGraphEngine.new_pool = lambda engine: (1, 0)
if fault == "random numbers":
    attention = Block._attention
    Block._attention = lambda block, x, batch: (lambda y: y * torch.rand_like(y))(attention(block, x, batch))
if fault == "inputs that are freed":
    go_back = Region.go_back
    def freed(region, grads):
        found = go_back(region, grads)
        region.static_in = [x.detach().clone().requires_grad_(x.requires_grad) for x in region.static_in]
        return found
    Region.go_back = freed
if fault == "a wait":
    attention = Block._attention
    def waiting(block, x, batch):
        torch.cuda.current_stream().synchronize()
        return attention(block, x, batch)
    Block._attention = waiting

case = CASES[sys.argv[1]]
report = laboratory.run_rank(load_run(case.recipe, case.changes), case.world, 0, case.microbatches)
(log,), (graphs,) = logs, made
pools = {
    f"{stage} {number}": [graph.trace for graph in log.pools.get(slot.pool, ())]
    for (stage, number), slot in graphs.slots.items()
}
same = all(
    traces == pools[other] for name, traces in pools.items() for other in pools if name.split()[0] == other.split()[0]
)
said = {
    "findings": [[each.kind, str(each)] for each in report.findings],
    "graphs": [len(traces) for traces in pools.values()],
    "shortest": min((len(trace) for traces in pools.values() for trace in traces), default=0),
    "same": same,
    "replays": log.num_replays,
    "replayed": replayed,
}
print(json.dumps(said), flush=True)
os._exit(0)
"""
# Views, and copies of inputs and gradients to where graphs read them.
LAUNCHED = {"aten.copy_", "aten.detach", "aten.alias", "aten.view", "prim.device"}


def examined(case: str, fault: str = "none") -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, case, fault]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


# Of rank 0: slots of its stages, and graphs of a slot: forward and backward of each region of each layer.
EXPECTED = {
    "graphs": [2 * 2],
    "graphs in a pipeline": [2 * 2] * 2,
    "graphs of layers": [2 * 8],
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", EXPECTED)
def test_captures_are_safe_and_replays_are_one_launch(case: str) -> None:
    said = examined(case)
    assert said["findings"] == []
    assert said["graphs"] == EXPECTED[case]
    assert said["same"] and said["shortest"] > 1
    # Every slot serves microbatches after its capture, and capturing itself ends with a replay.
    assert said["replays"] > sum(said["graphs"])
    assert set(said["replayed"]) <= LAUNCHED and said["replayed"]["aten.copy_"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("case", "fault", "kind"),
    [
        ("graphs in a pipeline", "a slot that is taken", "replay order"),
        ("graphs in a pipeline", "one pool", "replay order"),
        ("graphs", "random numbers", "capture"),
        ("graphs", "a wait", "capture"),
        ("graphs", "inputs that are freed", "freed memory"),
    ],
)
def test_a_line_that_is_left_out_is_found(case: str, fault: str, kind: str) -> None:
    said = examined(case, fault)
    assert any(found == kind for found, _ in said["findings"]), said["findings"]
