"""Step time of a moefold run on a computer that was measured: one layer, what a step costs once, and shared cores.

The work is counted as for any cluster (`plan/op_costs.py`). Collectives run one after the other and after the
computation, because a CPU rank has no second stream:

    tensor parallelism   all_gather before and reduce_scatter after each sharded half; backward the other way round
    experts              dispatch of counts, rows and probs, combine; backward the other way round
    context              keys and values round the ring, once forward, twice backward with their gradients
    sharding             parameters before each pass, gradients after the second, unless a pipeline does it once

Ranks that wait leave their core to others. So with more ranks than cores, a pipeline's bubbles are other ranks' time:
the step takes as long as its longest chain of work on free cores, or as all work on the cores there are, whichever is
longer.
"""

from __future__ import annotations

from moefold.blueprint.model_shape import Attention, Layer, MoE
from moefold.blueprint.param_counts import layer_counts
from moefold.hardware.machine import Machine
from moefold.plan.op_sizes import Sizes
from moefold.plan.timing.launched_parts import Load, loads_of
from moefold.plan.timing.layer_time import Passes, Seconds
from moefold.plan.timing.throughput import Rates
from moefold.plan.traffic import context_bytes, dispatch_bytes, stage_bytes, tensor_bytes
from moefold.plan.workload import Workload


def layer_on_machine(workload: Workload, layer: Layer, sizes: Sizes, rates: Rates) -> Passes:
    """One microbatch through one layer, each rank with a core of its own; `stretch` corrects for shared cores."""
    machine = workload.cluster.machine
    assert machine is not None
    before, after, backward = loads_of(workload, layer, sizes)
    tensor, sums = _tensor(workload, machine, layer), _sums(workload, machine, layer)
    expert = _experts(workload, machine, layer)
    context = _context(workload, machine, layer)
    gather, scatter = sharding_seconds(workload, machine, *_held(workload, layer))
    repeats = 1.0 if "full" in workload.recompute or "attention" in workload.recompute else 0.0

    def own(load: Load, *, back: bool) -> Seconds:
        compute = rates.compute(load.work, backward=back)
        moving = rates.moving(load.work) + rates.gap * load.work.kernels + rates.loop * load.loops
        return Seconds(compute, moving)

    there = Seconds(tensor=tensor + sums, expert=expert, context=context / 3, sharded=gather)
    # Of what is recomputed, the first half gathers again.
    back = Seconds(
        tensor=tensor * (1 + 0.5 * repeats),
        expert=expert,
        context=context * (2 + repeats) / 3,
        sharded=gather + scatter,
    )
    return Passes(own(before, back=False).plus(own(after, back=False)).plus(there), own(backward, back=True).plus(back))


def ends_on_machine(workload: Workload, embedding: bool, head: bool) -> Passes:
    """Collectives of embedding and head: their sharded rows, and tokens where tp shards the vocabulary."""
    machine, model, tp = workload.cluster.machine, workload.model, workload.parallel.tp
    assert machine is not None
    tables = (embedding or head) if model.tied else embedding + head
    gather, scatter = sharding_seconds(workload, machine, tables * model.dim * model.vocab / tp, 0.0)
    tokens = 0.0
    if tp > 1:
        moved = workload.word * workload.context_tokens * model.dim * (tp - 1) / tp
        tokens = (embedding + head) * machine.seconds("tokens", moved, tp, workload.cluster.num_gpus)
    # They stay unsharded from forward to backward.
    return Passes(Seconds(tensor=tokens, sharded=gather), Seconds(tensor=tokens, sharded=scatter))


def sharding_seconds(workload: Workload, machine: Machine, dense: float, experts: float) -> tuple[float, float]:
    """Gathering so many parameters of one module and its experts, and summing their gradients, once each."""
    parallel, world = workload.parallel, workload.cluster.num_gpus
    if parallel.sharding != "fsdp" or parallel.pp * parallel.vpp > 1:
        return 0.0, 0.0
    gather = scatter = 0.0
    for number, group in ((dense, workload.dp * parallel.cp), (experts, workload.edp)):
        if number and group > 1:
            moved = number * workload.weight_bytes * (group - 1) / group
            gather += machine.seconds("parameters", moved, group, world)
            scatter += machine.seconds("gradients", moved, group, world)
    return gather, scatter


def _held(workload: Workload, layer: Layer) -> tuple[float, float]:
    held, parallel = layer_counts(layer, workload.model.dim), workload.parallel
    return held.on_rank(parallel.tp, parallel.ep, parallel.etp)


