"""From sample numbers to the batches of one rank.

A step takes the next ``global_batch`` samples. A plan says which of them form a microbatch and which ranks run it; it
follows from their lengths, so every rank makes the same plan without communication. Windows and padded documents are
assigned in order, b per microbatch: in wave w, data-parallel rank d has microbatch w*dp + d. Packed documents are
combined so that ranks have equal work. Which rank sees a sample depends on the layout; which samples a step sees does
not.

``read_step`` works on the host and asks no other rank, so it may run on any thread (`prefetch.py`). ``count_divisors``
then sums what the ranks counted, where the losses' divisors do not follow from the samples' lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from moefold.batching.document_packing import plan_for
from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.data.packing import crosses_document, document_lengths
from moefold.data.samples import Sample
from moefold.nn.batch import IGNORED, Batch, context_shard, move_batch, whole_batch
from moefold.pipeline.step import count_over_step


class SampleOrder(Protocol):
    def sample(self, index: int) -> Sample: ...

    def length(self, index: int) -> int: ...

    @property
    def has_loss_mask(self) -> bool: ...


class StepData(NamedTuple):
    """This rank's microbatches of a step, a digest of its samples' ids, and the real tokens of the whole step."""

    batches: list[Batch]
    ids: str
    tokens: int
    # The samples of each microbatch, by their numbers in the step.
    members: tuple[tuple[int, ...], ...] = ()
    # And how many tokens each of them has there, padding included.
    sizes: tuple[tuple[int, ...], ...] = ()


class Slot(NamedTuple):
    """One sample in a microbatch: inputs, labels, document lengths, and False for padding tokens."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: tuple[int, ...]
    real: np.ndarray | None = None


class LocalStep(NamedTuple):
    """A step as this rank reads it: the tensors are final, the divisors of the losses are not if there are counts.

    ``counts`` are this rank's own labels of the next token and of each MTP module, and its sequences.
    """

    data: StepData
    counts: tuple[int, ...] | None


def step_batches(
    order: SampleOrder, first_sample: int, run: RunConfig, groups: Groups, device: torch.device
) -> StepData:
    """This rank's microbatches of the step that starts at ``first_sample``."""
    read = read_step(order, first_sample, run, groups)
    batches = [move_batch(batch, lambda tensor: tensor.to(device)) for batch in read.data.batches]
    return count_divisors(LocalStep(read.data._replace(batches=batches), read.counts), groups)


