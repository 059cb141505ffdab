"""From documents to a batch, and from a batch to one context rank's share of it.

N tokens of a microbatch, T of them on this rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moefold.model.batch import IGNORED, Ahead, Batch


def whole_batch(
    tokens_N: Tensor,
    labels_N: Tensor,
    lengths: tuple[int, ...],
    *,
    step_labels: int,
    step_tokens: int,
    step_sequences: int | None = None,
    documents_per_microbatch: tuple[int, ...] | None = None,
    context_size: int = 1,
    tensor_size: int = 1,
    num_ahead: int = 0,
    step_labels_ahead: tuple[int, ...] = (),
    real_N: Tensor | None = None,
) -> Batch:
    """All documents, one after the other; one microbatch unless told otherwise."""
    device = tokens_N.device
    parts = [torch.arange(length, device=device) for length in lengths]
    positions_N = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)
    return Batch(
        tokens_T=tokens_N,
        labels_T=labels_N,
        positions_T=positions_N,
        lengths=lengths,
        documents_per_microbatch=(len(lengths),) if documents_per_microbatch is None else documents_per_microbatch,
        context_size=context_size,
        tensor_size=tensor_size,
        step_labels=step_labels,
        step_tokens=step_tokens,
        step_sequences=step_sequences,
        real_T=real_N,
        ahead=tuple(look_ahead(tokens_N, labels_N, lengths, by) for by in range(1, num_ahead + 1)),
        step_labels_ahead=step_labels_ahead,
    )


def look_ahead(tokens_N: Tensor, labels_N: Tensor, lengths: tuple[int, ...], by: int) -> Ahead:
    """Every token's successor ``by`` places on and that one's label, inside its document; past its end, nothing."""
    ahead_tokens, ahead_labels = torch.zeros_like(tokens_N), torch.full_like(labels_N, IGNORED)
    first = 0
    for length in lengths:
        kept = max(length - by, 0)
        ahead_tokens[first : first + kept] = tokens_N[first + length - kept : first + length]
        ahead_labels[first : first + kept] = labels_N[first + length - kept : first + length]
        first += length
    return Ahead(ahead_tokens, ahead_labels)


def share_of(batch: Batch, index: int) -> Batch:
    """The chunks of every document that context rank ``index`` holds."""
    share = replace(batch, context_index=index)
    place_T = share.place_T
    if place_T is None:
        return share
    return replace(
        share,
        tokens_T=batch.tokens_T[place_T],
        labels_T=batch.labels_T[place_T],
        positions_T=batch.positions_T[place_T],
        real_T=None if batch.real_T is None else batch.real_T[place_T],
        ahead=tuple(Ahead(ahead.tokens_T[place_T], ahead.labels_T[place_T]) for ahead in batch.ahead),
    )
