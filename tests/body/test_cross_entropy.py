"""Chunked cross entropy against full logits: values, gradients, and what is kept for backward."""

from __future__ import annotations

import pytest
import torch

from moefold.ops.cross_entropy import vocab_stats, vocab_stats_reference


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(shape[0])).requires_grad_()


@pytest.mark.parametrize("chunk", [1, 4, 7, 23, 100])
def test_chunks_equal_full_logits(chunk: int) -> None:
    x, weight = _random(9, 6), _random(23, 6)
    # Targets outside these rows: of another rank's vocabulary, or of no vocabulary at all.
    target = torch.tensor([0, 22, 5, -100, 23, 7, -1, 400, 5])
    grads = [_random(9).detach(), _random(9).detach().flip(0)]
    ours, reference = vocab_stats(x, weight, target, chunk), vocab_stats_reference(x, weight, target)
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert (ours[1][[3, 4, 6, 7]] == 0).all()
    our_grads, reference_grads = (torch.autograd.grad(out, (x, weight), grads) for out in (ours, reference))
    for a, b in zip(our_grads, reference_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_ignored_tokens_get_no_gradient() -> None:
    x, weight = _random(4, 6), _random(11, 6)
    labels = torch.tensor([3, -100, 10, -100])
    lse, target = vocab_stats(x, weight, labels, 4)
    loss = torch.where(labels >= 0, lse - target, 0.0).sum()
    loss.backward()
    expected = torch.nn.functional.cross_entropy(x @ weight.T, labels, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert x.grad is not None and (x.grad[[1, 3]] == 0).all() and (x.grad[[0, 2]] != 0).all()


def test_large_logits_do_not_overflow() -> None:
    x, weight = _random(3, 4), _random(9, 4).detach() * 1e4
    lse, _ = vocab_stats(x, weight, torch.tensor([0, 1, 2]), 2)
    torch.testing.assert_close(lse, (x @ weight.T).logsumexp(-1))


def test_narrow_inputs_give_wide_numbers_and_gradients_in_their_own_format() -> None:
    x, weight = _random(8, 16, dtype=torch.bfloat16), _random(33, 16, dtype=torch.float32)
    lse, target = vocab_stats(x, weight, torch.arange(8), 10)
    assert lse.dtype == target.dtype == torch.float32
    (lse - target).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    exact = torch.nn.functional.cross_entropy(x.double() @ weight.double().T, torch.arange(8), reduction="none")
    torch.testing.assert_close((lse - target).double(), exact, rtol=0.05, atol=0.05)


def test_nothing_of_the_size_of_the_logits_is_kept() -> None:
    tokens, vocabulary, kept = 64, 1000, []
    x, weight = _random(tokens, 4), _random(vocabulary, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        vocab_stats(x, weight, torch.zeros(tokens, dtype=torch.long), 100)
    assert sum(kept) == x.numel() + weight.numel() + 2 * tokens
