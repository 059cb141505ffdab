"""Rollouts, and how they become the packed batches of a step.

A rollout is a prompt and a sampled answer in one row of tokens. All its values are per token and belong to the token of
the same index: its log-prob is that of the token given those before it. In a batch the label of a token is the next
one, so values move one place to the front here, and nowhere else.

Rollouts of a data-parallel rank are packed into microbatches of at most ``max_tokens`` tokens, longest first, each into
the emptiest one. Ranks of other data-parallel groups have other rollouts; all run the same number of microbatches, and
one with fewer has empty ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.parameters import moe_block_names
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.nn.batch import IGNORED, Ahead, Batch, TokenObjective, whole_batch
from moefold.rl.policy_losses import Normalization

PER_TOKEN = ("advantages", "old_logprobs", "ref_logprobs", "weights")


@dataclass(frozen=True)
class Rollout:
    """Tokens and what is known of each; ``counted`` is False for the prompt's and wherever a token is not trained on.

    ``weights`` multiply the loss of a token (1 unless given): a correction for tokens that another engine sampled, say.
    ``experts`` are recorded assignments, [tokens, MoE layers, top_k]; -1 where there is no record.

    >>> import torch
    >>> from moefold.rl import Rollout
    >>> Rollout(torch.tensor([5, 6, 7]), torch.tensor([False, True, True])).num_counted
    2
    """

    tokens: Tensor
    counted: Tensor
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    experts: Tensor | None = None

    @property
    def num_counted(self) -> int:
        """The first token has no log-prob, so it never counts."""
        return int(self.counted[1:].sum())


@dataclass(frozen=True)
class TrainedStep:
    """What a step did: the loss, the gradient's norm before clipping, and means over counted tokens."""

    loss: float
    grad_norm: float
    tokens: int
    # The share of tokens whose ratio is clipped, KL(old || now), and the mean ratio; empty without old log-probs.
    metrics: Mapping[str, float]
    skipped: str | None = None
    # That gradients were computed under, with `precision.compute: float16`.
    loss_scale: float = 1.0


@dataclass(frozen=True)
class ScoredRollouts:
    """Per rollout: log-probs of its tokens (0 for the first), and on request entropies, and the experts of routers."""

    logprobs: list[Tensor]
    entropies: list[Tensor] | None = None
    experts: list[Tensor] | None = None


def check_rollouts(rollouts: Sequence[Rollout], reads: Sequence[str], run: RunConfig, max_tokens: int) -> None:
    """Raises all problems at once."""
    found: list[Problem] = []
    for number, rollout in enumerate(rollouts):
        size, where = rollout.tokens.shape[0], f"rollouts[{number}]"
        if rollout.tokens.dim() != 1 or size < 2:
            found.append(Problem(f"{where}.tokens", f"has shape {tuple(rollout.tokens.shape)}", "two tokens at least"))
        if size > max_tokens:
            fix = f"cut it, or set max_tokens to {size} at least"
            found.append(Problem(f"{where}.tokens", f"{size} tokens are more than max_tokens {max_tokens}", fix))
        if size and not 0 <= int(rollout.tokens.min()) <= int(rollout.tokens.max()) < run.model.vocab_size:
            found.append(Problem(f"{where}.tokens", f"are not all within the vocabulary of {run.model.vocab_size}"))
        for name in ("counted", *PER_TOKEN):
            values = getattr(rollout, name)
            if values is None and name in reads:
                found.append(Problem(f"{where}.{name}", "is missing, and the loss reads it"))
            elif values is not None and values.shape != (size,):
                found.append(Problem(f"{where}.{name}", f"has shape {tuple(values.shape)} for {size} tokens"))
        found += _expert_problems(rollout, where, run)
    if found:
        raise ConfigError(*found)


def _expert_problems(rollout: Rollout, where: str, run: RunConfig) -> list[Problem]:
    experts, moe = rollout.experts, run.model.moe
    if experts is None:
        return []
    if moe is None:
        return [Problem(f"{where}.experts", "the model has no MoE layer")]
    wanted = (rollout.tokens.shape[0], len(moe_block_names(run.model)), moe.top_k)
    if experts.shape != wanted:
        return [Problem(f"{where}.experts", f"has shape {tuple(experts.shape)}", f"[tokens, MoE layers, K] = {wanted}")]
    if experts.numel() and not -1 <= int(experts.min()) <= int(experts.max()) < moe.num_experts:
        return [Problem(f"{where}.experts", f"are not all from -1 to {moe.num_experts - 1}")]
    ordered = experts.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        return [Problem(f"{where}.experts", "has the same expert twice for a token")]
    if bool(((experts < 0).any(-1) != (experts < 0).all(-1)).any()):
        return [
            Problem(f"{where}.experts", "has -1 beside experts for a token", "-1 for all K of a token, or for none")
        ]
    return []


