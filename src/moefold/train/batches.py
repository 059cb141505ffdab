"""From sample numbers to the batches of one rank.

T tokens of a microbatch.

A step takes the next ``global_batch`` samples. Microbatch j holds samples j*b to (j+1)*b of them; in wave w,
data-parallel rank d runs microbatch w*dp + d. Which rank sees a sample depends on the layout; which samples a step sees
does not.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch

from moefold.comm.mesh import Groups
from moefold.config.run import RunConfig
from moefold.data.samples import Sample
from moefold.model.batch import Batch
from moefold.parallel.step import count_step_labels


class SampleOrder(Protocol):
    def sample(self, index: int) -> Sample: ...


def step_batches(
    order: SampleOrder, first_sample: int, run: RunConfig, groups: Groups, device: torch.device
) -> tuple[list[Batch], str]:
    """This rank's microbatches of the step that starts at ``first_sample``, and a digest of its samples' ids."""
    data, dp = run.data, groups["dp"]
    waves = data.global_batch // (data.micro_batch * dp.size)
    read = [
        [
            order.sample(first_sample + (wave * dp.size + dp.index) * data.micro_batch + i)
            for i in range(data.micro_batch)
        ]
        for wave in range(waves)
    ]
    labels = count_step_labels(waves * data.micro_batch * data.seq_len, groups)
    ids = hashlib.sha256("\n".join(sample.id for samples in read for sample in samples).encode()).hexdigest()
    return [_batch(samples, run, labels, device) for samples in read], ids


def _batch(samples: list[Sample], run: RunConfig, step_labels: int, device: torch.device) -> Batch:
    data = run.data
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).to(device)
    return Batch(
        tokens_T=tokens[:, :-1].flatten(),
        labels_T=tokens[:, 1:].flatten(),
        positions_T=torch.arange(data.seq_len, device=device).repeat(len(samples)),
        num_sequences=len(samples),
        num_microbatches=1,
        shards_per_microbatch=run.parallel.tp,
        step_labels=step_labels,
        step_tokens=data.global_batch * data.seq_len,
    )
