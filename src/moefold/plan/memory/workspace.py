"""Temporary memory on top of states and saved activations.

Two moments are candidates for the peak, and the larger counts. The **loss** has the logits, the head's weight gradient
before it is accumulated, and the last hidden states in several forms. The **backward of a layer** has the gradients
inside of it and what was recomputed or brought back from the host. Frameworks also keep buffers of their own:
Transformer Engine passes autograd one unused gradient per shape of matrix, because the real one is already accumulated.

moefold's own step has rows of its own, which a test compares with the dry run:

casts     matmuls keep the parameter itself and cast it again in backward: no cast outlives its matmul
loss      logits exist one chunk of the vocabulary at a time; the head's gradient is whole
a layer   the peak is at the experts' first matrix: its gradient, and the gradient of its output
"""

from __future__ import annotations

from collections.abc import Iterable

from moefold.blueprint.model_shape import Dense, Layer, MoE
from moefold.plan.memory.layer_activations import kept_by
from moefold.plan.memory.saved_activations import Setting
from moefold.plan.memory.states import RankWeights, padded_vocab, under_way_lines, workload_reshards_per_step
from moefold.plan.prediction import MemoryLine
from moefold.plan.stage_contents import StageContents
from moefold.plan.workload import Workload

# Bytes per logit while the loss is differentiated. Fused: logits are overwritten by their gradient; compiled: both
# exist. Else Megatron has the logits, the probabilities in float32 and the gradient; plain PyTorch has float32
# log-probabilities, their gradient and the logits' gradient in float32 beside the logits.
FUSED_LOSS, COMPILED_LOSS, MEGATRON_LOSS, PLAIN_LOSS = 2.0, 4.0, 8.0, 14.0
# Hidden states of all tensor-parallel ranks' tokens around the head: normed, gathered, their gradients.
HIDDEN_AT_LOSS = 6
# Rows of the vocabulary per chunk of logits, as in `nn/vocab.py`.
CHUNK = 8192


def workspace_lines(
    workload: Workload, stages: tuple[StageContents, ...], held: RankWeights, setting: Setting
) -> list[MemoryLine]:
    """Buffers, and the larger of the two moments."""
    if workload.is_own:
        return own_workspace(workload, stages, setting)
    lines = _unused_gradients(workload, held) + _answer_lines(workload, stages)
    loss = _loss_lines(workload, stages)
    layer = _layer_lines(workload, stages, setting) + under_way_lines(workload, held)
    return lines + max(loss, layer, key=lambda some: sum(line.bytes for line in some))


def _unused_gradients(workload: Workload, held: RankWeights) -> list[MemoryLine]:
    if workload.framework.name != "megatron" or workload.parallel.sharding == "fsdp":
        return []
    why = f"one gradient per shape of matrix, {held.different / 1e9:.3f}B elements of 2 bytes"
    return [MemoryLine("buffers", "gradients for autograd", held.different * 2.0, why)]


def _loss_lines(workload: Workload, stages: tuple[StageContents, ...]) -> list[MemoryLine]:
    if not any(stage.head for stage in stages):
        return []
    model, tp, tokens = workload.model, workload.parallel.tp, workload.context_tokens
    vocab = padded_vocab(model.vocab, tp) / tp
    heads = 1 + sum(stage.mtp for stage in stages)
    each = loss_bytes(workload)
    word = workload.word
    logits = tokens * vocab * (each + FUSED_LOSS * (heads - 1))
    hidden = HIDDEN_AT_LOSS * tokens * model.dim * word
    return [
        MemoryLine(
            "buffers", "logits and loss", logits, f"{tokens:,.0f} tokens of {vocab:,.0f} logits, {each:g} bytes each"
        ),
        MemoryLine(
            "buffers", "hidden states at the head", hidden, f"{HIDDEN_AT_LOSS} times {tokens:,.0f} x {model.dim}"
        ),
        MemoryLine(
            "buffers",
            "the head's weight gradient",
            vocab * model.dim * word,
            f"{vocab:,.0f} x {model.dim}, before it is added up",
        ),
    ]


def loss_bytes(workload: Workload) -> float:
    """Bytes per logit at the most."""
    megatron = workload.framework.name in ("megatron", "deepspeed")
    if workload.framework.fused_loss:
        return FUSED_LOSS if megatron else COMPILED_LOSS
    return MEGATRON_LOSS if megatron else PLAIN_LOSS


def _layer_lines(workload: Workload, stages: tuple[StageContents, ...], setting: Setting) -> list[MemoryLine]:
    tokens = workload.context_tokens
    kinds = {layer for stage in stages for layer, _ in stage.layers}
    if not kinds:
        return []
    kept = max(
        (kept_by(layer, workload.model.dim, setting) for layer in kinds), key=lambda one: one.again + one.backward
    )
    lines = [
        MemoryLine(
            "buffers",
            "gradients inside a layer",
            kept.backward * tokens,
            f"{tokens:,.0f} tokens of {kept.backward:,.0f} bytes",
        )
    ]
    if kept.again:
        why = f"one layer, {tokens:,.0f} tokens of {kept.again:,.0f} bytes"
        lines.append(MemoryLine("buffers", "recomputed or brought back", kept.again * tokens, why))
    if kept.away:
        why = f"the next layer on its way from the host, {tokens:,.0f} tokens of {kept.away:,.0f} bytes"
        lines.append(MemoryLine("buffers", "on its way", kept.away * tokens, why))
    return lines


