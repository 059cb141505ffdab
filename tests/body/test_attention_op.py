"""Fused attention against its naive twin, and the twin against single sums."""

from __future__ import annotations

import math

import pytest
import torch

from moefold.ops.attention import attend, attend_naive


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) * 100 + shape[-1] + shape[0])
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


# sequences, length, heads, kv heads, qk dim, v dim
SHAPES = {
    "plain": (2, 8, 2, 2, 4, 4),
    "grouped": (2, 9, 6, 2, 4, 4),
    "latent": (3, 7, 4, 4, 6, 4),
    "wide values": (1, 5, 2, 1, 4, 6),
    "one token": (3, 1, 2, 1, 4, 4),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_fused_equals_naive(shape: tuple[int, ...], window: int | None, with_sinks: bool) -> None:
    num_sequences, length, heads, kv_heads, dim, value_dim = shape
    tokens = num_sequences * length
    inputs = [_random(tokens, heads, dim), _random(tokens, kv_heads, dim), _random(tokens, kv_heads, value_dim)]
    sinks = _random(heads) if with_sinks else None
    leaves = [*inputs, sinks] if sinks is not None else inputs
    grad = _random(tokens, heads, value_dim).detach()
    fast = attend(*inputs, num_sequences, 0.3, window, sinks)
    naive = attend_naive(*inputs, num_sequences, 0.3, window, sinks)
    torch.testing.assert_close(fast, naive, rtol=1e-11, atol=1e-12)
    fast_grads, naive_grads = torch.autograd.grad(fast, leaves, grad), torch.autograd.grad(naive, leaves, grad)
    for a, b in zip(fast_grads, naive_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_naive_is_what_the_definition_says() -> None:
    q, k, v, sinks = (_random(*s).detach() for s in ((6, 2, 3), (6, 1, 3), (6, 1, 2), (2,)))
    out = attend_naive(q, k, v, 2, 0.5, 2, sinks)
    for sequence in range(2):
        for token in range(3):
            for head in range(2):
                seen = range(max(0, token - 1), token + 1)
                power = [math.exp(0.5 * float(q[sequence * 3 + token, head] @ k[sequence * 3 + s, 0])) for s in seen]
                total = sum(power) + math.exp(float(sinks[head]))
                expected = sum(p / total * v[sequence * 3 + s, 0] for p, s in zip(power, seen, strict=True))
                torch.testing.assert_close(out[sequence * 3 + token, head], expected)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_fused_writes_no_scores_down(with_sinks: bool) -> None:
    length, sizes = 256, []
    q, k, v = (torch.randn(length, 4, 8, requires_grad=True) for _ in range(3))
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x) or x, lambda x: x):
        attend(q, k, v, 1, 0.3, None, sinks)
    # One mask for all heads may grow with the square of the length; scores would be one such square per head.
    assert max(x.numel() for x in sizes) <= length * (length + 1)
