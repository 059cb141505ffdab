"""A batch: the tokens of one forward, and which of them belong together.

A microbatch is a row of documents, one after the other, of any lengths. Attention, positions and balance losses stay
inside a document; capacities are counted over a microbatch or a rank's shard of it. A layout must not change these
sets, so they are written down here, over the whole microbatch, and not read off the shape of a rank's tensors. A rank
of a parallel run sees one microbatch at a time, or its context shard of one (``context_shard``); the one-process
reference may put the microbatches of all data-parallel ranks side by side in one batch, and the sets keep them apart.

Names with T hold the tokens that are here: all of the microbatch, or the context shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from moefold.batching.zigzag import num_held, places
from moefold.topology.shares import share_sizes

IGNORED = -100


@dataclass(frozen=True)
class TokenSets:
    """A partition of the whole microbatch: the set each token belongs to, and how many tokens each set has."""

    set_of_token_N: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Ahead:
    """What a module that looks further ahead is given for each token, and what it should predict."""

    tokens_T: Tensor
    labels_T: Tensor


@dataclass(frozen=True)
class Batch:
    """Documents one after the other; on a context-parallel rank, its chunks of each of them."""

    tokens_T: Tensor
    labels_T: Tensor
    # Inside the token's own document.
    positions_T: Tensor
    # Of every document of the whole microbatch, and how many documents each microbatch that lies here has.
    lengths: tuple[int, ...]
    documents_per_microbatch: tuple[int, ...]
    # Over how many ranks each microbatch is cut: its documents over context ranks, then each share over tp.
    context_size: int
    tensor_size: int
    # Of the whole step, over all ranks and microbatches: the divisors of the loss and of the balance losses.
    step_labels: int
    step_tokens: int
    # Sequences with at least one real token, the divisor of the balance loss per sequence; None where nobody asks.
    step_sequences: int | None = None
    # Which share of the microbatch this is; None where all of it is here.
    context_index: int | None = None
    # False for tokens that only fill a document's place up; None where there are none.
    real_T: Tensor | None = None
    # For each module that looks further ahead than the next token, and how many labels of the whole step count there.
    ahead: tuple[Ahead, ...] = ()
    step_labels_ahead: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_microbatches(self) -> int:
        return len(self.documents_per_microbatch)

    @cached_property
    def place_T(self) -> Tensor | None:
        """Where in the whole microbatch this rank's tokens stand; None if all of it is here."""
        if self.context_index is None or self.context_size == 1:
            return None
        return spans_to_index(places(self.lengths, self.context_index, self.context_size), self.tokens_T.device)

    @cached_property
    def order_N(self) -> Tensor:
        """Where the tokens of all context ranks stand, rank after rank."""
        spans = [span for index in range(self.context_size) for span in places(self.lengths, index, self.context_size)]
        return spans_to_index(spans, self.tokens_T.device)

    @cached_property
    def held_sizes(self) -> tuple[int, ...]:
        """How many tokens each context rank holds."""
        return tuple(num_held(self.lengths, index, self.context_size) for index in range(self.context_size))

    @cached_property
    def documents(self) -> TokenSets:
        return self._sets(self.lengths)

    @cached_property
    def microbatches(self) -> TokenSets:
        return self._sets(tuple(map(sum, self._lengths_by_microbatch)))

    @cached_property
    def shards(self) -> TokenSets:
        """What each rank that shares a microbatch holds of it: context shares, each cut over tp."""
        spans: list[tuple[int, int]] = []
        sizes: list[int] = []
        first = 0
        for lengths in self._lengths_by_microbatch:
            for index in range(self.context_size):
                held = places(lengths, index, self.context_size)
                spans += [(first + start, first + stop) for start, stop in held]
                sizes += share_sizes(sum(stop - start for start, stop in held), self.tensor_size)
            first += sum(lengths)
        device = self.tokens_T.device
        of_token_N = torch.empty(first, dtype=torch.int64, device=device)
        of_token_N[spans_to_index(spans, device)] = _numbered(tuple(sizes), device)
        return TokenSets(of_token_N, tuple(sizes))

    @cached_property
    def _lengths_by_microbatch(self) -> tuple[tuple[int, ...], ...]:
        ends = tuple(accumulate(self.documents_per_microbatch))
        return tuple(self.lengths[end - count : end] for end, count in zip(ends, self.documents_per_microbatch))

    def _sets(self, sizes: tuple[int, ...]) -> TokenSets:
        return TokenSets(_numbered(sizes, self.tokens_T.device), sizes)


def _numbered(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """0 as often as the first size says, then 1, and so on."""
    repeats = torch.tensor(sizes, dtype=torch.int64, device=device)
    return torch.arange(len(sizes), device=device).repeat_interleave(repeats, output_size=sum(sizes))


def spans_to_index(spans: tuple[tuple[int, int], ...] | list[tuple[int, int]], device: torch.device) -> Tensor:
    parts = [torch.arange(start, stop, device=device) for start, stop in spans]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


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
        ahead=tuple(mtp_targets(tokens_N, labels_N, lengths, by) for by in range(1, num_ahead + 1)),
        step_labels_ahead=step_labels_ahead,
    )


def mtp_targets(tokens_N: Tensor, labels_N: Tensor, lengths: tuple[int, ...], by: int) -> Ahead:
    """Every token's successor ``by`` places on and that one's label, inside its document; past its end, nothing."""
    ahead_tokens, ahead_labels = torch.zeros_like(tokens_N), torch.full_like(labels_N, IGNORED)
    first = 0
    for length in lengths:
        kept = max(length - by, 0)
        ahead_tokens[first : first + kept] = tokens_N[first + length - kept : first + length]
        ahead_labels[first : first + kept] = labels_N[first + length - kept : first + length]
        first += length
    return Ahead(ahead_tokens, ahead_labels)


def context_shard(batch: Batch, index: int) -> Batch:
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
