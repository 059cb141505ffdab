"""Temporary memory on top of states and saved activations.

Two moments are candidates for the peak, and the larger counts. The **loss** has the logits, the head's weight gradient
before it is accumulated, and the last hidden states in several forms. The **backward of a layer** has the gradients
inside of it and what was recomputed or brought back from the host. Frameworks also keep buffers of their own:
Transformer Engine passes autograd one unused gradient per shape of matrix, because the real one is already accumulated.

moefold's own step has rows of its own, which a test compares with the dry run:

casts     matmuls keep the parameter itself and cast it again in backward: no cast outlives its matmul
loss      logits exist one chunk of the vocabulary at a time; the head's gradient is whole
embedding its gradient is whole and in float32, which counts where a forward has filled memory again meanwhile
a layer   the peak is inside of the experts' activation, or at their first matrix: its gradient and its output's
"""

from __future__ import annotations

from typing import NamedTuple

from moefold.blueprint.model_shape import DeltaNet, Dense, Layer, ModelShape, MoE
from moefold.plan.memory.layer_activations import kept_by
from moefold.plan.memory.saved_activations import Kept, Setting
from moefold.plan.memory.states import RankWeights, padded_vocab, under_way_lines, workload_reshards_per_step
from moefold.plan.prediction import MemoryLine
from moefold.plan.stage_contents import StageContents
from moefold.plan.workload import Workload
from moefold.schedule.names import SCHEDULES
from moefold.units import format_bytes

# Bytes per logit while the loss is differentiated. Fused: logits are overwritten by their gradient; compiled: both
# exist. Else Megatron has the logits, the probabilities in float32 and the gradient; plain PyTorch has float32
# log-probabilities, their gradient and the logits' gradient in float32 beside the logits.
FUSED_LOSS, COMPILED_LOSS, MEGATRON_LOSS, PLAIN_LOSS = 2.0, 4.0, 8.0, 14.0
# Hidden states of all tensor-parallel ranks' tokens around the head: normed, gathered, their gradients.
HIDDEN_AT_LOSS = 6
# Words per dim around the head (a norm's input and output) and an MTP module (two more, joined); moefold's norms
# keep four each.
_AROUND_HEAD, _AROUND_MODULE = (2, 4), (5, 16)
# Receives that a pipeline rank posts ahead, as in `comm/p2p.py`.
POSTED = 2
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
    """The larger of the two moments; where a forward runs beside a backward, of three."""
    found = [_own_loss(workload, stages), _own_layer(workload, stages, setting), _own_embedding(workload, stages)]
    return max(found, key=lambda some: sum(line.bytes for line in some))


def around_head(model: ModelShape, setting: Setting) -> float:
    return _end_bytes(model, setting, _AROUND_HEAD[setting.framework == "moefold"])


def around_module(model: ModelShape, setting: Setting) -> float:
    return _end_bytes(model, setting, _AROUND_MODULE[setting.framework == "moefold"])


