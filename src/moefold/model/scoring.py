"""How likely a model finds tokens that are given: the base of perplexity and of evaluation harnesses.

A token is predicted from at most ``context`` tokens before it. A long text is cut into windows: each predicts the next
``stride`` tokens, and sees as much of what came before as fits. Every token but a text's first is predicted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moefold.model.decoder import Decoder
from moefold.model.generation import batch_of, refuse_unknown_tokens

# Tokens [start, start + length) of a text.
Read = Callable[[int, int], Sequence[int]]
# Whether each of these tokens counts.
Mask = Callable[[int, int], np.ndarray]
# So many rows of logits at a time: a vocabulary is wide.
_ROWS = 1024


class Scored(NamedTuple):
    """Of the predicted tokens of one window: their logprobs, and whether each was the likeliest."""

    logprobs: Tensor
    likeliest: Tensor


class Window(NamedTuple):
    """Tokens [start, end) of a text, of which [first, end) are predicted."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class Perplexity:
    """Over ``tokens`` predicted tokens: the mean of -logprob in nats."""

    loss: float
    tokens: int
    likeliest: int

    @property
    def perplexity(self) -> float:
        return exp(min(self.loss, 700.0))

    @property
    def accuracy(self) -> float:
        return self.likeliest / max(self.tokens, 1)


@torch.no_grad()
def score(decoder: Decoder, texts: Sequence[Sequence[int]], firsts: Sequence[int]) -> list[Scored]:
    """For each text: its tokens from ``firsts`` on, which is at least 1, each predicted by those before it."""
    device = decoder.head_weight.device
    refuse_unknown_tokens(texts, len(decoder.head_weight))
    batch = batch_of([text[:-1] for text in texts], device)
    starts = [sum(len(text) - 1 for text in texts[:number]) for number in range(len(texts))]
    rows = [start + row for start, text, first in zip(starts, texts, firsts) for row in range(first - 1, len(text) - 1)]
    targets = torch.tensor([token for text, first in zip(texts, firsts) for token in text[first:]], device=device)
    rows_P = torch.tensor(rows, dtype=torch.int64, device=device)
    parts = list(zip(decoder.logits_in_parts(batch, rows_P, _ROWS), targets.split(_ROWS)))
    found = [
        (logits.float().log_softmax(-1).gather(1, at[:, None])[:, 0], logits.argmax(-1) == at) for logits, at in parts
    ]
    counts = [len(text) - first for text, first in zip(texts, firsts)]
    logprobs, likeliest = (torch.cat([one[number] for one in found]).split(counts) for number in (0, 1))
    return [Scored(*one) for one in zip(logprobs, likeliest, strict=True)]


def windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Cover tokens [1, num_tokens) once each; a window has at most ``context`` tokens beside its last."""
    for first in range(1, num_tokens, stride):
        end = min(first + stride, num_tokens)
        yield Window(max(0, end - 1 - context), first, end)


def perplexity(
    decoder: Decoder,
    read: Read,
    cut: Iterable[Window],
    batch: int = 1,
    on_window: Callable[[int], None] | None = None,
    counted: Mask | None = None,
) -> Perplexity:
    """Of all windows, ``batch`` at a time; ``on_window`` is called with the number of windows done. ``counted`` says
    which tokens count when they are predicted; without it all do.
    """
    total, tokens, likeliest, done = 0.0, 0, 0, 0
    rest = iter(cut)
    while several := list(islice(rest, batch)):
        texts = [read(window.start, window.end - window.start) for window in several]
        found = score(decoder, texts, [window.first - window.start for window in several])
        for window, (logprobs, likely) in zip(several, found, strict=True):
            if counted is not None:
                mask = torch.as_tensor(counted(window.first, window.end - window.first), device=logprobs.device)
                logprobs, likely = logprobs[mask], likely[mask]
            total -= float(logprobs.double().sum())
            tokens += len(logprobs)
            likeliest += int(likely.sum())
        done += len(several)
        if on_window is not None:
            on_window(done)
    return Perplexity(total / max(tokens, 1), tokens, likeliest)
