"""Inputs of a proof: initial parameters, and the batches of a rank and of the reference.

N tokens of a microbatch, T of them on one rank.

Samples are a function of the seed alone. The step's plan groups them into microbatches, as in training; the reference
concatenates the microbatches of a wave.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.config.run import RunConfig
from moefold.nn.batch import IGNORED, Ahead, Batch, context_shard, whole_batch
from moefold.nn.init import Box, normal_part
from moefold.parallel.parallelize import InitValues
from moefold.prove.cases import Case

# Number of labels of a step that count: for the next token, then for each MTP module.
StepLabels = tuple[int, ...]


class ProofSample(NamedTuple):
    """Tokens, labels, lengths of the documents, and the padding mask (False for padding) of one sample."""

    tokens_N: Tensor
    labels_N: Tensor
    lengths: tuple[int, ...]
    real_T: Tensor


def proof_init(kind: str, seed: int, name: str, shape: tuple[int, ...], box: Box, std: float, into: Tensor) -> None:
    """Random values for every parameter and loss-free bias, the same under every layout. A bias of 0 would hide that it
    is added twice, a norm weight of 1 that the norm is applied over the wrong dim."""
    normal_part(seed, name, shape, box, std, into)
    if kind == "norm":
        into.add_(1.0)


def init_of(run: RunConfig) -> InitValues:
    return proof_init if run.precision.recipe is None else spread_init


def spread_init(kind: str, seed: int, name: str, shape: tuple[int, ...], box: Box, std: float, into: Tensor) -> None:
    """With a recipe: the last quarter of a normed row is far smaller than the rest.

    Power-of-two scales give values of about one size the same codes whatever block they are in. A small value loses
    digits in a block with large ones, so that blocks of other features are seen.
    """
    proof_init(kind, seed, name, shape, box, std, into)
    if kind == "norm":
        features = torch.arange(box[-1].start, box[-1].stop, device=into.device)
        into.mul_(torch.where(features * 4 < shape[-1] * 3, 1.0, 2.0**-16).to(into.dtype))


def samples(case: Case) -> list[ProofSample]:
    """Of the whole step; about one label in seven is ignored, unevenly over the samples."""
    generator = torch.Generator().manual_seed(case.run.seed * 7919 + 11)
    made = []
    for number, lengths in enumerate(case.documents):
        size = sum(lengths)
        tokens = torch.randint(case.run.model.vocab_size, (size + 1,), generator=generator)
        labels_N = tokens[1:].clone()
        ignored = torch.rand(size, generator=generator) < torch.rand(1, generator=generator) * 0.3
        ignored[0] &= number > 0  # at least one label counts
        labels_N[ignored] = IGNORED
        made.append(_padded(case, tokens[:-1], labels_N, lengths))
    _distinct_starts(case, made)
    return made


def _distinct_starts(case: Case, made: list[ProofSample]) -> None:
    """No two documents of a microbatch start with the same token, and none starts with the same token twice.

    Such tokens have equal hidden states in exact arithmetic, and a policy that ranks tokens would break the tie by
    rounding alone.
    """
    vocab = case.run.model.vocab_size
    for numbers in (group for wave in case.plan.waves for group in wave.documents):
        starts = [(number, start) for number in numbers for start in accumulate((0, *made[number].lengths[:-1]))]
        for token, (number, start) in enumerate(starts):
            tokens_N = made[number].tokens_N
            tokens_N[start] = token % vocab
            if start + 1 < len(tokens_N) and tokens_N[start + 1] == tokens_N[start]:
                tokens_N[start + 1] = (token + vocab // 2) % vocab


def _padded(case: Case, tokens_N: Tensor, labels_N: Tensor, lengths: tuple[int, ...]) -> ProofSample:
    """With padding up to the sequence length, where the run pads."""
    missing = case.run.data.seq_len - sum(lengths) if case.run.data.packing == "padded" else 0
    real_T = torch.arange(len(tokens_N) + missing) < len(tokens_N)
    fill = torch.full((missing,), IGNORED)
    tokens_N, labels_N = torch.cat((tokens_N, fill * 0 + 1)), torch.cat((labels_N, fill))
    return ProofSample(tokens_N, labels_N, (len(tokens_N),) if missing else lengths, real_T)


def wave_batch(case: Case, wave: int, labels: StepLabels) -> Batch:
    """All microbatches of one wave, concatenated: the batch of the reference."""
    return _batch(case, wave, case.plan.waves[wave].documents, labels)


def rank_batch(case: Case, wave: int, rank: int, labels: StepLabels) -> Batch:
    """One microbatch, or this rank's context shard of it."""
    context = case.plan.waves[wave].context
    group, index = divmod(case.layout.context_place(rank), context)
    return context_shard(_batch(case, wave, (case.plan.waves[wave].documents[group],), labels), index)


