"""What the first commands on a machine with GPUs run, on fake GPUs; in a process of its own (see `run_cases.py`).

    python -m tests.gpu_lab.first_commands

prints one JSON object: the experts that `auto` stands for and the findings of every run, and how torch's grouped GEMM
judges dtypes on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from typing import get_args

from moefold.dryrun.fake_cuda.load_guard import load_guard

# Recipes of the README, of docs/training.md and of docs/first-day-on-gpus.md, and on how many GPUs.
RUNS = (("debug_tiny", 1), ("debug_small", 1), ("debug_small", 2), ("debug_10m", 1), ("debug_mla", 1))


def main() -> None:
    load_guard()
    import torch
    from torch.nn import functional as F

    from moefold.api.runs import load_run
    from moefold.bench.layer_bench import interfaces_for
    from moefold.bench.step_bench import run_for_bench
    from moefold.checks.kernels import experts_in_use
    from moefold.config.precision import Format, KernelsConfig
    from moefold.config.run import RunConfig
    from moefold.dryrun.fake_cuda.fake_device import fake_cuda
    from moefold.dryrun.fake_cuda.laboratory import compare, run_ranks
    from moefold.dryrun.fake_world import CachedFakeMode
    from moefold.errors import BackendError
    from moefold.moe.moe_kernels import kernels_for
    from moefold.prove.verdict import device_case

    runs = {f"{name} on {world}": (load_run(name, {"parallel.ep": world}), world) for name, world in RUNS}
    runs["bench step"] = (run_for_bench("bfloat16", {"model.num_layers": "2"}, device="cuda"), 1)
    for dtype in get_args(Format):
        case = device_case(load_run("debug_small", {"parallel.ep": 2}), 2, dtype, "cuda")
        runs[f"prove in {dtype}"] = (case.run, 2)
    found = {}
    for name, (run, world) in runs.items():
        findings = [str(finding) for finding in compare(run_ranks(run, world, 1))]
        found[name] = {"experts": experts_in_use(run, "cuda"), "findings": findings}

    def grouped_mm(device: str, dtype: torch.dtype) -> str:
        with fake_cuda(), CachedFakeMode():
            rows = torch.empty(32, 16, dtype=dtype, device=device)
            weight = torch.empty(4, 16, 16, dtype=dtype, device=device)
            ends = torch.empty(4, dtype=torch.int32, device=device)
            try:
                return str(tuple(F.grouped_mm(rows, weight, offs=ends).shape))
            except RuntimeError as error:
                return str(error)

    def refused() -> str:
        with fake_cuda():
            try:
                kernels_for(RunConfig(kernels=KernelsConfig(experts="grouped")), "cuda")
            except BackendError as error:
                return str(error)
        return ""

    judged = {
        f"{device} {dtype}": grouped_mm(device, dtype)
        for device in ("cpu", "cuda:0")
        for dtype in (torch.float32, torch.bfloat16)
    }
    with fake_cuda():
        layers = [type(interfaces_for(dtype, "cuda")).__name__ for dtype in ("bfloat16", "float32")]
    print(json.dumps({"layers": layers, "runs": found, "grouped_mm": judged, "refused": refused()}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # torch's threads for backward passes on eight devices do not end by themselves.
    os._exit(0)