def _answer_lines(workload: Workload, stages: tuple[StageContents, ...]) -> list[MemoryLine]:
    """torch's pipeline keeps what the last stage gave for every microbatch until the step ends."""
    if workload.framework.name != "fsdp2" or workload.parallel.pp == 1 or not any(stage.head for stage in stages):
        return []
    model, parallel = workload.model, workload.parallel
    logits = workload.context_tokens * padded_vocab(model.vocab, parallel.tp) / parallel.tp
    why = f"{workload.microbatches} microbatches of {logits:,.0f} logits of 2 bytes"
    return [MemoryLine("buffers", "logits of all microbatches", workload.microbatches * logits * 2.0, why)]


# ---- moefold's own step ----


def own_workspace(workload: Workload, stages: tuple[StageContents, ...], setting: Setting) -> list[MemoryLine]:
    """The larger of the two moments."""
    loss, layer = _own_loss(workload, stages), _own_layer(workload, stages, setting)
    return max(loss, layer, key=lambda some: sum(line.bytes for line in some))


def _head_gradient(workload: Workload, stages: tuple[StageContents, ...]) -> float:
    """One per loss; of several, their sum too."""
    if not any(stage.head for stage in stages):
        return 0.0
    return (
        _losses(workload) * workload.model.vocab / workload.parallel.tp * workload.model.dim * workload.gradient_bytes
    )


def _losses(workload: Workload) -> int:
    """Gradients of the head that are alive together."""
    return 1 if workload.model.mtp == 0 else workload.model.mtp + 2


def _own_loss(workload: Workload, stages: tuple[StageContents, ...]) -> list[MemoryLine]:
    gradient = _head_gradient(workload, stages)
    if not gradient:
        return []
    tokens, dim = workload.context_tokens, workload.model.dim
    rows = min(CHUNK, workload.model.vocab / workload.parallel.tp)
    # Wide, beside the matmul result that they were or the gradient that they become.
    each = 6.0 if workload.format != "float32" else 4.0
    chunk = tokens * rows * each + tokens * dim * 6.0 + rows * dim * 2.0
    # When all chunks are done, the gradient is cast to the format of the weight that collects it.
    cast = gradient / _losses(workload) * workload.gather_bytes / workload.gradient_bytes + tokens * dim * workload.word
    if workload.gather_bytes < workload.gradient_bytes and cast > chunk:
        return [
            MemoryLine("buffers", "the head's weight gradient", gradient, "of all of this rank's vocabulary rows"),
            MemoryLine("buffers", "the same in the weight's format", cast, f"{workload.gather_bytes:g} bytes each"),
        ]
    return [
        MemoryLine("buffers", "the head's weight gradient", gradient, "of all of this rank's vocabulary rows"),
        MemoryLine(
            "buffers",
            "one chunk of logits",
            chunk,
            f"{tokens:,.0f} tokens of {rows:,.0f} logits, {each:.0f} bytes each",
        ),
    ]


def _own_layer(workload: Workload, stages: tuple[StageContents, ...], setting: Setting) -> list[MemoryLine]:
    kinds = dict.fromkeys(layer for stage in stages for layer, _ in stage.layers)
    rows, weights = max((_inside(workload, layer) for layer in kinds), default=(0.0, 0.0))
    word = workload.word
    per_weight = word if workload.is_flat or workload_reshards_per_step(workload) else word + workload.gradient_bytes
    lines = [
        MemoryLine("buffers", "gradients inside a layer", rows, "of an activation, before and after"),
        MemoryLine(
            "buffers", "gradient of one weight", weights * per_weight, f"{weights / 1e9:.3f}B elements of the largest"
        ),
        *_again_lines(workload, kinds, setting),
    ]
    by_layer = not workload.is_flat and not workload_reshards_per_step(workload)
    if by_layer and (head := _head_gradient(workload, stages)):
        lines.append(MemoryLine("buffers", "the head's weight gradient", head, "until embedding and head are summed"))
    return lines


def _again_lines(workload: Workload, kinds: Iterable[Layer], setting: Setting) -> list[MemoryLine]:
    """Retained steps: what one layer's backward has again. When attention's turn comes, the feed-forward's is gone."""
    if not setting.discarded and not workload.retained("offload"):
        return []
    tokens = workload.context_tokens
    kept = [kept_by(layer, workload.model.dim, setting) for layer in kinds]
    again = max((max(one.again_feed, one.again_attention - one.kept_feed) for one in kept), default=0.0)
    away = max((one.away for one in kept), default=0.0)
    lines = []
    if again > 0:
        why = f"one layer, {tokens:,.0f} tokens of {again:,.0f} bytes"
        lines.append(MemoryLine("buffers", "recomputed or brought back", again * tokens, why))
    if away > 0:
        why = f"the next layer on its way from the host, {tokens:,.0f} tokens of {away:,.0f} bytes"
        lines.append(MemoryLine("buffers", "on its way", away * tokens, why))
    return lines


def _inside(workload: Workload, layer: Layer) -> tuple[float, float]:
    """Bytes of gradients of rows, and elements of the largest weight."""
    parallel, feed, tokens = workload.parallel, layer.feed, workload.context_tokens
    word = workload.word
    if isinstance(feed, MoE):
        rows = tokens / parallel.tp * feed.top_k * workload.imbalance
        inner = rows * feed.dim * (2 * word + 4.0 + word)
        weight = feed.experts / parallel.ep * 2 * feed.dim * (feed.latent or workload.model.dim) / parallel.etp
        return inner, weight
    if isinstance(feed, Dense):
        return tokens * feed.dim / parallel.tp * 4 * word, 2 * feed.dim * workload.model.dim / parallel.tp
    return 0.0, 0.0
