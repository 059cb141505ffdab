"""Temporary memory on top of states and saved activations.

Two moments are candidates for the peak, and the larger counts. The **loss** has the logits, the head's weight gradient
before it is accumulated, and the last hidden states in several forms. The **backward of a layer** has the gradients
inside of it and what was recomputed or brought back from the host. Frameworks also keep buffers of their own:
Transformer Engine passes autograd one unused gradient per shape of matrix, because the real one is already accumulated.
"""

from __future__ import annotations

from moefold.plan.memory.activations import kept_by
from moefold.plan.memory.own_workspace import own_workspace
from moefold.plan.memory.saved_activations import Setting
from moefold.plan.memory.states import RankWeights, padded_vocab, under_way_lines
from moefold.plan.prediction import MemoryLine
from moefold.plan.stage_contents import StageContents
from moefold.plan.workload import Workload

# Bytes per logit while the loss is differentiated. Fused: logits are overwritten by their gradient; compiled: both
# exist. Else Megatron has the logits, the probabilities in float32 and the gradient; plain PyTorch has float32
# log-probabilities, their gradient and the logits' gradient in float32 beside the logits.
FUSED_LOSS, COMPILED_LOSS, MEGATRON_LOSS, PLAIN_LOSS = 2.0, 4.0, 8.0, 14.0
# Hidden states of all tensor-parallel ranks' tokens around the head: normed, gathered, their gradients.
HIDDEN_AT_LOSS = 6


def workspace_lines(
    workload: Workload, stages: tuple[StageContents, ...], held: RankWeights, setting: Setting
) -> list[MemoryLine]:
    """Buffers, and the larger of the two moments."""
    if workload.options.framework == "moefold":
        return own_workspace(workload, stages, held)
    lines = _unused_gradients(workload, held) + _answer_lines(workload, stages)
    loss = _loss_lines(workload, stages)
    layer = _layer_lines(workload, stages, setting) + under_way_lines(workload, held)
    return lines + max(loss, layer, key=lambda some: sum(line.bytes for line in some))


def _unused_gradients(workload: Workload, held: RankWeights) -> list[MemoryLine]:
    if workload.options.framework != "megatron" or workload.degrees.sharding == "zero3":
        return []
    why = f"one gradient per shape of matrix, {held.different / 1e9:.3f}B elements of 2 bytes"
    return [MemoryLine("buffers", "gradients for autograd", held.different * 2.0, why)]


def _loss_lines(workload: Workload, stages: tuple[StageContents, ...]) -> list[MemoryLine]:
    if not any(stage.head for stage in stages):
        return []
    model, tp, tokens = workload.model, workload.degrees.tp, workload.batch.tokens / workload.degrees.cp
    vocab = padded_vocab(model.vocab, tp) / tp
    heads = 1 + sum(stage.mtp for stage in stages)
    each = loss_bytes(workload)
    word = 4.0 if workload.dtypes.format == "float32" else 2.0
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
    megatron = workload.options.framework in ("megatron", "deepspeed")
    if workload.options.fused_loss:
        return FUSED_LOSS if megatron else COMPILED_LOSS
    return MEGATRON_LOSS if megatron else PLAIN_LOSS


def _layer_lines(workload: Workload, stages: tuple[StageContents, ...], setting: Setting) -> list[MemoryLine]:
    tokens = workload.batch.tokens / workload.degrees.cp
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
    if workload.options.framework != "fsdp2" or workload.degrees.pp == 1 or not any(stage.head for stage in stages):
        return []
    model, degrees, batch = workload.model, workload.degrees, workload.batch
    logits = batch.tokens / degrees.cp * padded_vocab(model.vocab, degrees.tp) / degrees.tp
    why = f"{batch.microbatches} microbatches of {logits:,.0f} logits of 2 bytes"
    return [MemoryLine("buffers", "logits of all microbatches", batch.microbatches * logits * 2.0, why)]
