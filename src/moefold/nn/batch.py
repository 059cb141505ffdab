"""A batch: the tokens of one forward, and which of them belong together.

A microbatch is a row of documents, one after the other, of any lengths. Attention, positions and balance losses stay
inside a document; capacities are counted over a microbatch or a rank's shard of it. A layout must not change these
sets, so they are written down here, over the whole microbatch, and not read off the shape of a rank's tensors. A rank
of a parallel run sees one microbatch at a time, or its context shard of one (``context_shard``); the one-process
reference may put the microbatches of all data-parallel ranks side by side in one batch, and the sets keep them apart.

Names with S hold the tokens that are here: the context shard, which without context parallelism is the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from moefold.batching.zigzag import held_spans, num_held
from moefold.topology.folded_layout import shard_sizes

IGNORED = -100


@dataclass(frozen=True)
class TokenSets:
    """A partition of the whole microbatch: the set each token belongs to, and how many tokens each set has."""

    set_of_token_T: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Ahead:
    """Input tokens and labels of one MTP module."""

    tokens_S: Tensor
    labels_S: Tensor


@dataclass(frozen=True)
class TokenObjective:
    """Takes the place of the cross entropy, for reinforcement learning.

    ``loss`` gets the log-prob of every label here (0 where the label is ignored) and ``inputs``, of which each tensor
    has one row per token here; it returns a sum, which the step divides by its labels.
    """

    loss: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    inputs: Mapping[str, Tensor]
    # Logits are divided by it, as where the tokens were sampled.
    temperature: float = 1.0
    # Whether entropies are wanted beside log-probs; they have no gradient.
    entropies: bool = False

    def change(self, by: Callable[[Tensor], Tensor]) -> TokenObjective:
        return replace(self, inputs={name: by(tensor) for name, tensor in self.inputs.items()})


@dataclass(frozen=True)
class Batch:
    """Documents one after the other; on a context-parallel rank, its chunks of each of them."""

    tokens_S: Tensor
    labels_S: Tensor
    # Inside the token's own document.
    positions_S: Tensor
    # Of every document of the whole microbatch, and how many documents each microbatch that lies here has.
    lengths: tuple[int, ...]
    documents_per_microbatch: tuple[int, ...]
    # Over how many ranks each microbatch is sharded: its documents over context ranks, then each shard over tp.
    context_size: int
    tensor_size: int
    # Of the whole step, over all ranks and microbatches: the divisors of the loss and of the balance losses.
    step_labels: int
    step_tokens: int
    # Sequences with at least one real token, the divisor of the balance loss per sequence; None where it is not needed.
    step_sequences: int | None = None
    # What the losses of the step are multiplied by before the backward pass, and its gradients divided by after it.
    loss_scale: float = 1.0
    # Which context shard of the microbatch this is; None where all of it is here.
    context_index: int | None = None
    # False for padding tokens; None where there are none.
    real_S: Tensor | None = None
    # For each MTP module, and how many labels of the whole step count there.
    ahead: tuple[Ahead, ...] = ()
    step_labels_ahead: tuple[int, ...] = ()
    objective: TokenObjective | None = None
    # The experts that routers shall take, of the whole microbatch: per token, MoE layer of the model and assignment.
    # -1: as the router itself decides.
    experts_TMK: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens_S.shape[0]

    @property
    def num_microbatches(self) -> int:
        return len(self.documents_per_microbatch)

    @cached_property
    def place_S(self) -> Tensor | None:
        """Indices of this rank's tokens in the whole microbatch; None if all of it is here."""
        if self.context_index is None or self.context_size == 1:
            return None
        return spans_to_index(held_spans(self.lengths, self.context_index, self.context_size), self.tokens_S.device)

    @cached_property
    def order_T(self) -> Tensor:
        """Indices in the microbatch of the tokens of all context ranks, rank after rank."""
        spans = [
            span for index in range(self.context_size) for span in held_spans(self.lengths, index, self.context_size)
        ]
        return spans_to_index(spans, self.tokens_S.device)

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
        """What each rank holds of a microbatch: context shards, each sharded over tp."""
        spans: list[tuple[int, int]] = []
        sizes: list[int] = []
        first = 0
        for lengths in self._lengths_by_microbatch:
            for index in range(self.context_size):
                held = held_spans(lengths, index, self.context_size)
                spans += [(first + start, first + stop) for start, stop in held]
                sizes += shard_sizes(sum(stop - start for start, stop in held), self.tensor_size)
            first += sum(lengths)
        device = self.tokens_S.device
        of_token_T = torch.empty(first, dtype=torch.int64, device=device)
        of_token_T[spans_to_index(spans, device)] = _numbered(tuple(sizes), device)
        return TokenSets(of_token_T, tuple(sizes))

    @cached_property
    def _lengths_by_microbatch(self) -> tuple[tuple[int, ...], ...]:
        ends = tuple(accumulate(self.documents_per_microbatch))
        return tuple(self.lengths[end - count : end] for end, count in zip(ends, self.documents_per_microbatch))

    def _sets(self, sizes: tuple[int, ...]) -> TokenSets:
        return TokenSets(_numbered(sizes, self.tokens_S.device), sizes)


