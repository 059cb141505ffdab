"""Tokens after prompts, drawn one at a time: a batch of any lengths, one process.

    logits of the last token -> temperature, top-k, top-p -> one draw per sequence -> the next forward has that token

Prompts are documents of one batch, so that nothing is padded. A sequence has its own random numbers, which depend on
the seed and on its number alone: what is drawn for it does not depend on the others in the batch. Experts get every
token of every sequence (no capacity), so routing at a position is that of the full forward.

`generate` keeps keys and values (`attention/kv_cache.py`); `generate_reference` computes every text from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moefold.attention.kv_cache import KVCache
from moefold.errors import DataError
from moefold.model.decoder import Decoder
from moefold.nn.batch import Batch, whole_batch

Prompts = Sequence[Sequence[int]]
# Called with the tokens of a step, one per sequence; None for sequences that have ended.
OnStep = Callable[[list[int | None]], None]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits. Temperature 0 is the likeliest token; top_k 0 keeps all."""

    temperature: float = 1.0
    top_k: int = 0
    # The likeliest tokens whose probs add up to this; the one that crosses it is kept.
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Continuation:
    """What followed one prompt. ``logprobs`` are the model's own, at temperature 1 and over the whole vocabulary."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Whether a stop token ended it; it is the last of ``tokens``.
    stopped: bool = False


def generate(
    decoder: Decoder,
    cache: KVCache,
    prompts: Prompts,
    max_new: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    stop: Set[int] = frozenset(),
    on_step: OnStep | None = None,
) -> list[Continuation]:
    """At most ``max_new`` tokens after each prompt; a token of ``stop`` ends a sequence."""
    refuse_unknown_tokens(prompts, len(decoder.head_weight))
    cache.begin(len(prompts), max(map(len, prompts)) + max_new)
    try:
        return _draw(_CachedLogits(decoder, cache, prompts), len(prompts), max_new, sampling, stop, on_step)
    finally:
        cache.begin(0, 0)


def generate_reference(
    decoder: Decoder,
    prompts: Prompts,
    max_new: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    stop: Set[int] = frozenset(),
    on_step: OnStep | None = None,
) -> list[Continuation]:
    """The same without a cache: the whole text again for every token."""
    refuse_unknown_tokens(prompts, len(decoder.head_weight))
    return _draw(_LogitsOfTexts(decoder, prompts), len(prompts), max_new, sampling, stop, on_step)


class _CachedLogits:
    """The logits after every sequence; ``step`` takes the tokens that were drawn."""

    def __init__(self, decoder: Decoder, cache: KVCache, prompts: Prompts) -> None:
        self.decoder, self.cache = decoder, cache
        self.lengths = [len(prompt) for prompt in prompts]
        self.prompts = prompts

    def first(self) -> Tensor:
        self.cache.used = max(self.lengths)
        return last_logits(self.decoder, self.prompts)

    def step(self, tokens: Sequence[int]) -> Tensor:
        batch = batch_of([[token] for token in tokens], self.decoder.head_weight.device)
        at_B = torch.tensor(self.lengths, device=batch.tokens_S.device)
        self.lengths = [length + 1 for length in self.lengths]
        self.cache.used = max(self.lengths)
        return self.decoder.logits(replace(batch, positions_S=at_B))


class _LogitsOfTexts:
    def __init__(self, decoder: Decoder, prompts: Prompts) -> None:
        self.decoder = decoder
        self.texts = [list(prompt) for prompt in prompts]

    def first(self) -> Tensor:
        return last_logits(self.decoder, self.texts)

    def step(self, tokens: Sequence[int]) -> Tensor:
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)
        return last_logits(self.decoder, self.texts)


@torch.no_grad()
def _draw(
    logits: _CachedLogits | _LogitsOfTexts,
    num_sequences: int,
    max_new: int,
    sampling: Sampling,
    stop: Set[int],
    on_step: OnStep | None,
) -> list[Continuation]:
    found = [Continuation() for _ in range(num_sequences)]
    random = [torch.Generator().manual_seed(_seed_of(sampling.seed, number)) for number in range(num_sequences)]
    next_BV = logits.first()
    for step in range(max_new):
        uniform_B = torch.stack([torch.rand((), dtype=torch.float64, generator=one) for one in random])
        token_B = choose(next_BV, sampling, uniform_B.to(next_BV.device))
        logprob_B = next_BV.float().log_softmax(-1).gather(1, token_B[:, None])[:, 0]
        tokens = token_B.tolist()
        shown: list[int | None] = [None] * num_sequences
        for number, (one, token, logprob) in enumerate(zip(found, tokens, logprob_B.tolist(), strict=True)):
            if not one.stopped:
                one.tokens.append(token)
                one.logprobs.append(logprob)
                one.stopped = token in stop
                shown[number] = token
        if on_step is not None:
            on_step(shown)
        if step + 1 == max_new or all(one.stopped for one in found):
            break
        # A sequence that has ended goes on with its last token, and nothing of it is read.
        next_BV = logits.step(tokens)
    return found


def choose(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> Tensor:
    """[B]: the likeliest token, or where ``uniform_B`` falls among the probs in the order of the vocabulary."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    sums_BV = filtered_probs(logits_BV, sampling).double().cumsum(-1)
    below_B = uniform_B[:, None] * sums_BV[:, -1:]
    return torch.searchsorted(sums_BV, below_B, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)


def filtered_probs(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """[B, V]: the probs at this temperature, 0 outside of top-k and top-p, not normalised again."""
    scaled_BV = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < scaled_BV.shape[-1]:
        least_B1 = scaled_BV.topk(sampling.top_k).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    prob_BV = scaled_BV.softmax(-1)
    if sampling.top_p >= 1:
        return prob_BV
    sorted_BV, order_BV = prob_BV.sort(descending=True, stable=True)
    before_BV = sorted_BV.double().cumsum(-1) - sorted_BV
    kept_BV = torch.zeros_like(prob_BV, dtype=torch.bool).scatter(1, order_BV, before_BV < sampling.top_p)
    return prob_BV.masked_fill(~kept_BV, 0.0)


def last_logits(decoder: Decoder, texts: Prompts) -> Tensor:
    """[B, V]: of each text's last token, by a full forward."""
    batch = batch_of(texts, decoder.head_weight.device)
    ends = torch.tensor([len(text) for text in texts], device=batch.tokens_S.device).cumsum(0) - 1
    return decoder.logits(batch, ends)


def refuse_unknown_tokens(texts: Prompts, vocab_size: int) -> None:
    """The embedding would take any number as zeros, since a rank may hold another part of the vocabulary."""
    for number, text in enumerate(texts):
        for at, token in enumerate(text):
            if not 0 <= token < vocab_size:
                raise DataError(
                    f"text {number}, position {at}: token {token:,} is outside the vocabulary of {vocab_size:,}; use "
                    "the tokenizer that the model was trained with"
                )


def batch_of(texts: Prompts, device: torch.device) -> Batch:
    tokens_T = torch.tensor([token for text in texts for token in text], dtype=torch.int64, device=device)
    lengths = tuple(len(text) for text in texts)
    return whole_batch(
        tokens_T,
        tokens_T,
        lengths,
        step_labels=len(tokens_T),
        step_tokens=len(tokens_T),
        step_sequences=len(lengths),
    )


def _seed_of(seed: int, number: int) -> int:
    """Seeds that are far apart for neighbours, as torch's generators want them."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 1) % 2**63
