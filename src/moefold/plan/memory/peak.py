"""Peak memory of the fullest rank, cause by cause.

States exist for the whole step (`plan/memory/states.py`). Activations accumulate with the microbatches in flight
(`plan/memory/in_flight.py`), each with what its layers save (`plan/memory/layer_activations.py`). Temporary memory
comes on top (`plan/memory/workspace.py`): either the loss with its logits, or the backward of one layer with its
gradients and what is recomputed. Pipeline ranks differ in all of this, so each is computed and the fullest reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from operator import mul
from typing import NamedTuple

from moefold.blueprint.model_shape import Layer, ModelShape, MoE
from moefold.plan.echo_cost import clone_bytes
from moefold.plan.memory.graph_buffers import graph_lines
from moefold.plan.memory.in_flight import Moment, moments
from moefold.plan.memory.layer_activations import kept_by
from moefold.plan.memory.saved_activations import Setting, setting_of
from moefold.plan.memory.states import (
    RankWeights,
    gathered_lines,
    rank_weights,
    shards,
    state_lines,
    workload_reshards_per_step,
)
from moefold.plan.memory.workspace import around_head, around_module, workspace_lines
from moefold.plan.prediction import MemoryLine, MemoryPrediction
from moefold.plan.stage_contents import StageContents, stages_of_shape, written_stages
from moefold.plan.workload import Workload
from moefold.schedule.actions import place
from moefold.schedule.names import SCHEDULES
from moefold.units import format_bytes

# Labels of GPUs count memory in units of 2**30, and the driver keeps a little of it.
LABEL_UNIT = 2**30
USABLE_SHARE = 0.983
# Holes between allocated blocks, as a share of all that is allocated (nine runs of one node: 3 to 8 %, and frameworks
# that let segments grow have fewer).
FRAGMENTATION = 0.03
# Of one more microbatch, where a forward runs beside a backward (two runs without a pipeline: 50 and 75 %).
PAIR_SHARE = 0.6
# The runtime's own: context, kernels, buffers of communication libraries. Not seen by the allocator.
RUNTIME_BYTES = 2e9

# Of a comparison of sums.
_ROUNDING = 1e-9

# A kind of layer, bytes per token of all such layers, how many; no layer stands for the pipeline's end.
_Part = tuple[Layer | None, float, int]


class _Live(NamedTuple):
    """The moment with most activations, and their bytes."""

    moment: Moment
    bytes: float


@dataclass(frozen=True)
class _RankShape:
    """What pipeline ranks with the same stages have in common."""

    stages: tuple[StageContents, ...]
    weights: RankWeights
    # Per stage and microbatch: its parts, and bytes per token.
    parts: tuple[tuple[_Part, ...], ...]
    token_bytes: tuple[float, ...]
    # Of what deferred weight gradients hold.
    deferred_bytes: tuple[float, ...]

    def stage_bytes(self, workload: Workload) -> tuple[float, ...]:
        """Per stage, and then per stage what its deferred weight gradients hold."""
        tokens, clones = workload.context_tokens, clone_bytes(workload.run)
        held = zip(self.token_bytes, self.moe_layers)
        return (
            *(tokens * each + clones * layers for each, layers in held),
            *(tokens * each for each in self.deferred_bytes),
        )

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(
            sum(count for layer, _, count in parts if layer is not None and isinstance(layer.feed, MoE))
            for parts in self.parts
        )


@dataclass(frozen=True)
class _Fullest:
    """The fullest rank with its lines, and every rank's total."""

    rank: int
    lines: list[MemoryLine]
    by_rank: tuple[float, ...]


def predict_memory(workload: Workload) -> MemoryPrediction:
    """The fullest pipeline rank."""
    found = _fullest_rank(workload, inf)
    if isinstance(found, float):
        raise AssertionError("no rank exceeds infinity")
    return MemoryPrediction(tuple(found.lines), usable_bytes(workload), found.rank, found.by_rank)