def rows_in_wave(case: Case, wave: int, rank: int) -> slice:
    """The tokens of this rank's microbatch in ``wave_batch``, before they are sharded over context ranks."""
    made, groups = samples(case), case.plan.waves[wave]
    sizes = [sum(len(made[number].tokens_N) for number in numbers) for numbers in groups.documents]
    group = case.layout.context_place(rank) // groups.context
    return slice(sum(sizes[:group]), sum(sizes[: group + 1]))


def on_device(batch: Batch, device: torch.device) -> Batch:
    return replace(
        batch,
        tokens_S=batch.tokens_S.to(device),
        labels_S=batch.labels_S.to(device),
        positions_S=batch.positions_S.to(device),
        real_S=None if batch.real_S is None else batch.real_S.to(device),
        ahead=tuple(Ahead(further.tokens_S.to(device), further.labels_S.to(device)) for further in batch.ahead),
    )


def labels_of_rank(case: Case, rank: int) -> StepLabels:
    """Number of labels that count in this rank's batches."""
    no_counts = (1,) * (1 + case.run.model.num_mtp)
    counts = [_count(rank_batch(case, wave, rank, no_counts)) for wave in range(case.num_waves)]
    return tuple(map(sum, zip(*counts, strict=True)))


def labels_of_batch(case: Case) -> StepLabels:
    """Of the whole step: a label ``by`` positions later counts if it is not ignored and in the same document."""
    return tuple(
        sum(
            int((document[by:] != IGNORED).sum())
            for sample in samples(case)
            for document in sample.labels_N.split(sample.lengths)
        )
        for by in range(1 + case.run.model.num_mtp)
    )


def _count(batch: Batch) -> StepLabels:
    labels = (batch.labels_S, *(ahead.labels_S for ahead in batch.ahead))
    return tuple(int((labels_S != IGNORED).sum()) for labels_S in labels)


def _batch(case: Case, wave: int, microbatches: tuple[tuple[int, ...], ...], labels: StepLabels) -> Batch:
    made = samples(case)
    samples_of = [[made[number] for number in numbers] for numbers in microbatches]
    flat = [sample for microbatch in samples_of for sample in microbatch]
    empty = torch.zeros(0, dtype=torch.int64)
    real_T = torch.cat([empty.bool(), *(sample.real_T for sample in flat)])
    return whole_batch(
        torch.cat([empty, *(sample.tokens_N for sample in flat)]),
        torch.cat([empty, *(sample.labels_N for sample in flat)]),
        tuple(length for sample in flat for length in sample.lengths),
        documents_per_microbatch=tuple(sum(len(sample.lengths) for sample in microbatch) for microbatch in samples_of),
        context_size=case.plan.waves[wave].context,
        tensor_size=case.run.parallel.tp,
        step_labels=labels[0],
        step_labels_ahead=labels[1:],
        step_tokens=sum(map(sum, case.documents)),
        step_sequences=sum(map(len, case.documents)),
        num_ahead=case.run.model.num_mtp,
        real_T=real_T if case.run.data.packing == "padded" else None,
    )
