"""What the fullest rank holds at its fullest moment, cause by cause.

States stay all step long (`plan/states.py`). Activations pile up with the microbatches that the pipeline's order keeps
alive (`plan/live.py`), each with what its layers keep (`plan/activations.py`). On top comes what one passing moment
needs: either the loss with its logits, or the backward of one layer with its gradients and with what is computed again.
The larger of the two is counted. Pipeline ranks differ in all of this, so each is reckoned and the fullest reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moefold.plan.activations import kept_by
from moefold.plan.job import Job
from moefold.plan.live import Moment, moments
from moefold.plan.prediction import MemoryLine, MemoryPrediction
from moefold.plan.saved import Setting, setting_of
from moefold.plan.shape import Layer, ModelShape
from moefold.plan.stage_contents import Contents, stages_of_shape
from moefold.plan.states import RankWeights, gathered_lines, padded_vocab, rank_weights, state_lines
from moefold.plan.workspace import workspace_lines
from moefold.schedule.actions import place
from moefold.schedule.names import SCHEDULES

# Labels of cards count memory in units of 2**30, and the driver keeps a little of it.
LABEL_UNIT = 2**30
USABLE_SHARE = 0.985
# Holes between allocated blocks, as a share of all that is allocated (nine runs of one node: 3 to 8 %).
FRAGMENTATION = 0.04
# The runtime's own: context, kernels, buffers of communication libraries. Not seen by the allocator.
RUNTIME_BYTES = 2e9


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank: its stages, their activations per microbatch, and the moment at which most is alive."""

    stages: tuple[Contents, ...]
    weights: RankWeights
    stage_bytes: tuple[float, ...]
    moment: Moment

    @property
    def live_bytes(self) -> float:
        return sum(count * size for count, size in zip(self.moment, self.stage_bytes))


def predict_memory(job: Job) -> MemoryPrediction:
    """The fullest pipeline rank."""
    totals = tuple(sum(line.bytes for line in memory_lines(job, rank)) for rank in range(job.cuts.pp))
    fullest = max(range(job.cuts.pp), key=totals.__getitem__)
    return MemoryPrediction(tuple(memory_lines(job, fullest)), usable_bytes(job), fullest, totals)


def memory_at(job: Job, pipeline_rank: int) -> MemoryPrediction:
    """The same for one pipeline rank."""
    lines = tuple(memory_lines(job, pipeline_rank))
    return MemoryPrediction(lines, usable_bytes(job), pipeline_rank)


def usable_bytes(job: Job) -> float:
    return job.cluster.gpu.memory_gb * LABEL_UNIT * USABLE_SHARE


def memory_lines(job: Job, pipeline_rank: int) -> list[MemoryLine]:
    rank = rank_memory(job, pipeline_rank)
    lines = [
        *state_lines(job, rank.weights),
        *gathered_lines(job, rank.weights),
        *_activation_lines(job, rank),
        *workspace_lines(job, rank.stages, rank.weights),
    ]
    allocated = sum(line.bytes for line in lines)
    lines += [
        MemoryLine(
            "overhead",
            "allocator",
            FRAGMENTATION * allocated,
            f"{FRAGMENTATION:.0%} of what is allocated lies between blocks",
        ),
        MemoryLine("overhead", "runtime", RUNTIME_BYTES, "context, kernels and communication buffers"),
    ]
    return lines


def rank_memory(job: Job, pipeline_rank: int) -> RankMemory:
    cuts = job.cuts
    stages = _stages_of_rank(job, pipeline_rank)
    setting = setting_of(job)
    tokens = job.batch.tokens / cuts.cp
    per_stage = tuple(tokens * _stage_bytes(job.model, stage, setting) for stage in stages)
    weights = rank_weights(job.model, stages, (cuts.tp, cuts.ep, cuts.etp))
    return RankMemory(stages, weights, per_stage, _fullest_moment(job, pipeline_rank, per_stage))