def _numbered(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """0 as often as the first size says, then 1, and so on."""
    repeats = torch.tensor(sizes, dtype=torch.int64, device=device)
    return torch.arange(len(sizes), device=device).repeat_interleave(repeats, output_size=sum(sizes))


def spans_to_index(spans: tuple[tuple[int, int], ...] | list[tuple[int, int]], device: torch.device) -> Tensor:
    parts = [torch.arange(start, stop, device=device) for start, stop in spans]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def whole_batch(
    tokens_T: Tensor,
    labels_T: Tensor,
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
    real_T: Tensor | None = None,
) -> Batch:
    """All documents, one after the other; one microbatch unless given otherwise."""
    device = tokens_T.device
    parts = [torch.arange(length, device=device) for length in lengths]
    positions_T = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)
    return Batch(
        tokens_S=tokens_T,
        labels_S=labels_T,
        positions_S=positions_T,
        lengths=lengths,
        documents_per_microbatch=(len(lengths),) if documents_per_microbatch is None else documents_per_microbatch,
        context_size=context_size,
        tensor_size=tensor_size,
        step_labels=step_labels,
        step_tokens=step_tokens,
        step_sequences=step_sequences,
        real_S=real_T,
        ahead=tuple(mtp_targets(tokens_T, labels_T, lengths, by) for by in range(1, num_ahead + 1)),
        step_labels_ahead=step_labels_ahead,
    )


def mtp_targets(tokens_T: Tensor, labels_T: Tensor, lengths: tuple[int, ...], by: int) -> Ahead:
    """Every token's successor ``by`` places on and that one's label, inside its document; past its end, nothing."""
    ahead_tokens, ahead_labels = torch.zeros_like(tokens_T), torch.full_like(labels_T, IGNORED)
    first = 0
    for length in lengths:
        kept = max(length - by, 0)
        ahead_tokens[first : first + kept] = tokens_T[first + length - kept : first + length]
        ahead_labels[first : first + kept] = labels_T[first + length - kept : first + length]
        first += length
    return Ahead(ahead_tokens, ahead_labels)


def context_shard(batch: Batch, index: int) -> Batch:
    """The chunks of every document that context rank ``index`` holds."""
    share = replace(batch, context_index=index)
    place_S = share.place_S
    if place_S is None:
        return share
    return replace(
        share,
        tokens_S=batch.tokens_S[place_S],
        labels_S=batch.labels_S[place_S],
        positions_S=batch.positions_S[place_S],
        real_S=None if batch.real_S is None else batch.real_S[place_S],
        ahead=tuple(Ahead(ahead.tokens_S[place_S], ahead.labels_S[place_S]) for ahead in batch.ahead),
        objective=None if batch.objective is None else batch.objective.change(lambda tensor: tensor[place_S]),
    )


def move_batch(batch: Batch, move: Callable[[Tensor], Tensor]) -> Batch:
    """The same batch with ``move`` applied to each of its tensors; what it has cached is recomputed there."""
    return replace(
        batch,
        tokens_S=move(batch.tokens_S),
        labels_S=move(batch.labels_S),
        positions_S=move(batch.positions_S),
        real_S=None if batch.real_S is None else move(batch.real_S),
        ahead=tuple(Ahead(move(ahead.tokens_S), move(ahead.labels_S)) for ahead in batch.ahead),
        objective=None if batch.objective is None else batch.objective.change(move),
        experts_TMK=None if batch.experts_TMK is None else move(batch.experts_TMK),
    )


def tensors_of(batch: Batch) -> list[Tensor]:
    """The tensors that ``move_batch`` moves."""
    found = [batch.tokens_S, batch.labels_S, batch.positions_S]
    found += [tensor for tensor in (batch.real_S, batch.experts_TMK) if tensor is not None]
    found += [] if batch.objective is None else batch.objective.inputs.values()
    return found + [tensor for ahead in batch.ahead for tensor in (ahead.tokens_S, ahead.labels_S)]
