"""Batches and weights for tests of the model."""

from __future__ import annotations

import torch
from torch import nn

from moefold.nn.batch import IGNORED, Batch, whole_batch


def batch_of(num_sequences: int, seq_len: int, vocab_size: int, *, seed: int = 0, shards: int = 1) -> Batch:
    """Random tokens; each sequence predicts itself one token ahead, so its last token has no label."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (num_sequences, seq_len), generator=generator)
    labels = torch.cat((tokens[:, 1:], torch.full((num_sequences, 1), IGNORED)), dim=1)
    return whole_batch(
        tokens.flatten(),
        labels.flatten(),
        (seq_len,) * num_sequences,
        tensor_size=shards,
        step_labels=num_sequences * (seq_len - 1),
        step_tokens=num_sequences * seq_len,
        step_sequences=num_sequences,
    )


def fill(module: nn.Module, seed: int = 0) -> None:
    """Random values for every parameter, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(1 + 0.2 * noise if "norm" in name else noise * (value.shape[-1] ** -0.5))
