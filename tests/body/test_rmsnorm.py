"""Normalisation: against torch's own, and spread over ranks against whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.ops.rmsnorm import rms_norm, rms_norm_spread


def _input(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_equals_torch_in_values_and_gradients() -> None:
    x, weight, grad = _input(7, 12), _input(12), _input(7, 12).detach()
    ours, theirs = rms_norm(x, weight, 1e-6), F.rms_norm(x, (12,), weight, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for mine, reference in zip(
        torch.autograd.grad(ours, (x, weight), grad), torch.autograd.grad(theirs, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_a_narrow_input_is_squared_in_float32_and_weighed_in_its_own_format() -> None:
    x, weight = _input(5, 32, dtype=torch.bfloat16), _input(32, dtype=torch.float32)
    wide = x.float()
    expected = weight.bfloat16() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), expected)


def test_two_halves_that_share_their_squares_equal_the_whole() -> None:
    x, weight, grad = _input(6, 8), _input(8), _input(6, 8).detach()
    whole = rms_norm(x, weight, 1e-6)
    halves = []
    for mine, other in ((x[:, :3], x[:, 3:]), (x[:, 3:], x[:, :3])):
        part = weight[:3] if mine.shape[1] == 3 else weight[3:]

        def sum_heads(squares: torch.Tensor, other: torch.Tensor = other) -> torch.Tensor:
            return squares + other.square().sum(-1, keepdim=True)

        halves.append(rms_norm_spread(mine, part, 1e-6, 8, sum_heads))
    spread = torch.cat(halves, dim=1)
    torch.testing.assert_close(spread, whole, rtol=1e-13, atol=1e-13)
    for a, b in zip(
        torch.autograd.grad(spread, (x, weight), grad), torch.autograd.grad(whole, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
