"""Prove that a layout computes what one process computes."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from moefold.api.runs import load_run
from moefold.checks.run_all import problems
from moefold.comm.spawn import join_world, this_device
from moefold.config.precision import Format
from moefold.config.run import RunConfig
from moefold.errors import ConfigError
from moefold.moe.routing_policies import PolicyOrName
from moefold.prove.cases import reduce_run
from moefold.prove.verdict import Verdict, device_case, prove_on_ranks
from moefold.prove.verdict import prove as prove_case


def prove(
    run: RunConfig | str | Path,
    world: int = 4,
    *,
    dtype: Format = "float64",
    routing_policy: PolicyOrName | None = None,
    seconds: float = 120.0,
) -> Verdict:
    """Run one training step on `world` CPU processes and on one, and compare everything.

    Compared are the loss, every gradient, the gradient norm, the clipped update, balance losses, bias updates and token
    counts. A name or a path is loaded first. The run's sizes are reduced to what a laptop can prove; its structure,
    routing and layout stay. `routing_policy` is as for `build_model`, and is used on both sides. A proof that takes
    longer than `seconds` fails.

    >>> import moefold
    >>> run = moefold.load_run("debug_tiny", {"parallel.ep": 2})
    >>> verdict = moefold.prove(run, world=2)
    >>> verdict.holds, verdict.worst < 1e-9
    (True, True)
    """
    run = load_run(run)
    _refuse_layout(run, world)
    case = reduce_run(run, world, dtype)
    if found := problems(case.run, world):
        raise ConfigError(*found)
    return prove_case(case, seconds, routing_policy=routing_policy)


def prove_on_launched_ranks(
    run: RunConfig, *, dtype: Format = "float64", device: str | None = None, patience: float = 300.0
) -> tuple[Verdict, int, str]:
    """The same on the ranks that torchrun or srun started, or on this process; (verdict, this rank, kind of device).

    The reference is computed in float64 on the CPU by every rank. The run's kernels are used, and `auto` experts.
    """
    rank, world = join_world(patience, device)
    here = this_device(device)
    _refuse_layout(run, world)
    case = device_case(run, world, dtype, here.type)
    if found := problems(case.run, world):
        raise ConfigError(*found)
    verdict = prove_on_ranks(case, rank, here)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return verdict, rank, here.type


def _refuse_layout(run: RunConfig, world: int) -> None:
    """Rules about the batch and about dims concern the full run; the reduced one has its own sizes."""
    layout = [problem for problem in problems(run, world) if problem.path.startswith(("parallel", "world"))]
    if layout:
        raise ConfigError(*layout)
