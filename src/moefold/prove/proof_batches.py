"""The global batch of a proof, and the piece of it that one rank, or the reference, sees at a time.

N tokens of a microbatch, T of them on one rank.

Samples are a function of the seed alone. How they form microbatches is the step's plan, as in training; the reference
lays the microbatches of a wave side by side.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.nn.batch import IGNORED, Batch, context_shard, whole_batch
from moefold.prove.cases import Case

# How many labels of a step count: for the next token, then for each module that looks further ahead.
StepLabels = tuple[int, ...]


class ProofSample(NamedTuple):
    """What a sample puts into its microbatch: tokens and labels, its documents' lengths, and which tokens are real."""

    tokens_N: Tensor
    labels_N: Tensor
    lengths: tuple[int, ...]
    real_N: Tensor


def samples(case: Case) -> list[ProofSample]:
    """Of the whole step; about one label in seven is ignored, unevenly over the samples."""
    generator = torch.Generator().manual_seed(case.run.seed * 7919 + 11)
    made = []
    for number, lengths in enumerate(case.documents):
        size = sum(lengths)
        stream = torch.randint(case.run.model.vocab_size, (size + 1,), generator=generator)
        labels_N = stream[1:].clone()
        ignored = torch.rand(size, generator=generator) < torch.rand(1, generator=generator) * 0.3
        ignored[0] &= number > 0  # at least one label counts
        labels_N[ignored] = IGNORED
        made.append(_in_its_place(case, stream[:-1], labels_N, lengths))
    _begin_differently(case, made)
    return made


def _begin_differently(case: Case, made: list[ProofSample]) -> None:
    """No two documents of a microbatch begin with the same token, and none begins with the same token twice.

    Such tokens would be equal in exact arithmetic (attention to equal values is that value), and whoever ranks tokens
    would be asked to break a tie between numbers that differ by their rounding alone.
    """
    vocab = case.run.model.vocab_size
    for numbers in (group for wave in case.plan.waves for group in wave.documents):
        starts = [(number, start) for number in numbers for start in accumulate((0, *made[number].lengths[:-1]))]
        for token, (number, start) in enumerate(starts):
            tokens_N = made[number].tokens_N
            tokens_N[start] = token % vocab
            if start + 1 < len(tokens_N) and tokens_N[start + 1] == tokens_N[start]:
                tokens_N[start + 1] = (token + vocab // 2) % vocab


def _in_its_place(case: Case, tokens_N: Tensor, labels_N: Tensor, lengths: tuple[int, ...]) -> ProofSample:
    """A padded document is filled up to the sequence length with tokens that nobody may look at."""
    missing = case.run.data.seq_len - sum(lengths) if case.run.data.packing == "padded" else 0
    real_N = torch.arange(len(tokens_N) + missing) < len(tokens_N)
    fill = torch.full((missing,), IGNORED)
    tokens_N, labels_N = torch.cat((tokens_N, fill * 0 + 1)), torch.cat((labels_N, fill))
    return ProofSample(tokens_N, labels_N, (len(tokens_N),) if missing else lengths, real_N)


def wave_batch(case: Case, wave: int, labels: StepLabels) -> Batch:
    """All microbatches of one wave, side by side: what one process sees."""
    return _batch(case, wave, case.plan.waves[wave].documents, labels)


def rank_batch(case: Case, wave: int, rank: int, labels: StepLabels) -> Batch:
    """One microbatch, or the share of it that this rank holds."""
    context = case.plan.waves[wave].context
    group, index = divmod(case.layout.context_place(rank), context)
    return context_shard(_batch(case, wave, (case.plan.waves[wave].documents[group],), labels), index)


def labels_of_rank(case: Case, rank: int) -> StepLabels:
    """How many labels count in what this rank will see."""
    uncounted = (1,) * (1 + case.run.model.num_mtp)
    counts = [_count(rank_batch(case, wave, rank, uncounted)) for wave in range(case.num_waves)]
    return tuple(map(sum, zip(*counts, strict=True)))


def labels_of_batch(case: Case) -> StepLabels:
    """Of the whole step: a label ``by`` places on counts if it is one and lies in the same document."""
    return tuple(
        sum(
            int((document[by:] != IGNORED).sum())
            for sample in samples(case)
            for document in sample.labels_N.split(sample.lengths)
        )
        for by in range(1 + case.run.model.num_mtp)
    )


def _count(batch: Batch) -> StepLabels:
    labels = (batch.labels_T, *(ahead.labels_T for ahead in batch.ahead))
    return tuple(int((labels_T != IGNORED).sum()) for labels_T in labels)


def _batch(case: Case, wave: int, microbatches: tuple[tuple[int, ...], ...], labels: StepLabels) -> Batch:
    made = samples(case)
    held = [[made[number] for number in numbers] for numbers in microbatches]
    flat = [sample for microbatch in held for sample in microbatch]
    nothing = torch.zeros(0, dtype=torch.int64)
    real_N = torch.cat([nothing.bool(), *(sample.real_N for sample in flat)])
    return whole_batch(
        torch.cat([nothing, *(sample.tokens_N for sample in flat)]),
        torch.cat([nothing, *(sample.labels_N for sample in flat)]),
        tuple(length for sample in flat for length in sample.lengths),
        documents_per_microbatch=tuple(sum(len(sample.lengths) for sample in microbatch) for microbatch in held),
        context_size=case.plan.waves[wave].context,
        tensor_size=case.run.parallel.tp,
        step_labels=labels[0],
        step_labels_ahead=labels[1:],
        step_tokens=sum(map(sum, case.documents)),
        step_sequences=sum(map(len, case.documents)),
        num_ahead=case.run.model.num_mtp,
        real_N=real_N if case.run.data.packing == "padded" else None,
    )
