"""Prove a case on the ranks of a launched job: on GPUs over NCCL, against a float64 reference on the CPU.

Every rank computes the reference itself: a proof's model is small, and hosts need not share a file system. Ranks then
build their shards on their own device, run one step with the kernels that the case names, and compare; differences are
gathered as numbers, so that every rank has the verdict. The same path runs on CPUs over gloo, which is how it was
tested; it was never run on a GPU.

In float64 the tolerance is that of any proof. In float32 and bfloat16 the format's own error is measured first: one
process computes the step on the CPU in that format, with the routing of the float64 reference. A quantity may differ by
three times its error there, or by what two layouts in that format may differ, whichever is more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from moefold.checks import engine_limits
from moefold.checks import kernels as kernel_rules
from moefold.checks.engine_limits import ENGINE_EXPERTS
from moefold.checks.kernels import experts_in_use
from moefold.config.kernels import KernelsConfig
from moefold.config.precision import Format
from moefold.config.run import RunConfig
from moefold.moe.routing_policies import PolicyOrName
from moefold.prove.cases import Case, reduce_run, reference_case
from moefold.prove.compare_rank import compare_rank
from moefold.prove.reference import reference
from moefold.prove.verdict import Verdict, rounding_errors, verdict_of

# Keys of ``kernels`` whose named backend is proved; of experts, grouped GEMMs of other libraries.
_NAMED = ("experts", "permute", "linear", "attention")


def device_case(run: RunConfig, world: int, dtype: Format, device: str) -> Case:
    """The reduced run with the kernels that the run names, where they take this format and the reduced sizes.

    Otherwise `auto` experts and attention, and torch's kernels in float64; the report says which were used.
    """
    case = reduce_run(run, world, dtype)
    backend = "torch" if dtype == "float64" or run.kernels.backend == "native" else run.kernels.backend
    kernels = KernelsConfig(experts="auto", backend=backend)
    for key in _NAMED:
        name = getattr(run.kernels, key)
        named = replace(kernels, **{key: name})
        if (key != "experts" or name in ENGINE_EXPERTS) and not _refused(replace(case.run, kernels=named)):
            kernels = named
    chosen = replace(case.run, kernels=kernels)
    return Case(replace(chosen, kernels=replace(kernels, experts=experts_in_use(chosen, device))), world)


def _refused(run: RunConfig) -> bool:
    return any(rule(run) for rule in (*kernel_rules.RULES, *engine_limits.RULES))


def prove_on_ranks(case: Case, rank: int, device: torch.device, routing_policy: PolicyOrName | None = None) -> Verdict:
    """Called on every rank of the case's world, in its process group; without one if the world is 1."""
    expected = reference(reference_case(case), routing_policy)
    own = compare_rank(case, expected, rank, routing_policy, device)
    names = [name for name in expected if not name.startswith("routing/")]
    rounding = {} if case.run.precision.compute == "float64" else rounding_errors(case, expected, routing_policy)
    return verdict_of(case, expected, gather_differences(own, names, device), rounding)


def gather_differences(
    own: Mapping[str, Sequence[float]], names: Sequence[str], device: torch.device
) -> list[dict[str, list[float]]]:
    """Each rank's differences by name; a rank has those of its own shards only."""
    absent = [0.0] * 4
    rows = [[float(name in own), *map(float, own.get(name, absent))] for name in names]
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(table) for _ in range(dist.get_world_size())] if dist.is_initialized() else [table]
    if dist.is_initialized():
        dist.all_gather(gathered, table)
    return [
        {
            name: [largest, squares, int(elements), bool(primary)]
            for name, (there, largest, squares, elements, primary) in zip(names, ranks.tolist(), strict=True)
            if there
        }
        for ranks in gathered
    ]