def bytes_up_to(workload: Workload, limit: float) -> float:
    """The total of `predict_memory`, or, where that exceeds ``limit``, some number between the two.

    A search asks for most candidates only whether they fit. Ranks are added up cause by cause, no cause is negative, so
    the first sum above the limit is a proof that the total is.
    """
    found = _fullest_rank(workload, limit)
    return found if isinstance(found, float) else sum(line.bytes for line in found.lines)


def least_bytes(workload: Workload) -> float:
    """A bound of `predict_memory`: weights, gradients and optimizer states of the rank that holds most of these."""
    parallel = workload.parallel
    number, written = parallel.pp * parallel.vpp, written_stages(workload)
    stages = stages_of_shape(workload.model, number, written)
    held = _held(parallel.schedule, parallel.pp, parallel.vpp)
    degrees = (parallel.tp, parallel.ep, parallel.etp)
    states = 0.0
    for which in {tuple(stages.which[index] for index in rank) for rank in held}:
        weights = _weights_of(workload.model, number, written, which, degrees)
        states = max(states, sum(line.bytes for line in state_lines(workload, weights)))
    return states * (1 + FRAGMENTATION) + RUNTIME_BYTES


def _fullest_rank(workload: Workload, limit: float) -> _Fullest | float:
    """The fullest rank; or, as soon as one rank needs more than ``limit``, how much of its need is known then."""
    # Sums of the same numbers in another order differ in their last bits.
    limit, setting, ranks = limit * (1 + _ROUNDING), setting_of(workload), range(workload.parallel.pp)
    shapes: list[_RankShape] = []
    live: list[_Live] = []
    # Ranks with the same stages differ in what is alive, and in nothing else.
    states: dict[int, list[MemoryLine]] = {}
    for rank in ranks:
        shape = _rank_shape_of(workload, rank, setting)
        if id(shape) not in states:
            states[id(shape)] = state_lines(workload, shape.weights) + gathered_lines(workload, shape.weights)
        alive = _fullest_moment(workload, rank, shape.stage_bytes(workload))
        known = sum(line.bytes for line in states[id(shape)]) + alive.bytes
        if (least := known * (1 + FRAGMENTATION) + RUNTIME_BYTES) > limit:
            return least
        shapes.append(shape)
        live.append(alive)
    rest: dict[int, float] = {}
    found: dict[int, list[MemoryLine]] = {}
    totals = []
    for rank, (shape, alive) in enumerate(zip(shapes, live)):
        # Slots of graphs are those of the rank.
        if id(shape) not in rest or workload.run.kernels.graphs == "partial":
            found[rank] = _lines(workload, rank, shape, setting, states[id(shape)], alive.moment)
            rest[id(shape)] = sum(line.bytes for line in found[rank]) - alive.bytes * (1 + FRAGMENTATION)
        totals.append(rest[id(shape)] + alive.bytes * (1 + FRAGMENTATION))
        if totals[-1] > limit:
            return totals[-1]
    rank = max(ranks, key=totals.__getitem__)
    shape = shapes[rank]
    lines = found.get(rank) or _lines(workload, rank, shape, setting, states[id(shape)], live[rank].moment)
    return _Fullest(rank, lines, tuple(totals))


def memory_at(workload: Workload, pipeline_rank: int) -> MemoryPrediction:
    """The same for one pipeline rank."""
    setting = setting_of(workload)
    shape = _rank_shape_of(workload, pipeline_rank, setting)
    states = state_lines(workload, shape.weights) + gathered_lines(workload, shape.weights)
    alive = _fullest_moment(workload, pipeline_rank, shape.stage_bytes(workload))
    lines = _lines(workload, pipeline_rank, shape, setting, states, alive.moment)
    return MemoryPrediction(tuple(lines), usable_bytes(workload), pipeline_rank)


def usable_bytes(workload: Workload) -> float:
    return workload.cluster.gpu.memory_gb * LABEL_UNIT * USABLE_SHARE


