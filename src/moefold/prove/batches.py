"""The global batch of a proof, and the piece of it that one rank, or the reference, sees at a time.

T tokens, G sequences of the global batch, S sequence length.

The batch is a function of the seed alone. Microbatch j holds sequences j*b to (j+1)*b; in wave w, data-parallel rank d
runs microbatch w*dp + d. The reference lays the microbatches of a wave side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.model.assemble import whole_batch
from moefold.model.batch import IGNORED, Batch
from moefold.prove.cases import Case


def global_batch(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels, both [G, S]; about one label in seven is ignored, unevenly over the sequences."""
    data = case.run.data
    generator = torch.Generator().manual_seed(case.run.seed * 7919 + 11)
    stream = torch.randint(case.run.model.vocab_size, (data.global_batch, data.seq_len + 1), generator=generator)
    tokens_GS, labels_GS = stream[:, :-1], stream[:, 1:].clone()
    ignored = (
        torch.rand(labels_GS.shape, generator=generator) < torch.rand(data.global_batch, 1, generator=generator) * 0.3
    )
    ignored[0, 0] = False  # at least one label counts
    return tokens_GS, labels_GS.masked_fill(ignored, IGNORED)


def wave_batch(case: Case, wave: int, step_labels: int) -> Batch:
    """All microbatches of one wave, side by side: what one process sees."""
    dp = case.layout.size("dp")
    return _batch(case, wave * dp, dp, step_labels)


def rank_batch(case: Case, wave: int, dp_index: int, step_labels: int) -> Batch:
    """One microbatch: what one rank sees."""
    return _batch(case, wave * case.layout.size("dp") + dp_index, 1, step_labels)


def labels_of_rank(case: Case, dp_index: int) -> int:
    """How many labels count in the microbatches that this data-parallel rank will see."""
    return sum(_count(rank_batch(case, wave, dp_index, 1)) for wave in range(case.num_waves))


def labels_of_batch(case: Case) -> int:
    return int((global_batch(case)[1] != IGNORED).sum())


def _count(batch: Batch) -> int:
    return int((batch.labels_T != IGNORED).sum())


def _batch(case: Case, first_microbatch: int, num_microbatches: int, step_labels: int) -> Batch:
    data = case.run.data
    tokens_GS, labels_GS = global_batch(case)
    rows = slice(first_microbatch * data.micro_batch, (first_microbatch + num_microbatches) * data.micro_batch)
    return whole_batch(
        tokens_GS[rows].flatten(),
        labels_GS[rows].flatten(),
        (data.seq_len,) * (num_microbatches * data.micro_batch),
        documents_per_microbatch=(data.micro_batch,) * num_microbatches,
        tensor_size=case.run.parallel.tp,
        step_labels=step_labels,
        step_tokens=data.global_batch * data.seq_len,
    )