def _tensor(workload: Workload, machine: Machine, layer: Layer) -> float:
    size = max(workload.parallel.tp, workload.parallel.etp)
    if size == 1:
        return 0.0
    calls = 0
    if workload.parallel.tp > 1:
        shared = isinstance(layer.feed, MoE) and not layer.feed.shared_hidden_dim
        calls += 2 * (layer.mixer is not None) + 2 * (layer.feed is not None and not shared)
    if isinstance(layer.feed, MoE) and workload.parallel.etp > 1:
        calls += 3
    return machine.seconds("tokens", tensor_bytes(workload, layer), size, workload.cluster.num_gpus, calls)


def _sums(workload: Workload, machine: Machine, layer: Layer) -> float:
    """A balance loss adds up counts over the ranks that share a microbatch's tokens."""
    if not isinstance(layer.feed, MoE):
        return 0.0
    world = workload.cluster.num_gpus
    return sum(
        machine.seconds("sum", 0.0, size, world) for size in (workload.parallel.tp, workload.parallel.cp) if size > 1
    )


def _experts(workload: Workload, machine: Machine, layer: Layer) -> float:
    """Forward; backward is the same."""
    if not isinstance(layer.feed, MoE) or workload.parallel.ep == 1:
        return 0.0
    world, ep = workload.cluster.num_gpus, workload.parallel.ep
    moved = dispatch_bytes(workload, layer.feed).inside
    if workload.dispatcher == "all_gather":
        return machine.seconds("tokens", 2 * moved, ep, world, 4)
    return machine.seconds("exchange", moved, ep, world) / 2


def _context(workload: Workload, machine: Machine, layer: Layer) -> float:
    """Forward, and twice as much backward."""
    cp = workload.parallel.cp
    if cp == 1 or not isinstance(layer.mixer, Attention):
        return 0.0
    return machine.seconds("context", context_bytes(workload, layer), cp, workload.cluster.num_gpus)


# Losses, balance, counts, grad_norm, skip reasons, requests to stop: small all_reduces over all ranks.
_SUMS = 8
# Modules that unshard, and parameters that are reduced, per layer, where a pipeline does both once.
_MODULES, _PARAMETERS = 2, 10


def messages_on_machine(workload: Workload, machine: Machine) -> float:
    """Hidden states and gradients that a rank waits for. Ends of the pipeline have only one neighbour."""
    parallel = workload.parallel
    if parallel.pp == 1:
        return 0.0
    received = (2 * parallel.vpp - 2 / parallel.pp) * workload.microbatches
    return received * machine.seconds("send", stage_bytes(workload), 2, workload.cluster.num_gpus)


def reduction_on_machine(workload: Workload, machine: Machine, dense: float, experts: float) -> float:
    """Pipelines unshard before the first microbatch and reduce after the last."""
    parallel, world = workload.parallel, workload.cluster.num_gpus
    if parallel.pp * parallel.vpp == 1:
        return 0.0
    layers = len(workload.model.layers) / parallel.pp
    total = 0.0
    for number, group, share in ((dense, workload.dp * parallel.cp, 0.8), (experts, workload.edp, 0.2)):
        if number and group > 1:
            moved = number * workload.weight_bytes * (group - 1) / group
            total += machine.seconds("parameters", moved, group, world, layers * _MODULES / 2)
            total += machine.seconds("gradients", moved, group, world) + machine.seconds(
                "sum", 0.0, group, world, layers * _PARAMETERS * share
            )
    return total


def fixed_on_machine(workload: Workload, machine: Machine) -> float:
    """Small sums over all ranks, and what the host does beside the step."""
    world = workload.cluster.num_gpus
    sums = machine.seconds("sum", 0.0, world, world, _SUMS) if world > 1 else 0.0
    return sums + machine.host_ms * 1e-3


def stretch(per_rank: list[float], bubble: float, microbatches: int, slowdown: float) -> float:
    """By which factor work takes longer because ranks share cores: their own seconds per microbatch, by stage."""
    longest = max(per_rank) * microbatches + bubble
    if longest <= 0:
        return 1.0
    mean = sum(per_rank) / len(per_rank) * microbatches
    return max(1.0, slowdown * mean / longest)


def stretched(passes: Passes, factor: float) -> Passes:
    """Computation takes so much longer; collectives were measured among as many ranks."""

    def one(seconds: Seconds) -> Seconds:
        own = Seconds(seconds.compute, seconds.moving, seconds.host)
        return seconds.plus(own, factor - 1)

    return Passes(one(passes.forward), one(passes.backward))
