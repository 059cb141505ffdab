"""Fused attention against its naive reference, and the reference against single sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moefold.attention.sdpa import attend, attend_reference


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) * 100 + shape[-1] + shape[0])
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


# lengths of documents, heads, kv heads, qk dim, v dim
SHAPES = {
    "plain": ((8, 8), 2, 2, 4, 4),
    "grouped": ((9, 9), 6, 2, 4, 4),
    "latent": ((7, 7, 7), 4, 4, 6, 4),
    "wide values": ((5,), 2, 1, 4, 6),
    "one token": ((1, 1, 1), 2, 1, 4, 4),
    "bin_packed": ((5, 1, 9, 0, 5, 2), 4, 2, 4, 4),
    "packed latent": ((3, 12, 3, 1), 2, 2, 6, 4),
    "longer than a piece": ((150, 3, 301, 150), 2, 1, 4, 4),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_fused_equals_naive(shape: tuple[Any, ...], window: int | None, with_sinks: bool) -> None:
    lengths, heads, kv_heads, dim, value_dim = shape
    tokens = sum(lengths)
    inputs = [_random(tokens, heads, dim), _random(tokens, kv_heads, dim), _random(tokens, kv_heads, value_dim)]
    sinks = _random(heads) if with_sinks else None
    leaves = [*inputs, sinks] if sinks is not None else inputs
    grad = _random(tokens, heads, value_dim).detach()
    fast = attend(*inputs, lengths, 0.3, window, sinks)
    naive = attend_reference(*inputs, lengths, 0.3, window, sinks)
    torch.testing.assert_close(fast, naive, rtol=1e-11, atol=1e-12)
    fast_grads, naive_grads = torch.autograd.grad(fast, leaves, grad), torch.autograd.grad(naive, leaves, grad)
    for a, b in zip(fast_grads, naive_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_naive_is_what_the_definition_says() -> None:
    q, k, v, sinks = (_random(*s).detach() for s in ((6, 2, 3), (6, 1, 3), (6, 1, 2), (2,)))
    out = attend_reference(q, k, v, (3, 3), 0.5, 2, sinks)
    for sequence in range(2):
        for token in range(3):
            for head in range(2):
                seen = range(max(0, token - 1), token + 1)
                power = [math.exp(0.5 * float(q[sequence * 3 + token, head] @ k[sequence * 3 + s, 0])) for s in seen]
                total = sum(power) + math.exp(float(sinks[head]))
                expected = sum(p / total * v[sequence * 3 + s, 0] for p, s in zip(power, seen, strict=True))
                torch.testing.assert_close(out[sequence * 3 + token, head], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_fused_equals_naive_in_short_formats(dtype: torch.dtype, window: int | None) -> None:
    lengths = (5, 9, 5, 1)
    q, k, v = (_random(sum(lengths), heads, 8).detach().to(dtype) for heads in (4, 2, 2))
    sinks = _random(4).detach()
    fast, naive = attend(q, k, v, lengths, 0.3, window, sinks), attend_reference(q, k, v, lengths, 0.3, window, sinks)
    assert fast.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(fast, naive, rtol=tolerance, atol=tolerance)


def test_no_tokens_leave_zeros_behind_and_not_nothing() -> None:
    leaves = [_random(0, 4, 6), _random(0, 2, 6), _random(0, 2, 4), _random(4)]
    for op in (attend, attend_reference):
        out = op(*leaves[:3], (), 0.3, None, leaves[3])
        assert out.shape == (0, 4, 4)
        for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            torch.testing.assert_close(grad, torch.zeros_like(leaf))


def test_documents_do_not_see_each_other() -> None:
    lengths = (4, 7, 2)
    q, k, v = (_random(13, 2, 4).detach() for _ in range(3))
    poisoned_k, poisoned_v = k.clone(), v.clone()
    poisoned_k[4:11] = poisoned_v[4:11] = torch.nan
    out = attend(q, poisoned_k, poisoned_v, lengths, 0.3)
    torch.testing.assert_close(out[:4], attend(q[:4], k[:4], v[:4], (4,), 0.3))
    torch.testing.assert_close(out[11:], attend(q[11:], k[11:], v[11:], (2,), 0.3))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_fused_writes_no_scores_down(with_sinks: bool) -> None:
    length, sizes = 256, []
    q, k, v = (torch.randn(length, 4, 8, requires_grad=True) for _ in range(3))
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x) or x, lambda x: x):
        attend(q, k, v, (length,), 0.3, None, sinks)
    # One mask for all heads may grow with the square of the length; scores would be one such square per head.
    assert max(x.numel() for x in sizes) <= length * (length + 1)


def test_a_window_costs_what_it_shows() -> None:
    """Nothing that a windowed call keeps grows with the square of the length."""
    length, window, sizes = 4096, 64, []
    q, k, v = (torch.randn(length, 1, 4, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x) or x, lambda x: x):
        attend(q, k, v, (length,), 0.3, window)
    assert max(x.numel() for x in sizes) <= 2 * length * 4 + length * window


def test_narrow_values_are_not_padded_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is no CPU; without GQA, which the kernels that take them do not have."""
    given = []

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        given.append((v.shape[-1], options["enable_gqa"]))
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for kv_heads in (4, 2):
        q, k, v = (
            torch.empty(9, heads, dim, device="meta") for heads, dim in ((4, 192), (kv_heads, 192), (kv_heads, 128))
        )
        assert attend(q, k, v, (9,), 0.3).shape == (9, 4, 128)
    assert given == [(128, False), (192, True)]


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_torch_has_kernels_for_gpus_that_take_narrow_values(name: str) -> None:
    """Their shape functions; its flash kernel has one head dim for all."""
    q, k, v = (torch.empty(1, 4, 64, dim, device="meta", dtype=torch.bfloat16) for dim in (192, 192, 128))
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    out, *_ = op(q, k, v, None, True, 0.0, True)
    assert out.shape == (1, 4, 64, 128)