def _end_bytes(model: ModelShape, setting: Setting, tensors: int) -> float:
    """Of one token."""
    tokens = 1 / setting.tp if "sequence_parallel" in setting.on else 1.0
    return tensors * model.dim * tokens * setting.word


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
    each = 6.0 if workload.word < 4 else 4.0
    chunk = tokens * rows * each + tokens * dim * 6.0 + rows * dim * 2.0
    # When all chunks are done, the gradient is cast to the format of the weight that collects it.
    kept = workload.wide_gather_bytes
    cast = gradient / _losses(workload) * kept / workload.gradient_bytes + tokens * dim * workload.word
    if kept < workload.gradient_bytes and cast > chunk:
        return [
            MemoryLine("buffers", "the head's weight gradient", gradient, "of all of this rank's vocabulary rows"),
            MemoryLine("buffers", "the same in the weight's format", cast, f"{kept:g} bytes each"),
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
    """The backward of the layer that needs most, at its feed-forward's turn or at its attention's."""
    by_layer = not workload.is_flat and not workload_reshards_per_step(workload)
    overlaps, tokens = SCHEDULES[workload.parallel.schedule].overlaps, workload.context_tokens
    ahead = max(_ahead(workload, stage, setting) for stage in stages) if overlaps else 0.0
    found: list[_LayerMoment] = []
    away = 0.0
    for stage in stages:
        freed = 0.0
        for layer, count in reversed(stage.layers):
            kept = kept_by(layer, workload.model.dim, setting)
            # Later layers of the stage are done; beside a forward, that has filled what they freed and more.
            found += _moments_of(workload, layer, kept, by_layer, -ahead if overlaps else freed)
            freed += count * kept.total * tokens
            away = max(away, kept.away * tokens)
    fullest = max(found, key=lambda one: one.total(away), default=_LayerMoment(0.0, 0.0, 0.0, False))
    rows, weights, again = fullest.rows, fullest.weights, fullest.again
    if len(stages) == 1 and stages[0].head:
        # The head of the microbatch that goes backward is done.
        rows -= around_head(workload.model, setting) * tokens
    if rows < 0:
        rows, weights = 0.0, max(0.0, rows + weights)
    lines = [
        MemoryLine("buffers", "gradients inside a layer", rows, "of rows, less what was saved and is freed by then"),
        MemoryLine("buffers", "gradients of weights", weights, "of one layer, until they are added up"),
        MemoryLine("buffers", "recomputed or brought back", again, "one layer"),
        MemoryLine("buffers", "on its way", away * fullest.asks, "the next layer, from the host"),
        *_stream_lines(workload),
    ]
    if by_layer and (head := _head_gradient(workload, stages)):
        lines.append(MemoryLine("buffers", "the head's weight gradient", head, "until embedding and head are summed"))
    return [line for line in lines if line.bytes]


def _ahead(workload: Workload, stage: StageContents, setting: Setting) -> float:
    """What the forward of a pair has saved beyond what its backward has freed.

    Each runs up to its next communication in turn. The backward starts with the combine of its last MoE layer; by the
    time that layer's experts go backward, the forward is through the layers before its first MoE layer, that layer's
    attention and its dispatch. From there on both take one layer per turn.
    """
    parallel = workload.parallel
    if not workload.is_flat and parallel.vpp == 1 and workload.microbatches <= parallel.pp + 2:
        # The first rank, which has most in flight, has one pair, and FSDP's gradients are not there before its end.
        return 0.0
    found = 0.0
    for layer, count in stage.layers:
        kept = kept_by(layer, workload.model.dim, setting)
        if isinstance(layer.feed, MoE):
            return (found + kept.total - kept.kept_experts) * workload.context_tokens
        found += count * kept.total
    return 0.0


def _own_embedding(workload: Workload, stages: tuple[StageContents, ...]) -> list[MemoryLine]:
    """The end of a pair's backward, when its forward has filled what the backward freed; else activations are gone by
    then. A token's gradient is a sum of many rows, in float32."""
    if not SCHEDULES[workload.parallel.schedule].overlaps or not any(stage.embedding for stage in stages):
        return []
    rows = workload.model.vocab / workload.parallel.tp
    size = (rows + workload.context_tokens) * workload.model.dim * 4.0
    why = f"{rows:,.0f} rows and their summands in float32, beside a forward"
    return [MemoryLine("buffers", "the embedding's weight gradient", size, why), *_stream_lines(workload)]


def _stream_lines(workload: Workload) -> list[MemoryLine]:
    """The gradient that goes from layer to layer, and what neighbouring stages were told to send."""
    each = workload.context_tokens / workload.parallel.tp * workload.model.dim * workload.word
    why = f"{format_bytes(each)} each"
    lines = [MemoryLine("buffers", "gradient of the residual stream", each, why)]
    if workload.parallel.pp > 1:
        lines.append(MemoryLine("buffers", "posted receives", POSTED * each, why))
    return lines


class _LayerMoment(NamedTuple):
    """Bytes of rows, of gradients of weights and of what was recomputed or is back from the host; and whether the next
    layer was asked for. Saved tensors that are freed by then count as negative rows."""

    rows: float
    weights: float
    again: float
    asks: bool

    def total(self, away: float) -> float:
        return self.rows + self.weights + self.again + away * self.asks


def _moments_of(workload: Workload, layer: Layer, kept: Kept, by_layer: bool, freed: float) -> list[_LayerMoment]:
    """Inside of a layer's feed-forward, and at its attention, when what the feed-forward saved is gone."""
    tokens = workload.context_tokens
    inside, after = _inside_feed(workload, layer, kept, by_layer)
    back = (kept.again_feed + kept.away) * tokens
    # A layer that has nothing away finds that of the next layer there: the one before asked for it.
    found = [_LayerMoment(rows - freed, weights, back, is_read or not kept.away) for rows, weights, is_read in inside]
    attention = (kept.again_attention + kept.away_attention - kept.kept_feed) * tokens
    rows = kept.backward_attention * tokens - freed
    if isinstance(layer.mixer, DeltaNet) and by_layer:
        # Large enough to be the fullest: the experts are resharded by then, and their gradients summed.
        after = -_experts_gathered(workload, layer)
    return [*found, _LayerMoment(rows + min(attention, 0.0), after, max(attention, 0.0), asks=True)]


def _experts_gathered(workload: Workload, layer: Layer) -> float:
    parallel, feed = workload.parallel, layer.feed
    if not isinstance(feed, MoE):
        return 0.0
    dim = feed.latent or workload.model.dim
    return 3 * feed.experts * feed.dim * dim / (parallel.ep * parallel.etp) * workload.gather_bytes


def _inside_feed(
    workload: Workload, layer: Layer, kept: Kept, by_layer: bool
) -> tuple[list[tuple[float, float, bool]], float]:
    """Bytes of rows and of gradients of weights at the moments of a feed-forward's backward that may be the fullest,
    each with whether a tensor from the host was read by then; and of gradients of weights after it.

    Under FSDP gradients are cast to the format of their sum and stay until the layer is done; else they are added to
    what is there already. Saved tensors that are freed by then count as negative.
    """
    parallel, feed, tokens = workload.parallel, layer.feed, workload.context_tokens
    word, wide = workload.word, workload.gradient_bytes * by_layer
    if isinstance(feed, MoE):
        rows = tokens / parallel.tp * feed.top_k * workload.row_buffer * workload.row_padding
        dim = feed.latent or workload.model.dim
        inner, passed = rows * feed.dim, rows * dim * parallel.etp * word
        first = feed.experts / parallel.ep * 2 * feed.dim * dim / parallel.etp
        # The activation: the gradient of its output, also wide, and of both halves of its input, silu and two products,
        # of which one is wide; its output is freed.
        rows_at_activation = inner * (4 * word + (8.0 if word < 4.0 else 4.0)) - kept.read_last * tokens
        activation = rows_at_activation, first / 2 * wide, kept.read_at_activation
        # The first matrix: the gradients of its input and its output and its own; and then the latter as it is summed.
        is_read = kept.read_at_first_matrix
        matrix = passed - inner * word, first * word + first / 2 * wide, is_read
        summed = passed - inner * 3 * word, first * (word + wide) + first / 2 * wide, is_read
        return [activation, matrix, summed], 1.5 * first * wide
    if isinstance(feed, Dense):
        first = 2 * feed.dim * workload.model.dim / parallel.tp
        rows = tokens * feed.dim / parallel.tp * 4 * word
        return [(rows, first * (word + wide), kept.read_at_first_matrix)], 1.5 * first * wide
    return [(0.0, 0.0, kept.read_at_first_matrix)], 0.0
