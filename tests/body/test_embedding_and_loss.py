"""Embedding and loss: whole against torch, and the vocabulary's shares against the whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.body.model_inputs import batch_of, fill
from torch import Tensor, nn

from moefold.nn.parallel_interfaces import LocalTokens, LocalVocab
from moefold.nn.vocab import Embedding, LanguageLoss


class _VocabFrom(LocalVocab):
    """Rows from ``start`` on are here."""

    def __init__(self, start: int) -> None:
        self.start = start

    def first_row(self, num_rows: int) -> int:
        return self.start


def test_each_share_of_the_vocabulary_finds_its_own_tokens() -> None:
    batch = batch_of(2, 7, 11)
    whole = Embedding(11, 4, torch.float64, LocalTokens(), LocalVocab())
    fill(whole)
    parts = []
    for start, end in ((0, 4), (4, 11)):
        part = Embedding(end - start, 4, torch.float64, LocalTokens(), _VocabFrom(start))
        part.weight = nn.Parameter(whole.weight[start:end].detach().clone())
        parts.append(part)
    expected = whole(batch.tokens_S)
    assert torch.equal(expected, whole.weight[batch.tokens_S].double())
    assert torch.equal(parts[0](batch.tokens_S) + parts[1](batch.tokens_S), expected)
    grad = torch.randn(14, 4, dtype=torch.float64)
    for module in (whole, *parts):
        module(batch.tokens_S).backward(grad)
    joined = torch.cat([part.weight.grad for part in parts])
    torch.testing.assert_close(joined, whole.weight.grad)


def test_activations_start_in_the_compute_format() -> None:
    embedding = Embedding(11, 4, torch.bfloat16, LocalTokens(), LocalVocab())
    fill(embedding)
    assert embedding(batch_of(1, 5, 11).tokens_S).dtype == torch.bfloat16
    assert embedding.weight.dtype == torch.float32


def test_the_loss_is_the_sum_over_labelled_tokens() -> None:
    batch = batch_of(3, 5, 11)
    x, weight = _random(15, 6), _random(11, 6)
    loss = LanguageLoss(LocalTokens(), LocalVocab(), chunk=4)(x, weight, batch.labels_S, batch)
    expected = F.cross_entropy(x @ weight.T, batch.labels_S, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True):
        torch.testing.assert_close(a, b)


class _OtherHalf(_VocabFrom):
    """A rank that is told what the rank with the other rows found."""

    def __init__(self, start: int, other_lse_T: Tensor, other_target_T: Tensor) -> None:
        super().__init__(start)
        self.other_lse_T = other_lse_T
        self.other_target_T = other_target_T

    def merge_logsumexp(self, lse_T: Tensor) -> Tensor:
        return torch.logaddexp(lse_T, self.other_lse_T)

    def merge_sum(self, x_T: Tensor) -> Tensor:
        return x_T + self.other_target_T


def test_a_share_of_the_vocabulary_gives_the_same_loss() -> None:
    batch = batch_of(3, 5, 11)
    x, weight = _random(15, 6), _random(11, 6)
    expected = LanguageLoss(LocalTokens(), LocalVocab())(x, weight, batch.labels_S, batch)
    logits = x @ weight.T
    for mine, other in ((slice(0, 4), slice(4, 11)), (slice(4, 11), slice(0, 4))):
        there = (batch.labels_S >= other.start) & (batch.labels_S < other.stop)
        other_target = torch.where(there, logits.gather(1, batch.labels_S.clamp(min=0)[:, None])[:, 0], 0.0)
        vocab = _OtherHalf(mine.start, logits[:, other].logsumexp(-1), other_target)
        loss = LanguageLoss(LocalTokens(), vocab)(x, weight[mine], batch.labels_S, batch)
        torch.testing.assert_close(loss, expected)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[0])).requires_grad_()
