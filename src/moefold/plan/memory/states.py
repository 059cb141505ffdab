"""What a rank holds for the whole step: weights, gradients, optimizer states, and copies of weights.

Tensor parallelism shards dense matrices, expert parallelism distributes experts, expert-tensor parallelism shards each.
What is left is replicated: dense matrices on dp * cp ranks, experts on edp. Data-parallel sharding cuts some of it:

    mode     weights   gradients   optimizer states
    none     whole     whole       whole
    zero1    whole     whole       sharded
    zero2    whole     sharded     sharded
    fsdp     sharded   sharded     sharded, and weights of a few layers are unsharded while they are used
    flat     whole     whole       sharded: moefold's zero1, whose weights are in the format in which they are gathered;
                                   main weights in the format of the parameters are sharded beside the moments
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from moefold.blueprint.lora_adapters import is_adapter
from moefold.blueprint.model_shape import Layer, ModelShape, MoE
from moefold.blueprint.narrow_bytes import matmul_bits, weight_copy_bytes
from moefold.blueprint.param_counts import LayerCounts, layer_counts
from moefold.blueprint.parameters import join_parameter, parameters
from moefold.blueprint.sharding import cuts
from moefold.config.model import ModelConfig
from moefold.config.precision import BYTES
from moefold.plan.prediction import MemoryLine
from moefold.plan.stage_contents import StageContents
from moefold.plan.workload import Workload
from moefold.schedule.names import reshard_per_step
from moefold.units import format_bytes

# Vocabularies are padded to a multiple of this times the tensor-parallel size.
VOCAB_MULTIPLE = 128
GRADIENT_WHOLE = ("none", "zero1", "flat")


@dataclass(frozen=True)
class RankWeights:
    """Parameters of one pipeline rank after tp, ep, etp: those that dp * cp ranks share, and those that edp share."""

    dense: float
    experts: float
    # Of them, those that have narrow copies in FP8: matrices inside layers.
    in_layers: float
    # The largest layer, which sharding gathers, and the experts in it; embedding and head, which are gathered apart.
    layer: float
    layer_experts: float
    ends: float
    # One of each different matrix, whose gradients have a buffer of their own.
    different: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


def rank_weights(model: ModelShape, stages: tuple[StageContents, ...], degrees: tuple[int, int, int]) -> RankWeights:
    """``stages``: what the rank holds; ``degrees``: tp, ep and etp."""
    tp, ep, etp = degrees
    dense = experts = different = 0.0
    largest = (0.0, 0.0)
    kinds: dict[Layer, int] = {}
    for stage in stages:
        for layer, count in stage.layers:
            kinds[layer] = kinds.get(layer, 0) + count
        if stage.mtp:
            ahead = model.mtp_layers[-1]
            kinds[ahead] = kinds.get(ahead, 0) + stage.mtp
            dense += stage.mtp * join_parameter("", model.dim).size / tp
    for layer, count in kinds.items():
        held = layer_counts(layer, model.dim)
        local = held.on_rank(tp, ep, etp)
        dense += count * local[0]
        experts += count * local[1]
        largest = max(largest, (sum(local), local[1]))
        different += local[0] + _one_expert(layer, held) / etp
    inside = dense + experts
    ends = _ends(model, stages) * padded_vocab(model.vocab, tp) * model.dim / tp
    return RankWeights(dense + ends, experts, inside, *largest, ends, different)


def padded_vocab(vocab: int, tp: int) -> int:
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def _ends(model: ModelShape, stages: tuple[StageContents, ...]) -> int:
    """How many matrices of vocabulary by dim: the embedding, the head, and the copy that MTP modules read."""
    embedding = any(stage.embedding for stage in stages)
    head = any(stage.head for stage in stages)
    looks_up = embedding or any(stage.mtp for stage in stages)
    return 1 if model.tied and (looks_up or head) else looks_up + head


def _one_expert(layer: Layer, held: LayerCounts) -> float:
    return held.experts / layer.feed.experts if isinstance(layer.feed, MoE) else 0.0


def shards(workload: Workload) -> tuple[int, int]:
    """Over how many ranks dense parameters are cut, and experts."""
    replicas, edp = workload.parallel.dp_replicate, workload.edp
    dense = max(1, workload.dp * workload.parallel.cp // replicas)
    return dense, max(1, edp // replicas if edp > 1 else 1)


def state_lines(workload: Workload, held: RankWeights) -> list[MemoryLine]:
    """Weights, gradients and optimizer states of one pipeline rank."""
    mode = workload.parallel.sharding
    dense, experts = shards(workload)
    cut = held.dense / dense + held.experts / experts
    say = _Words(held, cut, dense, experts)
    weights = cut if mode == "fsdp" else held.total
    # Where weights are gathered once for all microbatches, gradients are whole until the last.
    gradients = held.total if mode in GRADIENT_WHOLE or workload_reshards_per_step(workload) else cut
    if mode == "fsdp" and workload.is_own and workload.microbatches == 1 and not workload_reshards_per_step(workload):
        # The only microbatch's activations go as gradients come.
        gradients = 0.0
    states = held.total if mode == "none" else cut
    lines = [
        MemoryLine("weights", "weights", weights * workload.weight_bytes, say.why(weights, workload.weight_bytes)),
        MemoryLine(
            "gradients", "gradients", gradients * workload.gradient_bytes, say.why(gradients, workload.gradient_bytes)
        ),
    ]
    if each := workload.device_master_bytes:
        lines.append(MemoryLine("optimizer", "main weights", states * each, say.why(states, each)))
    if workload.run.memory.optimizer == "device":
        size = states * workload.moments_bytes
        why = say.why(states, workload.moments_bytes)
        if workload.run.optim.algorithm == "muon":
            # Hidden matrices have a momentum and no second moment; embedding and head are AdamW's.
            size -= (states - held.ends / dense) * workload.moment_bytes
            why = f"{say.why(states, workload.moment_bytes)}; embedding and head twice"
        lines.append(MemoryLine("optimizer", "moments", size, why))
    return lines + adapter_lines(workload) + _narrow_copies(workload, held, cut)


def adapter_lines(workload: Workload) -> list[MemoryLine]:
    """Of `model.lora`: weights, gradients and states of adapters, which stages are taken to share evenly."""
    run, parallel = workload.run, workload.parallel
    if run.model.lora is None:
        return []
    each = float(BYTES[run.precision.params])
    kept = each * 2 + 2 * BYTES[run.precision.moments or run.precision.params]
    count = adapters_on_rank(run.model, parallel.tp, parallel.ep, parallel.etp) / parallel.pp
    why = f"{count / 1e6:.2f}M parameters of adapters, {kept:g} bytes each with gradient and moments"
    return [MemoryLine("optimizer", "adapters", count * kept, why)]


@lru_cache(maxsize=256)
def adapters_on_rank(model: ModelConfig, tp: int, ep: int, etp: int) -> float:
    """Elements of all layers' adapters, as tensor and expert parallelism cut them."""
    ways = {"tp": tp, "ep": ep, "etp": etp}
    return sum(
        spec.size / prod(ways[cut.axis] for cut in cuts(spec)) for spec in parameters(model) if is_adapter(spec.name)
    )