def read_step(order: SampleOrder, first_sample: int, run: RunConfig, groups: Groups) -> LocalStep:
    """The same on the host, without communication."""
    sizes = [order.length(first_sample + i) for i in range(run.data.global_batch)]
    plan = plan_for(run, sizes, groups.layout)
    place, slot_of = groups.layout.context_place(groups.rank), SLOTS[run.data.packing]
    mine = [wave.documents[place // wave.context] for wave in plan.waves]
    read = [[order.sample(first_sample + i) for i in documents] for documents in mine]
    slots = [[slot_of(sample, run.data.seq_len) for sample in samples] for samples in read]
    # Of the ranks that share a microbatch, the first counts its labels.
    counted = [slot for wave, each in zip(plan.waves, slots) if place % wave.context == 0 for slot in each]
    divisors, counts = _local_divisors(sizes, counted, run, order.has_loss_mask)
    batches = [
        context_shard(_batch(microbatch, wave.context, run, divisors), place % wave.context)
        for microbatch, wave in zip(slots, plan.waves, strict=True)
    ]
    ids = hashlib.sha256("\n".join(sample.id for samples in read for sample in samples).encode()).hexdigest()
    members, tokens = tuple(map(tuple, mine)), tuple(tuple(len(slot.tokens) for slot in each) for each in slots)
    return LocalStep(StepData(batches, ids, sum(sizes), members, tokens), counts)


def count_divisors(read: LocalStep, groups: Groups) -> StepData:
    """Batches with the divisors of the whole step; ranks sum their counts if these do not follow from lengths."""
    if read.counts is None:
        return read.data
    labels, *ahead, sequences = count_over_step(read.counts, groups)
    batches = [
        replace(batch, step_labels=labels, step_labels_ahead=tuple(ahead), step_sequences=sequences)
        for batch in read.data.batches
    ]
    return read.data._replace(batches=batches)


def next_tokens(sample: Sample) -> np.ndarray:
    """Each token's label, IGNORED where the loss mask says that the next token does not count."""
    tokens, mask = sample.tokens[1:], sample.loss_mask
    return tokens if mask is None else np.where(mask[1:], tokens, IGNORED)


def concat(sample: Sample, seq_len: int) -> Slot:
    return Slot(sample.tokens[:-1], next_tokens(sample), (sample.length,))


def concat_masked(sample: Sample, seq_len: int) -> Slot:
    """A document's last token here has no label: the next token belongs to another document or to a later window."""
    labels = np.where(crosses_document(sample.document_starts, seq_len), IGNORED, next_tokens(sample))
    return Slot(sample.tokens[:-1], labels, tuple(document_lengths(sample.document_starts, seq_len)))


def padded(sample: Sample, seq_len: int) -> Slot:
    missing = (0, seq_len - sample.length)
    return Slot(
        np.pad(sample.tokens[:-1], missing),
        np.pad(next_tokens(sample), missing, constant_values=IGNORED),
        (seq_len,),
        np.arange(seq_len) < sample.length,
    )


SLOTS: dict[str, Callable[[Sample, int], Slot]] = {
    "concat": concat,
    "concat_masked": concat_masked,
    "padded": padded,
    # A packed document is not padded.
    "bin_packed": concat,
}


class Divisors(NamedTuple):
    """Of the whole step, over all ranks; ``labels`` of the next token, then of each MTP module."""

    labels: tuple[int, ...]
    tokens: int
    sequences: int


def _batch(slots: Sequence[Slot], context: int, run: RunConfig, divisors: Divisors) -> Batch:
    """The whole microbatch, which is empty where a wave has fewer documents than ranks."""
    nothing, real = np.zeros(0, np.int64), [slot.real for slot in slots if slot.real is not None]
    return whole_batch(
        torch.from_numpy(np.concatenate([nothing, *(slot.tokens for slot in slots)])),
        torch.from_numpy(np.concatenate([nothing, *(slot.labels for slot in slots)])),
        tuple(length for slot in slots for length in slot.lengths),
        context_size=context,
        tensor_size=run.parallel.tp,
        step_labels=divisors.labels[0],
        step_labels_ahead=divisors.labels[1:],
        step_tokens=divisors.tokens,
        step_sequences=divisors.sequences,
        num_ahead=run.model.num_mtp,
        real_T=torch.from_numpy(np.concatenate(real)) if real else None,
    )


def _local_divisors(
    sizes: Sequence[int], counted: Sequence[Slot], run: RunConfig, has_loss_mask: bool
) -> tuple[Divisors, tuple[int, ...] | None]:
    """Divisors of the losses follow from the samples' lengths, each sample being one sequence whose tokens have labels.

    With ``concat_masked`` they depend on where documents end, and with a loss mask on its bytes, which only the ranks
    that read the samples know: ``counted``, each microbatch on one rank of its context-parallel group, is then summed
    over the ranks.
    """
    reach, tokens = range(1 + run.model.num_mtp), sum(sizes)
    if run.data.packing != "concat_masked" and not has_loss_mask:
        labels = tuple(sum(max(size - by, 0) for size in sizes) for by in reach)
        return Divisors(labels, tokens, sum(size > 0 for size in sizes)), None
    labels = tuple(sum(_labels_ahead(slot, by) for slot in counted) for by in reach)
    sequences = sum(length > 0 for slot in counted for length in slot.lengths)
    return Divisors(labels, tokens, sequences), (*labels, sequences)


def _labels_ahead(slot: Slot, by: int) -> int:
    """Labels at least ``by`` tokens after the beginning of their document."""
    documents = np.split(slot.labels, np.cumsum(slot.lengths)[:-1])
    return sum(int((document[by:] != IGNORED).sum()) for document in documents)
