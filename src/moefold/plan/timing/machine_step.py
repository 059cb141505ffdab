"""What a step of a moefold run costs once, on a computer that was measured, and what sharing its cores costs.

Ranks that wait leave their core to others. So if there are more ranks than cores, a pipeline's waits are other ranks'
time: the step takes as long as its longest chain of work on free cores, or as all work on the cores there are,
whichever is longer.
"""

from __future__ import annotations

from moefold.hardware.machine import Machine
from moefold.plan.job import Job
from moefold.plan.timing.layer_time import Passes, Seconds
from moefold.plan.traffic import stage_bytes

# Losses, balance, counts, the norm, objections, requests to stop: small sums over all ranks.
_SUMS = 8
# Modules that gather, and parameters that are summed, per layer, where a pipeline does both once.
_MODULES, _PARAMETERS = 2, 10


def messages_on_machine(job: Job, machine: Machine) -> float:
    """Streams and gradients that a rank waits for. Ends of the pipeline have only one neighbour."""
    cuts = job.cuts
    if cuts.pp == 1:
        return 0.0
    received = (2 * cuts.vpp - 2 / cuts.pp) * job.batch.microbatches
    return received * machine.seconds("send", stage_bytes(job), 2, job.cluster.num_gpus)


def reduction_on_machine(job: Job, machine: Machine, dense: float, experts: float) -> float:
    """Pipelines gather before the first microbatch and sum after the last."""
    cuts, world = job.cuts, job.cluster.num_gpus
    if cuts.pp * cuts.vpp == 1:
        return 0.0
    layers = len(job.model.layers) / cuts.pp
    total = 0.0
    for number, group, share in ((dense, cuts.dp * cuts.cp, 0.8), (experts, cuts.edp, 0.2)):
        if number and group > 1:
            moved = number * job.numbers.weight_bytes * (group - 1) / group
            total += machine.seconds("parameters", moved, group, world, layers * _MODULES / 2)
            total += machine.seconds("gradients", moved, group, world) + machine.seconds(
                "sum", 0.0, group, world, layers * _PARAMETERS * share
            )
    return total


def fixed_on_machine(job: Job, machine: Machine) -> float:
    world = job.cluster.num_gpus
    return machine.seconds("sum", 0.0, world, world, _SUMS) if world > 1 else 0.0


def stretch(per_rank: list[float], bubble: float, microbatches: int, slowdown: float) -> float:
    """By which factor work takes longer because ranks share cores: their own seconds per microbatch, by stage."""
    longest = max(per_rank) * microbatches + bubble
    if longest <= 0:
        return 1.0
    mean = sum(per_rank) / len(per_rank) * microbatches
    return max(1.0, slowdown * mean / longest)


def stretched(passes: Passes, factor: float) -> Passes:
    """Computation takes so much longer; exchanges were measured among as many ranks."""

    def one(seconds: Seconds) -> Seconds:
        own = Seconds(seconds.compute, seconds.moving, seconds.host)
        return seconds.plus(own, factor - 1)

    return Passes(one(passes.forward), one(passes.backward))
