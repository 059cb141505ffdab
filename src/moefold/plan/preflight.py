"""Before a run is built: does its predicted peak fit into the memory that is there, and what would make it fit?

On GPUs the fullest rank counts, with what allocator and runtime need. On a CPU all ranks of the host share its memory,
and only what the step itself allocates counts: nothing that fits is refused for an estimate of overheads.

The setting that is named is the nearest one: the cheapest savings first, then smaller microbatches, then whole phases
recomputed. It is one that `moefold check` accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moefold.checks.run_all import problems
from moefold.config.run import RunConfig
from moefold.errors import MoefoldError, ProblemsError
from moefold.hardware.cluster import cluster_of
from moefold.plan.launch_command import changes_to_run
from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saving_steps import is_on_host, saving, savings_of
from moefold.plan.prediction import MemoryPrediction
from moefold.plan.search.cheapest_savings import cheapest_fit
from moefold.plan.workload import Workload, changed, workload_of_run
from moefold.units import format_bytes

_PHASES = ("attention", "feed_forward", "experts")


class MemoryPreflightError(MoefoldError):
    """A run that is predicted not to fit."""


@dataclass(frozen=True)
class Device:
    """Memory that a run may use: a GPU's own, or a host's for so many of the run's ranks (0: this is a GPU)."""

    bytes: float
    host_ranks: int = 0

    def needs(self, memory: MemoryPrediction, world: int) -> float:
        if not self.host_ranks:
            return memory.total
        mean = sum(memory.by_rank) / len(memory.by_rank)
        return self.host_ranks * (mean - memory.of("overhead"))

    def share(self, memory: MemoryPrediction) -> float:
        """The total of the fullest rank with which the device is just full."""
        if not self.host_ranks:
            return self.bytes
        return self.bytes / self.host_ranks + memory.of("overhead")


def refuse_if_too_large(run: RunConfig, world: int, device: Device) -> None:
    """Raise where the predicted peak is more than there is; ``run`` has no other problems."""
    try:
        workload = workload_of_run(run, cluster_of("H100", world))
    except ProblemsError:
        return
    if device.host_ranks:
        # What a CPU rank sends to the host's memory stays where it is.
        workload = saving(workload, frozenset(one for one in savings_of(run) if not is_on_host(frozenset({one}))))
    memory = predict_memory(workload)
    needed = device.needs(memory, world)
    if needed <= device.bytes:
        return
    where = "this host has" if device.host_ranks else "the device has"
    who = (
        f"{device.host_ranks} ranks"
        if device.host_ranks
        else f"its fullest rank (pipeline rank {memory.pipeline_rank})"
    )
    message = f"memory: {who} would need {format_bytes(needed)}, and {where} {format_bytes(device.bytes)}"
    nearest = next(_settings_that_fit(workload, world, device), None)
    if nearest is None:
        raise MemoryPreflightError(f"{message}; use more ranks, or a smaller model; --force starts it anyway")
    found, size = nearest
    listed = ", ".join(f"{path} = {value}" for path, value in changes_to_run(found, run).items())
    raise MemoryPreflightError(f"{message}; it fits with {listed} ({format_bytes(size)}); --force starts it as it is")


def _settings_that_fit(workload: Workload, world: int, device: Device) -> Iterator[tuple[Workload, float]]:
    """The nearest first, with what they need."""
    for base in _bases(workload):
        memory = predict_memory(base)
        if device.needs(memory, world) <= device.bytes:
            found: Workload | None = base
        else:
            found = cheapest_fit(base, device.share(memory), host=not device.host_ranks)
        if found is None or problems(found.run, world):
            continue
        size = device.needs(predict_memory(found), world)
        if size <= device.bytes:
            yield found, size


def _bases(workload: Workload) -> Iterator[Workload]:
    yield workload
    yield changed(workload, memory={"recompute": _PHASES})
    size = workload.run.data.micro_batch // 2
    while size:
        smaller = changed(workload, data={"micro_batch": size})
        yield smaller
        yield changed(smaller, memory={"recompute": _PHASES})
        size //= 2