def _lines(
    workload: Workload, rank: int, shape: _RankShape, setting: Setting, states: list[MemoryLine], moment: Moment
) -> list[MemoryLine]:
    """All of a rank. What it holds for the whole step and the moment with most activations are known already."""
    lines = [
        *states,
        *_activation_lines(workload, shape, setting, moment),
        *_graph_lines(workload, rank, shape, moment),
        *workspace_lines(workload, shape.stages, shape.weights, setting),
    ]
    lines += _ends_lines(workload, shape.weights, lines)
    holes = FRAGMENTATION * sum(line.bytes for line in lines)
    why = f"{FRAGMENTATION:.0%} of what is allocated lies between blocks"
    lines.append(MemoryLine("overhead", "allocator", holes, why))
    lines.append(MemoryLine("overhead", "runtime", RUNTIME_BYTES, "context, kernels and communication buffers"))
    return lines


def _ends_lines(workload: Workload, weights: RankWeights, lines: list[MemoryLine]) -> list[MemoryLine]:
    """moefold's FSDP sums gradients of embedding and head last: whole, and copied for the sum. By then activations are
    gone and layers are sharded again, so that only what exceeds those counts."""
    if not workload.is_own or workload.parallel.sharding != "fsdp" or workload_reshards_per_step(workload):
        return []
    if shards(workload)[0] == 1:
        return []
    whole = 2 * weights.ends * workload.gradient_bytes
    others = sum(line.bytes for line in lines if line.group in ("activations", "buffers"))
    if whole <= others:
        return []
    why = f"{weights.ends / 1e9:.3f}B parameters twice, after the last layer's backward"
    return [MemoryLine("buffers", "gradients of embedding and head", whole - others, why)]


# ---- who holds what ----


def _rank_shape_of(workload: Workload, rank: int, setting: Setting) -> _RankShape:
    parallel = workload.parallel
    number, written = parallel.pp * parallel.vpp, written_stages(workload)
    stages = stages_of_shape(workload.model, number, written)
    held = _held(parallel.schedule, parallel.pp, parallel.vpp)[rank]
    which = tuple(stages.which[index] for index in held)
    return _rank_shape(workload.model, number, written, which, setting, parallel.ep)


@lru_cache(maxsize=1024)
def _held(schedule: str, ranks: int, virtual: int) -> tuple[tuple[int, ...], ...]:
    """The stages of every rank."""
    holder = place(ranks, virtual, SCHEDULES[schedule].placement)
    return tuple(tuple(stage for stage, held in enumerate(holder) if held == rank) for rank in range(ranks))


@lru_cache(maxsize=50_000)
def _rank_shape(
    model: ModelShape,
    stages: int,
    written: str | None,
    which: tuple[int, ...],
    setting: Setting,
    ep: int,
) -> _RankShape:
    different = stages_of_shape(model, stages, written).different
    parts = {index: _stage_parts(model, different[index], setting) for index in set(which)}
    per_token = {index: sum(size for _, size, _ in stage) for index, stage in parts.items()}
    deferred = {
        index: sum(kept_by(one, model.dim, setting).deferred * count for one, _, count in stage if one is not None)
        for index, stage in parts.items()
    }
    return _RankShape(
        tuple(different[index] for index in which),
        _weights_of(model, stages, written, which, (setting.tp, ep, setting.etp)),
        *(tuple(each[index] for index in which) for each in (parts, per_token, deferred)),  # type: ignore[arg-type]
    )


@lru_cache(maxsize=10_000)
def _weights_of(
    model: ModelShape, stages: int, written: str | None, which: tuple[int, ...], degrees: tuple[int, int, int]
) -> RankWeights:
    different = stages_of_shape(model, stages, written).different
    return rank_weights(model, tuple(different[index] for index in which), degrees)


def _stage_parts(model: ModelShape, stage: StageContents, setting: Setting) -> tuple[_Part, ...]:
    found: list[_Part] = []
    for number, (layer, count) in enumerate(stage.layers):
        kept = kept_by(layer, model.dim, setting)
        # The last layer of all goes backward at once, so it sends nothing to the host.
        stays = kept.away * (stage.head and number == len(stage.layers) - 1)
        found.append((layer, count * kept.total + stays, count))
    if stage.mtp:
        ahead = model.mtp_layers[-1]
        found.append((ahead, stage.mtp * kept_by(ahead, model.dim, setting).total, stage.mtp))
        found.append((None, stage.mtp * around_module(model, setting), 0))
    if stage.head:
        found.append((None, around_head(model, setting), 0))
    return tuple(found)


