"""Temporary memory of moefold's own step, beside states and saved activations. Tested against the dry run.

**Casts.** Parameters are kept in one format and used in another; a matmul keeps the cast it used until its backward,
so each live microbatch has its own. Orders that defer weight gradients keep the parameter itself instead.

**Loss.** Logits exist one chunk of the vocabulary at a time; the head's gradient is whole.

**Backward of a layer.** The peak is at the experts' first matrix: its gradient, and the gradient of its output.
"""

from __future__ import annotations

from moefold.blueprint.matmuls import layer_matmuls
from moefold.blueprint.model_shape import Dense, Layer, ModelShape, MoE
from moefold.blueprint.param_counts import layer_counts
from moefold.blueprint.parameters import join_parameter
from moefold.plan.memory.saved_activations import Setting
from moefold.plan.memory.states import RankWeights, workload_reshards_per_step
from moefold.plan.prediction import MemoryLine
from moefold.plan.stage_contents import StageContents
from moefold.plan.workload import Workload

# Rows of the vocabulary per chunk of logits, as in `nn/vocab.py`.
CHUNK = 8192


def copies_weights(workload: Workload) -> bool:
    """Whether matmuls keep casts of their weights."""
    options = workload.options
    narrow = workload.dtypes.format != "float32" and workload.dtypes.weight_bytes > 2
    return options.framework == "moefold" and narrow and not (options.ep_overlap or options.delay_wgrad)


def stage_copies(model: ModelShape, stage: StageContents, setting: Setting, ep: int) -> float:
    """Bytes of casts that one microbatch of a stage keeps."""
    size = sum(count * _layer_copies(layer, model.dim, setting, ep) for layer, count in stage.layers)
    if stage.mtp:
        ahead = _layer_copies(model.mtp_layers[-1], model.dim, setting, ep)
        size += stage.mtp * (ahead + join_parameter("", model.dim).size)
    return size * setting.word


def _layer_copies(layer: Layer, dim: int, setting: Setting, ep: int) -> float:
    """Elements, after all cuts. A phase that is recomputed casts again; the router needs no cast."""
    mixer, feed = layer_counts(Layer(layer.mixer, None), dim), layer_counts(Layer(None, layer.feed), dim)
    found = 0.0
    if "attention" not in setting.recompute:
        found += mixer.sharded / setting.tp + mixer.replicated
    if isinstance(layer.feed, Dense) and "feed_forward" not in setting.recompute:
        found += feed.sharded / setting.tp
    if isinstance(layer.feed, MoE):
        latents = [row for row in layer_matmuls(layer, dim) if row.part == "routed" and not row.experts]
        found += sum(row.inner * row.outer for row in latents)
        if "experts" not in setting.recompute:
            found += feed.sharded / setting.tp + feed.experts / (ep * setting.etp)
    return found


def own_workspace(workload: Workload, stages: tuple[StageContents, ...], held: RankWeights) -> list[MemoryLine]:
    """The larger of the two moments."""
    loss, layer = _loss(workload, stages), _layer(workload, stages, held)
    return max(loss, layer, key=lambda some: sum(line.bytes for line in some))


def _head_gradient(workload: Workload, stages: tuple[StageContents, ...]) -> float:
    """One per loss; of several, their sum too."""
    if not any(stage.head for stage in stages):
        return 0.0
    several = 1 if workload.model.mtp == 0 else workload.model.mtp + 2
    return several * workload.model.vocab / workload.degrees.tp * workload.model.dim * workload.dtypes.gradient_bytes


def _loss(workload: Workload, stages: tuple[StageContents, ...]) -> list[MemoryLine]:
    gradient = _head_gradient(workload, stages)
    if not gradient:
        return []
    tokens, dim = workload.batch.tokens / workload.degrees.cp, workload.model.dim
    rows = min(CHUNK, workload.model.vocab / workload.degrees.tp)
    # Wide, beside the product that they were or the gradient that they become.
    each = 6.0 if workload.dtypes.format != "float32" else 4.0
    chunk = tokens * rows * each + tokens * dim * 6.0 + rows * dim * 2.0
    return [
        MemoryLine("buffers", "the head's weight gradient", gradient, "of all of this rank's vocabulary rows"),
        MemoryLine(
            "buffers",
            "one chunk of logits",
            chunk,
            f"{tokens:,.0f} tokens of {rows:,.0f} logits, {each:.0f} bytes each",
        ),
    ]


def _layer(workload: Workload, stages: tuple[StageContents, ...], held: RankWeights) -> list[MemoryLine]:
    widest = max((_inside(workload, layer) for stage in stages for layer, _ in stage.layers), default=(0.0, 0.0))
    rows, weights = widest
    word = 2.0 if workload.dtypes.format != "float32" else 4.0
    per_weight = word if workload_reshards_per_step(workload) else word + workload.dtypes.gradient_bytes
    lines = [
        MemoryLine("buffers", "gradients inside a layer", rows, "of an activation, before and after"),
        MemoryLine(
            "buffers", "gradient of one weight", weights * per_weight, f"{weights / 1e9:.3f}B elements of the largest"
        ),
    ]
    if not workload_reshards_per_step(workload) and (head := _head_gradient(workload, stages)):
        lines.append(MemoryLine("buffers", "the head's weight gradient", head, "until embedding and head are summed"))
    return lines


def _inside(workload: Workload, layer: Layer) -> tuple[float, float]:
    """Bytes of gradients of rows, and elements of the largest weight."""
    degrees, feed, tokens = workload.degrees, layer.feed, workload.batch.tokens / workload.degrees.cp
    word = 2.0 if workload.dtypes.format != "float32" else 4.0
    if isinstance(feed, MoE):
        rows = tokens / degrees.tp * feed.top_k * workload.options.imbalance
        inner = rows * feed.dim * (2 * word + 4.0 + word)
        weight = feed.experts / degrees.ep * 2 * feed.dim * (feed.latent or workload.model.dim) / degrees.etp
        return inner, weight
    if isinstance(feed, Dense):
        return tokens * feed.dim / degrees.tp * 4 * word, 2 * feed.dim * workload.model.dim / degrees.tp
    return 0.0, 0.0
