"""Small programs on fake GPUs, each with and without a fault; in a process of its own (see `run_cases.py`).

    python -m tests.gpu_lab.small_programs

prints one JSON object: the kinds and texts of the findings of each program. They are about faults that the real step
does not show in the cases of `lab_cases.py`, because its tensors happen to live long enough or all its ranks have rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from moefold.dryrun.fake_cuda.load_guard import load_guard

NUM_RANKS = 3


def main() -> dict[str, list[tuple[str, str]]]:
    load_guard()
    import torch
    from tests.gpu_lab.lab_faults import no_device_for_communicators
    from torch.utils._python_dispatch import TorchDispatchMode

    from moefold.api.runs import load_run
    from moefold.comm.p2p import CudaCommStream, shift
    from moefold.comm.spawn import join_world, this_device
    from moefold.dryrun.fake_cuda.collective_log import logged_collectives
    from moefold.dryrun.fake_cuda.fake_device import fake_cuda
    from moefold.dryrun.fake_cuda.laboratory import RankReport, compare, fake_launch
    from moefold.dryrun.fake_cuda.stream_hazards import StreamHazards
    from moefold.dryrun.fake_world import CachedFakeMode
    from moefold.nn.matmul_policy import ParameterMatmul
    from moefold.parallel.parallelize import groups_of

    class OperatorNames(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Forgetful(CudaCommStream):
        """Does not keep alive what the work uses, and tells the allocator nothing."""

        def submit(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.cuda.Event, Callable]:  # type: ignore[type-arg, override]
            result, done, _ = super().submit(work)
            return result, done, torch.empty

    def communicate(make: type[CudaCommStream]) -> list[tuple[str, str]]:
        """The caller drops its tensor while the communication stream reads it, and allocates another."""
        hazards = StreamHazards()
        with fake_cuda(), CachedFakeMode(), hazards:
            stream = make(torch.device("cuda", 0))
            handle = stream.submit(partial(torch.neg, torch.ones(8, device="cuda:0")))
            other = torch.zeros(8, device="cuda:0")
            other += stream.wait(handle, lambda: False)
            del handle
            torch.zeros(8, device="cuda:0")
        return [(finding.kind, str(finding)) for finding in hazards.findings.values()]

    def ring_with_an_empty_rank() -> list[tuple[str, str]]:
        """Rank 0 sends rows to rank 1; rank 2 has none to send and gets none."""
        reports = []
        for rank in range(NUM_RANKS):
            hazards = StreamHazards()
            with fake_cuda(), fake_launch(NUM_RANKS, rank, hazards) as log, logged_collectives(log), hazards.errors():
                join_world(60.0)
                run = load_run("debug_tiny", {"parallel.cp": NUM_RANKS})
                group = groups_of(run, NUM_RANKS, rank, timedelta(seconds=60))["cp"]
                with CachedFakeMode(), hazards:
                    rows = torch.ones(4 if rank == 0 else 0, 2, device=this_device())
                    shift(rows, 4 if rank == 1 else 0, group).wait()
            reports.append(RankReport(rank, tuple(hazards.findings.values()), tuple(log.calls), 0, 0))
        return [(finding.kind, str(finding)) for finding in compare(reports)]

    def fused_accumulation() -> list[tuple[str, str]]:
        """Weight gradients of a bfloat16 matmul go straight into the float32 buffer that they are collected in."""
        hazards = StreamHazards()
        with fake_cuda(), CachedFakeMode(), hazards:
            buffer = torch.zeros(3 * 8 * 16, device="cuda:0")
            weight = torch.nn.Parameter(torch.ones(8, 16, device="cuda:0", dtype=torch.bfloat16))
            weight.grad_dtype = torch.float32
            weight.grad = buffer[8 * 16 : 2 * 8 * 16].view_as(weight)
            x = torch.ones(5, 16, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
            with OperatorNames() as names:
                ParameterMatmul(in_place=True).linear(x, weight).sum().backward()
            assert "aten.addmm.dtype_out" in names.seen, names.seen
        return [(finding.kind, str(finding)) for finding in hazards.findings.values()]

    found = {
        "fused accumulation": fused_accumulation(),
        "comm stream": communicate(CudaCommStream),
        "comm stream that keeps nothing": communicate(Forgetful),
        "ring with an empty rank": ring_with_an_empty_rank(),
    }
    with no_device_for_communicators():
        found["the same, communicators made at first use"] = ring_with_an_empty_rank()
    return found


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
    # torch's threads for backward passes on eight devices do not end by themselves.
    os._exit(0)
