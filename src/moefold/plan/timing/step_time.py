"""How long a step takes, and where the time goes.

One microbatch through every layer gives each stage its forward and backward time; the order of microbatches turns those
into the pipeline's time; what happens once per step (reducing gradients, the optimizer) comes on top.

**The optimizer.** On the device the update is memory traffic: states are read and written once. States that wait in the
host's memory come over the link before the update and go back after it; the link works in both directions at once, so
one direction counts. An update on the CPU sends gradients out and weights back, and runs at the speed of the host's
memory. Muon orthogonalises every hidden matrix by Newton-Schulz iterations on the rank that owns it. One iteration on
an a x b matrix (a <= b) is three matmuls: X X', its square, and their product with X.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from moefold.blueprint.flat_layout import MEBIBYTE
from moefold.blueprint.model_shape import Layer, ModelShape
from moefold.blueprint.muon_matrices import matrices_of, newton_schulz_flops
from moefold.blueprint.param_counts import layer_counts
from moefold.blueprint.param_groups import update_rule
from moefold.blueprint.parameters import parameters
from moefold.config.model import ModelConfig
from moefold.config.optim import OptimConfig
from moefold.hardware.machine import Machine
from moefold.plan.op_costs import embedding_of, head_of, join_of
from moefold.plan.op_sizes import Sizes, sizes_of
from moefold.plan.prediction import TimeLine, TimePrediction
from moefold.plan.stage_contents import StageContents, Stages, stages_of_shape, written_stages
from moefold.plan.timing.constants import CURRENT, Constants
from moefold.plan.timing.fitted import INTERVALS
from moefold.plan.timing.layer_time import Passes, Seconds, layer_passes, part_passes, shards_by_layer
from moefold.plan.timing.measured_machine import (
    ends_on_machine,
    fixed_on_machine,
    layer_on_machine,
    messages_on_machine,
    reduction_on_machine,
    stretch,
    stretched,
)
from moefold.plan.timing.throughput import PARTS, Rates, bubble_units, rates_of, ring
from moefold.plan.traffic import (
    Reach,
    data_reach,
    expert_data_reach,
    host_reaches,
    pipeline_leaves_domain,
    stage_bytes,
    synced_word,
)
from moefold.plan.workload import Workload
from moefold.schedule.actions import place
from moefold.schedule.names import schedule_named

# Bytes that the optimizer reads and writes per parameter: gradient, master, both moments, and the new weight; and the
# states in it, which formats change.
TRAFFIC_BYTES = 34.0
STATE_BYTES = 12.0
# What one rank moves of the host's memory while all ranks of a node update on the CPU. Qwen3-30B on H100 with 25 to
# 100 % of its optimizer there takes 0.21 s more for every 1e9 bytes of states (a sweep published by Megatron-Bridge).
CPU_GB_S = 14.0
# Share of the matmul peak that Newton-Schulz iterations reach (assumed, not measured).
MUON_MFU = 0.4


def optimizer_seconds(workload: Workload, rates: Rates, updated: float, held: float) -> float:
    """``updated``: parameters that this rank updates; ``held``: those it holds, whose gradients are cleared."""
    gpu, place = workload.cluster.gpu, workload.run.memory.optimizer
    link = gpu.host_gb_s * 1e9
    if not workload.is_own:
        if place == "cpu":
            return updated * ((4.0 + workload.weight_bytes) / link + TRAFFIC_BYTES / (CPU_GB_S * 1e9))
        return updated * 16.0 / link if place == "host" else (updated * TRAFFIC_BYTES + held * 4.0) * rates.stream
    states = workload.moments_bytes + (workload.master_bytes or workload.weight_bytes)
    moved = TRAFFIC_BYTES - 2 * (STATE_BYTES - states)
    cleared = held * 4.0 * rates.stream
    if place == "cpu":
        sent = updated * max(workload.gradient_bytes, workload.gather_bytes) / link
        return sent + updated * moved / (CPU_GB_S * 1e9) + cleared
    update = updated * moved * rates.stream + cleared
    if place == "host":
        # Muon's matrices have one moment.
        moments = workload.moment_bytes if workload.run.optim.algorithm == "muon" else workload.moments_bytes
        update += updated * (moments + workload.master_bytes - workload.device_master_bytes) / link
    return update + _newton_schulz_seconds(workload)


def _newton_schulz_seconds(workload: Workload) -> float:
    if workload.run.optim.algorithm != "muon":
        return 0.0
    work = muon_flops(workload.run.model, workload.run.optim) / workload.cluster.num_gpus
    return work / (MUON_MFU * workload.cluster.gpu.bf16_tflops * 1e12)


@lru_cache(maxsize=64)
def muon_flops(model: ModelConfig, optim: OptimConfig) -> int:
    """Of all matrices that Muon updates, cut as it sees them: experts, gate and up, and heads of MLA apart."""
    total = 0
    for spec in parameters(model):
        if update_rule(spec.name, spec.kind, optim).algorithm == "muon":
            matrices = matrices_of(spec, model)
            *stacks, rows, (_, columns) = matrices.edges
            cut = sum(newton_schulz_flops(b - a, columns, optim.muon.iterations) for a, b in pairwise(rows))
            total += prod(len(edges) - 1 for edges in stacks) * cut
    return total


_NOTHING = Passes(Seconds(), Seconds())


@dataclass(frozen=True)
class StepTime:
    """A step's parts in seconds: `busy` is the slowest pipeline rank's own work over all microbatches."""

    busy: Passes
    bubble: float
    messages: float
    reduction: float
    hidden_reduction: float
    optimizer: float
    fixed: float

    @property
    def total(self) -> float:
        return self.busy.total + self.bubble + self.messages + self.reduction + self.optimizer + self.fixed

    def times(self, factor: float) -> StepTime:
        """Every part, hidden ones too, takes so many times as long: a measured step does not say which part was off."""
        rest = ("bubble", "messages", "reduction", "hidden_reduction", "optimizer", "fixed")
        return StepTime(_NOTHING.plus(self.busy, factor), **{name: factor * getattr(self, name) for name in rest})


def step_time(workload: Workload, c: Constants = CURRENT) -> StepTime:
    """The closed form, which the search uses; a test holds it against the simulated order."""
    step = _step_of_constants(workload, c)
    return step if workload.rescaling is None else step.times(workload.rescaling.factor)


def _step_of_constants(workload: Workload, c: Constants) -> StepTime:
    sizes = sizes_of(workload)
    rates = rates_of(workload, c, float(workload.run.data.seq_len))
    parallel, count = workload.parallel, workload.microbatches
    stages = stages_of_shape(workload.model, parallel.pp * parallel.vpp, written_stages(workload))
    each = stage_passes(workload, stages, sizes, rates, c)
    totals = [passes.total for passes in each]
    holder = place(parallel.pp, parallel.vpp, schedule_named(parallel.schedule).placement)
    per_rank = [0.0] * parallel.pp
    for rank, which in zip(holder, stages.which):
        per_rank[rank] += totals[which]
    slowest = per_rank.index(max(per_rank))
    busy = _NOTHING
    for rank, which in zip(holder, stages.which):
        if rank == slowest:
            busy = busy.plus(each[which])
    bubble = 0.0
    if parallel.pp > 1:
        # One of the other ranks' stages, on average, takes this long for one microbatch.
        other = (sum(per_rank) - per_rank[slowest]) / ((parallel.pp - 1) * parallel.vpp)
        bubble = bubble_units(parallel.schedule, parallel.pp, parallel.vpp) / PARTS * other
    if workload.cluster.machine is not None:
        return _on_machine(workload, workload.cluster.machine, busy, bubble, per_rank)
    reduction, hidden = _reduction(workload, busy.total, c)
    return StepTime(
        _NOTHING.plus(busy, count),
        bubble,
        _messages(workload, c),
        reduction,
        hidden,
        optimizer_seconds(workload, rates, _own(workload, *_held(workload)), sum(_held(workload))),
        c.step_ms * 1e-3,
    )


def _on_machine(workload: Workload, machine: Machine, busy: Passes, bubble: float, per_rank: list[float]) -> StepTime:
    """The same where ranks share the cores of a computer that was measured."""
    count, crowd = workload.microbatches, machine.slowdown(workload.cluster.num_gpus)
    factor = stretch(per_rank, bubble, count, crowd)
    dense, experts = _held(workload)
    return StepTime(
        busy=_NOTHING.plus(stretched(busy, factor), count),
        bubble=factor * bubble,
        messages=messages_on_machine(workload, machine),
        reduction=reduction_on_machine(workload, machine, dense, experts),
        hidden_reduction=0.0,
        optimizer=crowd * _own(workload, dense, experts) * machine.update_ns * 1e-9,
        fixed=fixed_on_machine(workload, machine),
    )


def stage_passes(workload: Workload, stages: Stages, sizes: Sizes, rates: Rates, c: Constants) -> list[Passes]:
    """Forward and backward of one microbatch on each different stage."""
    times: dict[int, Passes] = {}
    head = part_passes(head_of(workload.model.vocab, sizes), rates)

    def of(layer: Layer) -> Passes:
        # Equal layers of a model are few objects; looking them up by identity saves hashing them.
        if id(layer) not in times:
            measured = workload.cluster.machine is not None
            times[id(layer)] = (
                layer_on_machine(workload, layer, sizes, rates)
                if measured
                else layer_passes(workload, layer, sizes, rates, c)
            )
        return times[id(layer)]

    def stage(contents: StageContents) -> Passes:
        total = _NOTHING
        for layer, number in contents.layers:
            total = total.plus(of(layer), number)
        if contents.embedding:
            total = total.plus(part_passes(embedding_of(sizes), rates))
        if contents.mtp:
            ahead = of(workload.model.mtp_layers[-1]).plus(part_passes(join_of(sizes), rates)).plus(head)
            total = total.plus(ahead, contents.mtp)
        if workload.cluster.machine is not None:
            total = total.plus(ends_on_machine(workload, contents.embedding, contents.head))
        return total.plus(head) if contents.head else total

    return [stage(contents) for contents in stages.different]


def _messages(workload: Workload, c: Constants) -> float:
    parallel = workload.parallel
    if parallel.pp == 1:
        return 0.0
    outside = pipeline_leaves_domain(workload)
    rate = workload.cluster.nic_gb_s * c.ring_nic if outside else workload.cluster.gpu.link_gb_s * c.ring_link
    once = stage_bytes(workload) / (rate * 1e9) + c.latency_us * 1e-6
    return float(2 * parallel.vpp * workload.microbatches * once * c.stage_exposed)


def _reduction(workload: Workload, window: float, c: Constants) -> tuple[float, float]:
    """Gradients are scattered and parameters gathered once per step, mostly beside the last and first microbatch."""
    parallel = workload.parallel
    if shards_by_layer(workload):
        return 0.0, 0.0
    dense, experts = _held(workload)
    each = synced_word(workload)
    moved = synced_seconds(workload, dense, each, data_reach(workload), parallel.tp, c) + synced_seconds(
        workload, experts, each, expert_data_reach(workload), parallel.ep * parallel.etp, c
    )
    if not workload.framework.gradient_overlap or parallel.sharding == "none":
        return moved, 0.0
    shown = max(c.data_exposed * moved, moved - window)
    return shown, moved - shown


def synced_seconds(workload: Workload, held: float, each: float, where: Reach, stride: int, c: Constants) -> float:
    """Gathers and scatters of ``held`` parameters of ``each`` bytes, by one collective or in steps.

    A ring over all ranks is at its best priced: one that uses every GPU's share of the network. Steps inside of hosts
    and between them are a pipeline of buckets, so one bucket's shorter step is not hidden.
    """
    levels = host_reaches(workload, where, stride)
    if levels is None or not held:
        return ring(held * each, where, workload.cluster, c)
    inside = ring(held * each, levels[0], workload.cluster, c)
    between = ring(held * each / levels[0].size, levels[1], workload.cluster, c)
    buckets = max(1.0, held * workload.gradient_bytes / (workload.parallel.bucket_mb * MEBIBYTE))
    return max(inside, between) + min(inside, between) / buckets


def _held(workload: Workload) -> tuple[float, float]:
    """Parameters of the rank that holds most: dense and experts."""
    parallel = workload.parallel
    return _held_by(
        workload.model, parallel.pp, parallel.vpp, written_stages(workload), (parallel.tp, parallel.ep, parallel.etp)
    )


@lru_cache(maxsize=10_000)
def _held_by(
    model: ModelShape, pp: int, vpp: int, written: str | None, degrees: tuple[int, int, int]
) -> tuple[float, float]:
    """The constants were fitted to this sum: it leaves MTP modules out, counts tied embeddings on both ends and the
    vocabulary unpadded. `memory/states.rank_weights` is exact; taking it here moves some step times by up to 5 %."""
    ranks = [[0.0, 0.0] for _ in range(pp)]
    stages = stages_of_shape(model, pp * vpp, written)
    for index, which in enumerate(stages.which):
        own, contents = ranks[index % pp], stages.different[which]
        for layer, number in contents.layers:
            local = layer_counts(layer, model.dim).on_rank(*degrees)
            own[0] += number * local[0]
            own[1] += number * local[1]
        own[0] += (contents.embedding + contents.head) * model.dim * model.vocab / degrees[0]
    dense, experts = max(ranks, key=sum)
    return dense, experts


def _own(workload: Workload, dense: float, experts: float) -> float:
    """Parameters that a rank updates of those it holds."""
    parallel = workload.parallel
    shards = 1 if parallel.sharding == "none" else workload.dp * parallel.cp
    edp = 1 if parallel.sharding == "none" else workload.edp
    return dense / shards + experts / edp


def interval_kinds(workload: Workload) -> tuple[str, str, str]:
    """Of which published runs the interval is, the nearest first: of its kind this framework's on such GPUs, this
    framework's, or all frameworks'."""
    kind = "moe" if workload.model.is_moe else "dense"
    own = f"{workload.framework.name} {kind}"
    return f"{own} {workload.cluster.gpu.architecture}", own, kind


def interval_of(workload: Workload) -> tuple[float, float]:
    """80 % of measured step times lie between these multiples of the predicted one."""
    return next(INTERVALS[name] for name in interval_kinds(workload) if name in INTERVALS)


def predict_time(workload: Workload, c: Constants = CURRENT) -> TimePrediction:
    """The step with its lines."""
    step = step_time(workload, c)
    f, b = step.busy.forward, step.busy.backward
    both = f.plus(b)
    lines = (
        TimeLine("compute", "matmuls and attention", both.compute),
        TimeLine("compute", "memory traffic", both.moving),
        TimeLine("host", "waiting for the host", both.host),
        TimeLine("communication", "tensor parallelism", both.tensor + both.hidden_tensor, both.hidden_tensor),
        TimeLine("communication", "expert dispatch and combine", both.expert + both.hidden_expert, both.hidden_expert),
        TimeLine("communication", "context parallelism", both.context),
        TimeLine("communication", "sharded parameters", both.sharded + both.hidden_sharded, both.hidden_sharded),
        TimeLine("host", "offloaded activations", both.offload + both.hidden_offload, both.hidden_offload),
        TimeLine("communication", "messages between stages", step.messages),
        TimeLine(
            "communication", "gradients and parameters", step.reduction + step.hidden_reduction, step.hidden_reduction
        ),
        TimeLine("bubble", "waiting for other stages", step.bubble),
        TimeLine("optimizer", "optimizer", step.optimizer),
        TimeLine("host", "fixed time of a step", step.fixed),
    )
    usual, found = interval_of(workload), workload.rescaling
    low, high = usual if found is None else (found.low, found.high)
    return TimePrediction(
        step.total, low * step.total, high * step.total, tuple(line for line in lines if line.seconds)
    )
