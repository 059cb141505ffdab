"""From sample numbers to the batches of one rank.

N tokens of a microbatch.

A step takes the next ``global_batch`` samples. A plan says which of them form a microbatch and which ranks run it; it
follows from their lengths, so every rank makes the same plan without asking. Windows and padded documents are dealt in
their own order, b to a microbatch: in wave w, data-parallel rank d has microbatch w*dp + d. Packed documents are put
together so that ranks have equal work. Which rank sees a sample depends on the layout; which samples a step sees does
not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from moefold.batching.plan_for import plan_for
from moefold.comm.mesh import Groups
from moefold.config.run import RunConfig
from moefold.data.packing import crossing, lengths
from moefold.data.samples import Sample
from moefold.model.assemble import share_of, whole_batch
from moefold.model.batch import IGNORED, Batch
from moefold.pipeline.step import count_step_labels


class SampleOrder(Protocol):
    def sample(self, index: int) -> Sample: ...

    def length(self, index: int) -> int: ...


class StepData(NamedTuple):
    """This rank's microbatches of a step, a digest of its samples' ids, and the real tokens of the whole step."""

    batches: list[Batch]
    ids: str
    tokens: int


class Slot(NamedTuple):
    """One sample as a microbatch holds it: inputs, labels, the lengths of its documents, and which inputs are real."""

    tokens_N: np.ndarray
    labels_N: np.ndarray
    lengths: tuple[int, ...]
    real_N: np.ndarray | None = None


def step_batches(
    order: SampleOrder, first_sample: int, run: RunConfig, groups: Groups, device: torch.device
) -> StepData:
    """What this rank computes of the step that starts at ``first_sample``."""
    sizes = [order.length(first_sample + i) for i in range(run.data.global_batch)]
    plan = plan_for(run, sizes, groups.layout)
    place, slot_of = groups.layout.context_place(groups.rank), SLOTS[run.data.documents]
    mine = [wave.documents[place // wave.context] for wave in plan.waves]
    read = [[order.sample(first_sample + i) for i in documents] for documents in mine]
    slots = [[slot_of(sample, run.data.seq_len) for sample in samples] for samples in read]
    labels = _count_labels(sizes, slots, run, groups)
    batches = [
        share_of(_batch(microbatch, wave.context, run, labels, sum(sizes), device), place % wave.context)
        for microbatch, wave in zip(slots, plan.waves, strict=True)
    ]
    ids = hashlib.sha256("\n".join(sample.id for samples in read for sample in samples).encode()).hexdigest()
    return StepData(batches, ids, sum(sizes))


def joined(sample: Sample, seq_len: int) -> Slot:
    return Slot(sample.tokens[:-1], sample.tokens[1:], (sample.length,))


def apart(sample: Sample, seq_len: int) -> Slot:
    """A document's last token has no label here: what follows belongs to another, or to a later window."""
    labels_N = np.where(crossing(sample.document_starts, seq_len), IGNORED, sample.tokens[1:])
    return Slot(sample.tokens[:-1], labels_N, tuple(lengths(sample.document_starts, seq_len)))


def padded(sample: Sample, seq_len: int) -> Slot:
    missing = (0, seq_len - sample.length)
    return Slot(
        np.pad(sample.tokens[:-1], missing),
        np.pad(sample.tokens[1:], missing, constant_values=IGNORED),
        (seq_len,),
        np.arange(seq_len) < sample.length,
    )


SLOTS: dict[str, Callable[[Sample, int], Slot]] = {
    "joined": joined,
    "apart": apart,
    "padded": padded,
    # A packed document takes as much room as it has tokens.
    "packed": joined,
}


def _batch(
    slots: Sequence[Slot], context: int, run: RunConfig, labels: tuple[int, ...], tokens: int, device: torch.device
) -> Batch:
    """The whole microbatch; none of its ranks may hold anything if there are more of them than documents."""
    nothing, real = np.zeros(0, np.int64), [slot.real_N for slot in slots if slot.real_N is not None]
    return whole_batch(
        torch.from_numpy(np.concatenate([nothing, *(slot.tokens_N for slot in slots)])).to(device),
        torch.from_numpy(np.concatenate([nothing, *(slot.labels_N for slot in slots)])).to(device),
        tuple(length for slot in slots for length in slot.lengths),
        context_size=context,
        tensor_size=run.parallel.tp,
        step_labels=labels[0],
        step_labels_ahead=labels[1:],
        step_tokens=tokens,
        num_ahead=run.model.num_mtp,
        real_N=torch.from_numpy(np.concatenate(real)).to(device) if real else None,
    )


def _count_labels(
    sizes: Sequence[int], slots: Sequence[Sequence[Slot]], run: RunConfig, groups: Groups
) -> tuple[int, ...]:
    """Labels of the whole step: for the next token, then for each module that looks further ahead.

    They follow from the samples' lengths, but for windows whose documents are kept apart: those must be read to know,
    so ranks tell each other, one of those that share a microbatch.
    """
    reach = range(1 + run.model.num_mtp)
    if run.data.documents != "apart":
        return tuple(sum(max(size - by, 0) for size in sizes) for by in reach)
    mine = [sum(_labels_ahead(slot, by) for microbatch in slots for slot in microbatch) for by in reach]
    return tuple(count_step_labels(count if groups["cp"].index == 0 else 0, groups) for count in mine)


def _labels_ahead(slot: Slot, by: int) -> int:
    """Labels that lie at least ``by`` places after the beginning of their document."""
    documents = np.split(slot.labels_N, np.cumsum(slot.lengths)[:-1])
    return sum(int((document[by:] != IGNORED).sum()) for document in documents)
