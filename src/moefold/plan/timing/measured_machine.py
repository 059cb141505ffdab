"""One layer of a moefold run on a computer that was measured.

The work is counted as for any cluster (`plan/op_costs.py`). Exchanges are those of moefold's own program, one after the
other and after the computation, for a rank of a processor has nothing that could carry them beside it:

    tensor parallelism   a gather before and a sum after each half that is cut; backward the other way round
    experts              counts, rows and weights there, answers back; backward the other way round
    context              keys and values round the ring, once forward, twice backward with their gradients
    sharding             parameters before each pass, gradients after the second, unless a pipeline does it once

What a step of a moefold run costs once, on a computer that was measured, and what sharing its cores costs.

Ranks that wait leave their core to others. So if there are more ranks than cores, a pipeline's waits are other ranks'
time: the step takes as long as its longest chain of work on free cores, or as all work on the cores there are,
whichever is longer.
"""

from __future__ import annotations

from moefold.hardware.machine import Machine
from moefold.plan.op_costs import Sizes
from moefold.plan.shape import Attention, Layer, Mixture
from moefold.plan.shape_params import layer_parameters
from moefold.plan.timing.layer_time import Load, Passes, Seconds, loads
from moefold.plan.timing.throughput import Rates
from moefold.plan.traffic import context_bytes, exchange_bytes, stage_bytes, tensor_bytes
from moefold.plan.workload import Job


def layer_on_machine(job: Job, layer: Layer, sizes: Sizes, rates: Rates) -> Passes:
    """One microbatch through one layer, each rank with a core of its own; `machine_step.py` lets them share."""
    machine = job.cluster.machine
    assert machine is not None
    before, after, backward = loads(layer, sizes, job.options)
    tensor, sums = _tensor(job, machine, layer), _sums(job, machine, layer)
    expert = _experts(job, machine, layer)
    context = _context(job, machine, layer)
    gather, scatter = sharding_seconds(job, machine, *_held(job, layer))
    repeats = 1.0 if "full" in job.options.recompute or "attention" in job.options.recompute else 0.0

    def own(load: Load, *, back: bool) -> Seconds:
        compute = rates.compute(load.work, backward=back)
        moving = rates.moving(load.work) + rates.gap * load.work.kernels + rates.loop * load.loops
        return Seconds(compute, moving)

    there = Seconds(tensor=tensor + sums, expert=expert, context=context / 3, sharded=gather)
    # Of what is computed again, the first half gathers again.
    back = Seconds(
        tensor=tensor * (1 + 0.5 * repeats),
        expert=expert,
        context=context * (2 + repeats) / 3,
        sharded=gather + scatter,
    )
    return Passes(own(before, back=False).plus(own(after, back=False)).plus(there), own(backward, back=True).plus(back))


def ends_on_machine(job: Job, embedding: bool, head: bool) -> Passes:
    """What the embedding and the head exchange: rows of theirs that are sharded, tokens where the vocabulary is cut."""
    machine, model, tp = job.cluster.machine, job.model, job.cuts.tp
    assert machine is not None
    tables = (embedding or head) if model.tied else embedding + head
    gather, scatter = sharding_seconds(job, machine, tables * model.width * model.vocab / tp, 0.0)
    tokens = 0.0
    if tp > 1:
        moved = job.numbers.word * job.batch.tokens / job.cuts.cp * model.width * (tp - 1) / tp
        tokens = (embedding + head) * machine.seconds("tokens", moved, tp, job.cluster.num_gpus)
    # They stay gathered from forward to backward.
    return Passes(Seconds(tensor=tokens, sharded=gather), Seconds(tensor=tokens, sharded=scatter))


def sharding_seconds(job: Job, machine: Machine, dense: float, experts: float) -> tuple[float, float]:
    """Gathering so many parameters of one module and its experts, and summing their gradients, once each."""
    cuts, world = job.cuts, job.cluster.num_gpus
    if cuts.sharding != "zero3" or cuts.pp * cuts.vpp > 1:
        return 0.0, 0.0
    gather = scatter = 0.0
    for number, group in ((dense, cuts.dp * cuts.cp), (experts, cuts.edp)):
        if number and group > 1:
            moved = number * job.numbers.weight_bytes * (group - 1) / group
            gather += machine.seconds("parameters", moved, group, world)
            scatter += machine.seconds("gradients", moved, group, world)
    return gather, scatter


def _held(job: Job, layer: Layer) -> tuple[float, float]:
    held, cuts = layer_parameters(layer, job.model.width), job.cuts
    return held.dense / cuts.tp + held.whole, held.experts / (cuts.ep * cuts.etp)


def _tensor(job: Job, machine: Machine, layer: Layer) -> float:
    size = max(job.cuts.tp, job.cuts.etp)
    if size == 1:
        return 0.0
    calls = 0
    if job.cuts.tp > 1:
        shared = isinstance(layer.feed, Mixture) and not layer.feed.shared_width
        calls += 2 * (layer.mixer is not None) + 2 * (layer.feed is not None and not shared)
    if isinstance(layer.feed, Mixture) and job.cuts.etp > 1:
        calls += 3
    return machine.seconds("tokens", tensor_bytes(job, layer), size, job.cluster.num_gpus, calls)


def _sums(job: Job, machine: Machine, layer: Layer) -> float:
    """A balance loss adds up counts over the ranks that share a microbatch's tokens."""
    if not isinstance(layer.feed, Mixture):
        return 0.0
    world = job.cluster.num_gpus
    return sum(machine.seconds("sum", 0.0, size, world) for size in (job.cuts.tp, job.cuts.cp) if size > 1)


def _experts(job: Job, machine: Machine, layer: Layer) -> float:
    """Forward; backward is the same."""
    if not isinstance(layer.feed, Mixture) or job.cuts.ep == 1:
        return 0.0
    world, ep = job.cluster.num_gpus, job.cuts.ep
    moved = exchange_bytes(job, layer.feed).inside
    if job.options.dispatcher == "all_gather":
        return machine.seconds("tokens", 2 * moved, ep, world, 4)
    return machine.seconds("exchange", moved, ep, world) / 2


def _context(job: Job, machine: Machine, layer: Layer) -> float:
    """Forward, and twice as much backward."""
    cp = job.cuts.cp
    if cp == 1 or not isinstance(layer.mixer, Attention):
        return 0.0
    return machine.seconds("context", context_bytes(job, layer), cp, job.cluster.num_gpus)


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