@dataclass(frozen=True)
class _Words:
    held: RankWeights
    cut: float
    dense: int
    experts: int

    def why(self, parameters: float, each: float) -> str:
        held = self.held
        if parameters == held.total:
            what = f"{held.dense / 1e9:.3f}B dense and {held.experts / 1e9:.3f}B expert parameters of this rank"
        else:
            what = (
                f"{held.dense / 1e9:.3f}B dense over {self.dense} ranks and {held.experts / 1e9:.3f}B expert "
                f"parameters over {self.experts}"
            )
        return f"{what}, {each:g} bytes each"


def _narrow_copies(workload: Workload, held: RankWeights, cut: float) -> list[MemoryLine]:
    """FP8 copies that live for the whole step, so that every microbatch reads the same."""
    bits = matmul_bits(workload.casts)
    if workload.framework.name != "megatron" or workload.casts is None or bits == 16:
        return []
    # Hopper's matmuls, and Blackwell's of four bits, read one order of elements alone.
    one_order = workload.cluster.gpu.architecture == "sm90" or bits == 4
    copies = weight_copy_bytes(workload.casts, one_order) - (1.0 if workload.weight_bytes == 1.0 else 0.0)
    if copies <= 0 or workload.parallel.sharding == "fsdp":
        return []
    why = f"{held.in_layers / 1e9:.3f}B parameters of matrices, {copies:g} bytes each beside the weights"
    return [MemoryLine("weights", f"{workload.format} copies", held.in_layers * copies, why)]


def workload_reshards_per_step(workload: Workload) -> bool:
    """moefold's rule; others run overlapped and deferred passes inside of modules, where FSDP's hooks fire."""
    parallel = workload.parallel
    own = workload.is_own
    return (own or parallel.sharding == "fsdp") and reshard_per_step(
        parallel.pp * parallel.vpp,
        overlaps=own and (workload.ep_overlap or parallel.exchange_chunks > 1),
        splits_backward=own and workload.delay_wgrad,
    )


def gathered_lines(workload: Workload, held: RankWeights) -> list[MemoryLine]:
    """fsdp: weights that are whole while they are used."""
    over = shards(workload)
    if workload.parallel.sharding != "fsdp" or max(over) == 1:
        return []
    if workload.is_own:
        return _gathered_by_moefold(workload, held, over)
    word = workload.word
    if workload_reshards_per_step(workload):
        why = f"{held.total / 1e9:.3f}B parameters, whole for the step, {word:g} bytes each"
        return [MemoryLine("buffers", "gathered weights", held.total * word, why)]
    two = 2 * held.layer * word
    lines = [
        MemoryLine("buffers", "gathered weights", two, f"this layer and the next whole, {format_bytes(two / 2)} each"),
    ]
    if held.ends:
        why = f"{held.ends / 1e9:.3f}B parameters, {word:g} bytes each"
        lines.append(MemoryLine("buffers", "gathered embedding and head", held.ends * word, why))
    return lines


def _gathered_by_moefold(workload: Workload, held: RankWeights, over: tuple[int, int]) -> list[MemoryLine]:
    """As they are sent, and only what has other holders: the step's in a pipeline, else one layer."""
    dense, experts = (
        (held.dense, held.experts)
        if workload_reshards_per_step(workload)
        else (held.layer - held.layer_experts, held.layer_experts)
    )
    if not workload_reshards_per_step(workload):
        dense += held.ends
    size = dense * (over[0] > 1) + experts * (over[1] > 1)
    until = "for the step" if workload_reshards_per_step(workload) else "embedding, head and one layer"
    why = f"{size / 1e9:.3f}B parameters whole, {until}, {workload.gather_bytes:g} bytes each"
    return [MemoryLine("buffers", "gathered weights", size * workload.gather_bytes, why)]


def under_way_lines(workload: Workload, held: RankWeights) -> list[MemoryLine]:
    """fsdp: gradients of the layer that just went backward, as computed and as summed."""
    if workload.parallel.sharding != "fsdp" or max(shards(workload)) == 1 or workload_reshards_per_step(workload):
        return []
    word = workload.word
    why = f"one layer of {held.layer / 1e9:.3f}B parameters, as computed and as summed"
    return [MemoryLine("buffers", "gradients under way", held.layer * (word + workload.gradient_bytes), why)]