# ---- what is alive ----


def _fullest_moment(workload: Workload, rank: int, sizes: tuple[float, ...]) -> _Live:
    parallel = workload.parallel
    best = _Live((), -1.0)
    for moment in moments(parallel.schedule, parallel.pp, parallel.vpp, workload.microbatches)[rank]:
        alive = sum(map(mul, moment, sizes))
        if alive > best.bytes:
            best = _Live(moment, alive)
    return best


def _activation_lines(workload: Workload, shape: _RankShape, setting: Setting, moment: Moment) -> list[MemoryLine]:
    """One line per kind of layer."""
    tokens = workload.context_tokens
    sizes: dict[Layer | None, float] = {}
    layers: dict[Layer | None, int] = {}
    for parts, live in zip(shape.parts, moment):
        for layer, size, count in parts:
            sizes[layer] = sizes.get(layer, 0.0) + live * size * tokens
            layers[layer] = layers.get(layer, 0) + live * count
    lines = _pair_lines(workload, shape, tokens) + _deferred_lines(shape, moment, tokens)
    lines += _clone_lines(workload, shape, moment)
    for layer, size in sizes.items():
        if layer is None:
            lines.append(MemoryLine("activations", "around the head", size, "norms and joined inputs"))
        elif size:
            why = _why_kept(workload, layer, layers[layer], moment, setting)
            lines.append(MemoryLine("activations", _name_of(layer), size, why))
    return lines


def _graph_lines(workload: Workload, rank: int, shape: _RankShape, moment: Moment) -> list[MemoryLine]:
    parallel, tokens = workload.parallel, workload.context_tokens
    every = moments(parallel.schedule, parallel.pp, parallel.vpp, workload.microbatches)[rank]
    return graph_lines(workload, shape.stages, [tokens * each for each in shape.token_bytes], moment, every)


def _deferred_lines(shape: _RankShape, moment: Moment, tokens: float) -> list[MemoryLine]:
    waiting = moment[len(shape.parts) :]
    size = tokens * sum(count * each for count, each in zip(waiting, shape.deferred_bytes))
    why = f"inputs and output gradients of matmuls, of {sum(waiting)} (stage, microbatch) pairs"
    return [MemoryLine("activations", "deferred weight gradients", size, why)] if size else []


def _clone_lines(workload: Workload, shape: _RankShape, moment: Moment) -> list[MemoryLine]:
    """All slots may have a clone, in each layer whose backward is to come."""
    each, layers = clone_bytes(workload.run), sum(map(mul, moment, shape.moe_layers))
    why = f"{layers} MoE layers of live microbatches, {format_bytes(each)} in the spare slots of each"
    return [MemoryLine("activations", "clones of hot experts", each * layers, why)] if each * layers else []


def _why_kept(workload: Workload, layer: Layer, layers: int, moment: Moment, setting: Setting) -> str:
    kept, tokens = kept_by(layer, workload.model.dim, setting), workload.context_tokens
    why = (
        f"{layers} layers of live microbatches (per stage {', '.join(map(str, moment[: workload.parallel.vpp]))}), "
        f"{tokens:,.0f} tokens of {kept.total:,.0f} bytes"
    )
    return f"{why}; {kept.again:,.0f} more are recomputed or wait in the host's memory" if kept.again else why


def _pair_lines(workload: Workload, shape: _RankShape, tokens: float) -> list[MemoryLine]:
    """Where a forward runs beside a backward, both have activations; the one fills faster than the other frees."""
    if not workload.ep_overlap or SCHEDULES[workload.parallel.schedule].overlaps:
        return []
    size = PAIR_SHARE * max(shape.token_bytes) * tokens
    why = f"{PAIR_SHARE:.0%} of one more microbatch"
    return [MemoryLine("activations", "a forward beside a backward", size, why)]


def _name_of(layer: Layer) -> str:
    mixer = type(layer.mixer).__name__.lower() if layer.mixer else ""
    feed = type(layer.feed).__name__.lower() if layer.feed else ""
    return " + ".join(filter(None, (mixer, feed))) + " layers"