def pack(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Numbers of rollouts per microbatch; as few microbatches as the longest-first rule finds."""
    bins: list[list[int]] = []
    held: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        open_bins = [i for i in range(len(bins)) if held[i] + sizes[number] <= max_tokens]
        if not open_bins:
            bins.append([])
            held.append(0)
            open_bins = [len(bins) - 1]
        emptiest = min(open_bins, key=lambda i: held[i])
        bins[emptiest].append(number)
        held[emptiest] += sizes[number]
    return bins


class StepCounts(NamedTuple):
    """Of the whole step, over all ranks: the divisor of the loss, the tokens, and the sequences."""

    divisor: int
    tokens: int
    sequences: int


def local_counts(rollouts: Sequence[Rollout], normalization: Normalization) -> StepCounts:
    """Of these rollouts; those without a counted token add nothing to the divisor."""
    counted = [rollout.num_counted for rollout in rollouts]
    return StepCounts(
        sum(normalization.divisor(tokens) for tokens in counted if tokens),
        sum(rollout.tokens.shape[0] for rollout in rollouts),
        len(rollouts),
    )


def microbatch(rollouts: Sequence[Rollout], run: RunConfig, objective: TokenObjective, counts: StepCounts) -> Batch:
    """Rollouts one after the other; the whole microbatch, before it is cut over context-parallel ranks.

    Labels of MTP modules are ignored: their losses are 0, and they are not trained.
    """
    nothing, lengths = torch.zeros(0, dtype=torch.int64), tuple(rollout.tokens.shape[0] for rollout in rollouts)
    batch = whole_batch(
        torch.cat([nothing, *(rollout.tokens for rollout in rollouts)]),
        torch.cat([nothing, *(to_front(rollout.tokens, IGNORED) for rollout in rollouts)]),
        lengths,
        context_size=run.parallel.cp,
        tensor_size=run.parallel.tp,
        step_labels=max(counts.divisor, 1),
        step_tokens=max(counts.tokens, 1),
        step_sequences=max(counts.sequences, 1),
        num_ahead=run.model.num_mtp,
        step_labels_ahead=(1,) * run.model.num_mtp,
    )
    ahead = tuple(Ahead(each.tokens_S, torch.full_like(each.labels_S, IGNORED)) for each in batch.ahead)
    return replace(batch, ahead=ahead, objective=objective, experts_TMK=_recorded(rollouts))


def loss_inputs(
    rollouts: Sequence[Rollout], reads: Sequence[str], normalization: Normalization, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What a loss reads, each [T], at the places of the labels; weights are 0 where a token is not counted."""
    inputs = {
        name: _joined([to_front(getattr(rollout, name).to(dtype), 0.0) for rollout in rollouts], dtype)
        for name in reads
    }
    weights = []
    for rollout in rollouts:
        each = normalization.weight(max(rollout.num_counted, 1))
        own = rollout.counted.to(dtype) * each
        weights.append(to_front(own if rollout.weights is None else own * rollout.weights.to(dtype), 0.0))
    return inputs | {"weights": _joined(weights, dtype)}


def to_front(values: Tensor, last: float) -> Tensor:
    """Each value at the place of the token before; the last token predicts nothing here."""
    return torch.cat([values[1:], values.new_full((1, *values.shape[1:]), last)])


def to_back(values: Tensor) -> Tensor:
    """The inverse; the first token has no log-prob and gets 0."""
    return torch.cat([values.new_zeros(1, *values.shape[1:]), values[:-1]])


def per_rollout(rollouts: Sequence[Rollout], packed: Sequence[Sequence[int]], whole: Sequence[Tensor]) -> list[Tensor]:
    """Rows of microbatches, back to the rollouts that they are of, on the host."""
    found: dict[int, Tensor] = {}
    for members, values in zip(packed, whole, strict=True):
        sizes = [rollouts[number].tokens.shape[0] for number in members]
        found.update(zip(members, values.cpu().split(sizes), strict=True))
    return [found[number] for number in range(len(rollouts))]


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *parts])


def _recorded(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Recorded experts of all tokens, -1 for rollouts without a record; None if there is none at all."""
    found = [rollout.experts for rollout in rollouts if rollout.experts is not None]
    if not found:
        return None
    parts = [
        found[0].new_full((rollout.tokens.shape[0], *found[0].shape[1:]), -1)
        if rollout.experts is None
        else rollout.experts
        for rollout in rollouts
    ]
    return torch.cat(parts).long()