def _stages_of_rank(job: Job, pipeline_rank: int) -> tuple[Contents, ...]:
    cuts = job.cuts
    stages = stages_of_shape(job.model, cuts.pp * cuts.vpp, cuts.stages)
    return tuple(stages.different[stages.which[index]] for index in _held(cuts.schedule, cuts.pp, cuts.vpp)[pipeline_rank])


@lru_cache(maxsize=1024)
def _held(schedule: str, ranks: int, virtual: int) -> tuple[tuple[int, ...], ...]:
    """The stages of every rank."""
    holder = place(ranks, virtual, SCHEDULES[schedule].placement)
    return tuple(tuple(stage for stage, held in enumerate(holder) if held == rank) for rank in range(ranks))


def _fullest_moment(job: Job, pipeline_rank: int, per_stage: tuple[float, ...]) -> Moment:
    cuts = job.cuts
    # Programs that run one microbatch's exchange beside another's work warm up with one more.
    extra = int(job.options.ep_overlap and cuts.schedule in ("1f1b", "interleaved"))
    candidates = moments(cuts.schedule, cuts.pp, cuts.vpp, job.batch.microbatches, extra)[pipeline_rank]
    return max(candidates, key=lambda moment: sum(count * size for count, size in zip(moment, per_stage)))


@lru_cache(maxsize=50_000)
def _stage_bytes(model: ModelShape, stage: Contents, setting: Setting) -> float:
    """Per token of one microbatch."""
    return sum(size for _, size, _ in stage_parts(model, stage, setting))


@lru_cache(maxsize=50_000)
def stage_parts(model: ModelShape, stage: Contents, setting: Setting) -> tuple[tuple[Layer | None, float, int], ...]:
    """(kind of layer, bytes per token of all of them, how many); the pipeline's end has no layer."""
    found: list[tuple[Layer | None, float, int]] = []
    for layer, count in stage.layers:
        found.append((layer, count * kept_by(layer, model.width, setting).total, count))
    if stage.mtp:
        ahead = model.layers[-1]
        found.append((ahead, stage.mtp * kept_by(ahead, model.width, setting).total, stage.mtp))
        found.append((None, stage.mtp * _end_bytes(model, setting, 5), 0))
    if stage.head:
        found.append((None, _end_bytes(model, setting, 2), 0))
    return tuple(found)


def _end_bytes(model: ModelShape, setting: Setting, tensors: int) -> float:
    """Around the head: a norm's input and output. A module ahead also has two more normed, joined to one."""
    tokens = 1 / setting.tp if "sequence_parallel" in setting.on else 1.0
    return tensors * model.width * tokens * (4.0 if setting.format == "float32" else 2.0)


def _activation_lines(job: Job, rank: RankMemory) -> list[MemoryLine]:
    """One line per kind of layer, with what recomputation and offloading took off it."""
    setting, tokens = setting_of(job), job.batch.tokens / job.cuts.cp
    sizes: dict[Layer | None, float] = {}
    layers: dict[Layer | None, int] = {}
    for stage, live in zip(rank.stages, rank.moment):
        for layer, size, count in stage_parts(job.model, stage, setting):
            sizes[layer] = sizes.get(layer, 0.0) + live * size * tokens
            layers[layer] = layers.get(layer, 0) + live * count
    lines = []
    for layer, size in sizes.items():
        if layer is None:
            lines.append(MemoryLine("activations", "around the head", size, "norms and joined inputs"))
            continue
        kept = kept_by(layer, job.model.width, setting)
        why = (
            f"{layers[layer]} layers of live microbatches (per stage {', '.join(map(str, rank.moment))}), "
            f"{tokens:,.0f} tokens of {kept.total:,.0f} bytes"
        )
        lines.append(MemoryLine("activations", _name_of(layer), size, why))
    return lines


def _name_of(layer: Layer) -> str:
    mixer = type(layer.mixer).__name__.lower() if layer.mixer else ""
    feed = type(layer.feed).__name__.lower() if layer.feed else ""
    return " + ".join(filter(None, (mixer, feed))) + " layers"
