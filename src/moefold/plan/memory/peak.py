"""Peak memory of the fullest rank, cause by cause.

States exist for the whole step (`plan/memory/states.py`). Activations accumulate with the microbatches in flight, each
with what its layers save (`plan/memory/layer_activations.py`). Temporary memory comes on top
(`plan/memory/workspace.py`): either the loss with its logits, or the backward of one layer with its gradients and what
is recomputed. Pipeline ranks differ in all of this, so each is computed and the fullest reported.

**In flight.** A rank keeps the activations of a (stage, microbatch) from its forward until its backward is done. The
order says how many those are, and of which stages: with several virtual stages per rank more microbatches of the early
stages are in flight than of the late ones, and stages differ in size. So the result for a rank is a list of
**moments**: how many microbatches of each of its stages it holds, at every time that is not dominated by another. Where
a schedule splits backwards, those whose input gradient is done and whose weight gradients wait are counted apart,
behind the others: they hold inputs and output gradients of matmuls, and nothing else.

Walking an order is exact for every schedule. 1F1B and its interleaved form, which a search asks for by the thousand,
have a closed form: ranks forward `warm_up` times and then alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from moefold.blueprint.model_shape import Layer, ModelShape
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
from moefold.schedule.actions import Action, Kind, place
from moefold.schedule.names import SCHEDULES
from moefold.topology.folded_layout import shard_sizes

# Microbatches held of each of the rank's stages, in the model's order; then, of each, those with deferred gradients.
Moment = tuple[int, ...]
# Orders are periodic once the pipeline is full, so longer ones hold no more.
_ENOUGH_ROUNDS = 3


@lru_cache(maxsize=4096)
def moments(
    schedule: str, ranks: int, virtual: int, microbatches: int, extra: int = 0
) -> tuple[tuple[Moment, ...], ...]:
    """The fullest moments of every rank. ``extra`` forwards are added to each warm-up of 1F1B or interleaved."""
    if schedule in ("1f1b", "interleaved"):
        microbatches = _enough(ranks, ranks, microbatches)
        hops = 1 if schedule == "1f1b" and virtual == 1 else 2
        return tuple(
            _fullest(_alternating(hops * (ranks - 1 - rank) + extra, ranks, virtual, microbatches), virtual)
            for rank in range(ranks)
        )
    if schedule != "gpipe":
        microbatches = _enough(ranks * virtual, ranks, microbatches)
    order = SCHEDULES[schedule].build(ranks, virtual, microbatches)
    counts = 2 * virtual if SCHEDULES[schedule].splits_backward else virtual
    return tuple(
        _fullest(_changes(actions, order.stages_of(rank)), counts) for rank, actions in enumerate(order.actions)
    )


def _enough(stages: int, ranks: int, microbatches: int) -> int:
    """Fewer microbatches with the same moments. Uneven rounds differ all along the order: those keep all of them."""
    return min(microbatches, _ENOUGH_ROUNDS * stages) if microbatches % ranks == 0 else microbatches


def _changes(actions: Iterable[Action], stages: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(which count, +1 or -1) in the order's own sequence.

    The two of a pair run layer by layer in turn, the backward first, so that one frees what the other fills.
    """
    for action in actions:
        for part in action.parts:
            if part.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                yield stages.index(part.stage), -1
            if part.kind is Kind.BACKWARD_INPUT:
                yield len(stages) + stages.index(part.stage), 1
            if part.kind is Kind.BACKWARD_WEIGHT:
                yield len(stages) + stages.index(part.stage), -1
        for part in action.parts:
            if part.kind is Kind.FORWARD:
                yield stages.index(part.stage), 1


