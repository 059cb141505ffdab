"""The update on fake GPUs: one fused kernel per param group, on sharded and on plain parameters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: fake CUDA must be loaded before torch is imported. Two steps; the optimizer's kernels are
# those that its own `step` launches.
PROGRAM = """
from moefold.dryrun.fake_cuda.load_guard import load_guard
load_guard()
import json, sys
from collections import Counter
from torch import optim
from moefold.api.runs import load_run
from moefold.checkpoint.state_dict import copy_into_live
from moefold.dryrun import dry_run
from moefold.dryrun.dry_run import second_step
from moefold.dryrun.fake_cuda.laboratory import dry_run_on_gpu
from moefold.dryrun.fake_cuda.stream_hazards import StreamHazards
from moefold.parallel.param_shards import local_part
from moefold.pipeline.step import run_step
from tests.gpu_lab.lab_cases import case
steps, counts, launch, step = [], set(), StreamHazards.launch, optim.AdamW.step
def counted(hazards, name, *args, **options):
    if steps and steps[-1] is not None:
        steps[-1][name] += 1
    launch(hazards, name, *args, **options)
def step_of(optimizer):
    steps.append(Counter(groups=len(optimizer.param_groups)))
    step(optimizer)
    steps.append(None)
    counts.update(state["step"].device.type for state in optimizer.state.values())
def resumed(local_model, optimizer, batches, progress):
    run_step(local_model, optimizer, batches)
    values = {f"parameter/{name}": local_part(p).cpu() for name, p in local_model.model.named_parameters()}
    values |= {f"buffer/{name}": buffer.cpu() for name, buffer in local_model.model.named_buffers()}
    for name, parameter in local_model.model.named_parameters():
        values |= {f"{kind}/{name}": local_part(x).cpu() for kind, x in optimizer.state[parameter].items()}
    copy_into_live(local_model, optimizer, values)
    return second_step(local_model, optimizer, batches, progress)
if "resume" in sys.argv:
    dry_run.second_step = resumed
StreamHazards.launch, optim.AdamW.step = counted, step_of
named = case("deepseek_v3_proxy", 2, 1, optim__implementation=sys.argv[1], **json.loads(sys.argv[2]))
found, report = dry_run_on_gpu(load_run(named.recipe, named.changes), 2, 0, 1)
said = {"findings": [str(each) for each in report.findings], "kernels": steps[-2], "counts": sorted(counts)}
print(json.dumps(said), flush=True)
import os
os._exit(0)
"""


def update(implementation: str, *words: str, **layout: int) -> dict[str, int]:
    command = [sys.executable, "-c", PROGRAM, implementation, json.dumps(layout), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["findings"] == []
    # Fake tensors of no dimension mix devices without an error, so this asks for the device of the step counts.
    assert said["counts"] == (["cuda"] if implementation == "fused" else ["cpu"])
    kernels: dict[str, int] = said["kernels"]
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"parallel__tp": 2}], ids=["sharded", "plain"])
def test_the_update_is_one_fused_kernel_per_group(layout: dict[str, int]) -> None:
    kernels = update("fused", **layout)
    groups = kernels.pop("groups")
    # The step counts of a group are one tensor list too.
    assert kernels == {"_fused_adamw_": groups, "_foreach_add_": groups}


@pytest.mark.slow
def test_foreach_launches_more() -> None:
    kernels = update("foreach")
    assert "_fused_adamw_" not in kernels and sum(kernels.values()) > 4 * 2 * kernels["groups"]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_an_update_after_a_resume_has_its_step_counts_where_it_reads_them(implementation: str) -> None:
    """Checkpoints are read on the host; the fused kernel wants step counts on the GPU, foreach on the host."""
    kernels = update(implementation, "resume")
    assert ("_fused_adamw_" in kernels) == (implementation == "fused")