def _alternating(ahead: int, ranks: int, virtual: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """The same for 1F1B and interleaved: `ahead` forwards more than all laps but the last, then one by one by turns."""
    rounds = shard_sizes(microbatches, max(1, microbatches // ranks))
    warm_up = rounds[0] * (virtual - 1) + ahead
    forwards = [lap for size in rounds for lap in range(virtual) for _ in range(size)]
    backwards = [lap for size in rounds for lap in reversed(range(virtual)) for _ in range(size)]
    warm_up = min(warm_up, len(forwards))
    yield from ((lap, 1) for lap in forwards[:warm_up])
    steady = len(forwards) - warm_up
    for forth, back in zip(forwards[warm_up:], backwards):
        yield forth, 1
        yield back, -1
    yield from ((lap, -1) for lap in backwards[steady:])


def _fullest(changes: Iterable[tuple[int, int]], counts: int) -> tuple[Moment, ...]:
    """Moments that no other moment matches or exceeds in every stage."""
    held = [0] * counts
    seen: set[Moment] = set()
    grew = False
    for which, change in changes:
        if grew and change < 0:
            seen.add(tuple(held))
        grew = change > 0
        held[which] += change
    if grew:
        seen.add(tuple(held))
    # Only a larger total can outdo a moment; in 1F1B nearly all have the same.
    most = max(map(sum, seen), default=0)
    full = [one for one in seen if sum(one) == most]
    for one in sorted(seen.difference(full), key=sum, reverse=True):
        if not any(all(mine <= theirs for mine, theirs in zip(one, other)) for other in full):
            full.append(one)
    return tuple(sorted(full, reverse=True))


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

# A kind of layer, bytes per token of all such layers, how many; no layer stands for the pipeline's end.
_Part = tuple[Layer | None, float, int]


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

    def stage_bytes(self, tokens: float) -> tuple[float, ...]:
        """Per stage, and then per stage what its deferred weight gradients hold."""
        return tuple(tokens * each for each in (*self.token_bytes, *self.deferred_bytes))


def predict_memory(workload: Workload) -> MemoryPrediction:
    """The fullest pipeline rank."""
    setting, tokens = setting_of(workload), workload.context_tokens
    shapes = [_rank_shape_of(workload, rank, setting) for rank in range(workload.parallel.pp)]
    live = [_fullest_moment(workload, rank, shape.stage_bytes(tokens))[1] for rank, shape in enumerate(shapes)]
    # Ranks with the same stages differ in what is alive, and in nothing else.
    rest: dict[int, float] = {}
    found: dict[int, list[MemoryLine]] = {}
    totals = []
    for rank, shape in enumerate(shapes):
        if id(shape) not in rest:
            found[rank] = _lines(workload, rank, shape, setting)
            rest[id(shape)] = sum(line.bytes for line in found[rank]) - live[rank] * (1 + FRAGMENTATION)
        totals.append(rest[id(shape)] + live[rank] * (1 + FRAGMENTATION))
    fullest = max(range(workload.parallel.pp), key=totals.__getitem__)
    lines = found[fullest] if fullest in found else _lines(workload, fullest, shapes[fullest], setting)
    return MemoryPrediction(tuple(lines), usable_bytes(workload), fullest, tuple(totals))


def memory_at(workload: Workload, pipeline_rank: int) -> MemoryPrediction:
    """The same for one pipeline rank."""
    setting = setting_of(workload)
    lines = _lines(workload, pipeline_rank, _rank_shape_of(workload, pipeline_rank, setting), setting)
    return MemoryPrediction(tuple(lines), usable_bytes(workload), pipeline_rank)


def usable_bytes(workload: Workload) -> float:
    return workload.cluster.gpu.memory_gb * LABEL_UNIT * USABLE_SHARE


def _lines(workload: Workload, rank: int, shape: _RankShape, setting: Setting) -> list[MemoryLine]:
    lines = [
        *state_lines(workload, shape.weights),
        *gathered_lines(workload, shape.weights),
        *_activation_lines(workload, rank, shape, setting),
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
    contents = tuple(different[index] for index in which)
    parts = tuple(_stage_parts(model, stage, setting) for stage in contents)
    weights = rank_weights(model, contents, (setting.tp, ep, setting.etp))
    per_token = tuple(sum(size for _, size, _ in stage) for stage in parts)
    deferred = tuple(
        sum(kept_by(layer, model.dim, setting).deferred * count for layer, _, count in stage if layer is not None)
        for stage in parts
    )
    return _RankShape(contents, weights, parts, per_token, deferred)


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


def _fullest_moment(workload: Workload, rank: int, sizes: tuple[float, ...]) -> tuple[Moment, float]:
    """And the bytes that are alive then."""
    parallel = workload.parallel
    best: tuple[Moment, float] = ((), -1.0)
    for moment in moments(parallel.schedule, parallel.pp, parallel.vpp, workload.microbatches)[rank]:
        alive = sum([count * size for count, size in zip(moment, sizes)])
        if alive > best[1]:
            best = moment, alive
    return best


def _activation_lines(workload: Workload, rank: int, shape: _RankShape, setting: Setting) -> list[MemoryLine]:
    """One line per kind of layer."""
    tokens = workload.context_tokens
    moment, _ = _fullest_moment(workload, rank, shape.stage_bytes(tokens))
    sizes: dict[Layer | None, float] = {}
    layers: dict[Layer | None, int] = {}
    for parts, live in zip(shape.parts, moment):
        for layer, size, count in parts:
            sizes[layer] = sizes.get(layer, 0.0) + live * size * tokens
            layers[layer] = layers.get(layer, 0) + live * count
    lines = _pair_lines(workload, shape, tokens) + _deferred_lines(shape, moment, tokens)
    for layer, size in sizes.items():
        if layer is None:
            lines.append(MemoryLine("activations", "around the head", size, "norms and joined inputs"))
        elif size:
            why = _why_kept(workload, layer, layers[layer], moment, setting)
            lines.append(MemoryLine("activations", _name_of(layer), size, why))
    return lines


def _deferred_lines(shape: _RankShape, moment: Moment, tokens: float) -> list[MemoryLine]:
    waiting = moment[len(shape.parts) :]
    size = tokens * sum(count * each for count, each in zip(waiting, shape.deferred_bytes))
    why = f"inputs and output gradients of matmuls, of {sum(waiting)} (stage, microbatch) pairs"
    return [MemoryLine("activations", "deferred weight gradients", size, why)] if size else []


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
