"""Normalisation: against torch's own and its reference, and spread over ranks against whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moefold.nn.layers import RMSNorm
from moefold.ops.rmsnorm import rms_norm, rms_norm_reference, rms_norm_spread


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_centred_at_zero_are_added_to_one(dtype: torch.dtype) -> None:
    """Against transformers' norm of Qwen3-Next, which multiplies in float32 before it rounds."""
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").Qwen3NextRMSNorm(32, 1e-5)
    norm = RMSNorm(32, 1e-5, scale="one_plus_weight")
    x, grad = _input(5, 32, dtype=dtype), _input(6, 32, dtype=dtype).detach()[:5]
    weight = 0.1 * _input(32, dtype=torch.float32).detach()
    for module in (norm, theirs):
        module.weight.data.copy_(weight)
    bound = 0.01 if dtype == torch.bfloat16 else 1e-6
    _near(norm(x), theirs(x), bound)
    grads = [torch.autograd.grad(module(x), (x, module.weight), grad) for module in (norm, theirs)]
    for mine, reference in zip(*grads, strict=True):
        _near(mine, reference, bound)


@pytest.mark.parametrize(
    ("shape", "dtype", "rtol"),
    [
        ((7, 12), torch.float64, 1e-12),
        ((5, 3, 16), torch.float64, 1e-12),
        ((0, 12), torch.float64, 0.0),
        ((64, 96), torch.float32, 1e-5),
        ((64, 4, 32), torch.bfloat16, 0.02),
    ],
)
def test_equals_its_reference_in_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, rtol: float) -> None:
    x, weight, grad = _input(*shape, dtype=dtype), _input(shape[-1], dtype=torch.float32), _input(*shape).to(dtype)
    if dtype == torch.float64:
        weight = weight.detach().double().requires_grad_()
    ours, reference = rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6, shape[-1])
    _near(ours, reference, rtol)
    both = (torch.autograd.grad(out, (x, weight), grad.detach()) for out in (ours, reference))
    for mine, reference in zip(*both, strict=True):
        assert mine.dtype == reference.dtype
        _near(mine, reference, rtol)


def _near(ours: torch.Tensor, reference: torch.Tensor, rtol: float) -> None:
    assert float((ours.detach().double() - reference.detach().double()).norm()) <= rtol * float(
        reference.detach().double().norm()
    )


def test_gradients_of_a_narrow_input_are_no_further_from_the_exact_ones_than_those_of_the_reference() -> None:
    x, weight, grad = _input(256, 64, dtype=torch.bfloat16), _input(64, dtype=torch.float32), _input(256, 64).detach()
    wide = [t.detach().double().requires_grad_() for t in (x, weight.bfloat16())]
    exact = torch.autograd.grad(rms_norm_reference(*wide, 1e-6, 64), wide, grad.bfloat16().double())
    errors = []
    for norm in (rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6, 64)):
        found = torch.autograd.grad(norm, (x, weight), grad.bfloat16())
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)])
    assert all(mine <= 1.01 * reference for mine, reference in zip(*errors, strict=True))


def test_the_input_and_one_number_per_row_are_kept() -> None:
    x, weight, kept = _input(6, 8, dtype=torch.bfloat16), _input(8, dtype=torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
    assert sorted(kept) == sorted((x.nbytes, weight.nbytes, 6 * 4))


def test_two_ranks_that_hold_equal_halves_equal_the_whole() -> None:
    """What each would hear from the other is what it has itself."""
    x, weight, grad = _input(6, 4), _input(4), _input(6, 4).detach()
    doubled = (torch.cat((x, x), dim=1), torch.cat((weight, weight)))
    whole = rms_norm(*doubled, 1e-6)
    half = rms_norm_spread(x, weight, 1e-6, 8, lambda mine: 2 * mine)
    torch.testing.assert_close(half, whole[:, 4:], rtol=1e-13, atol=1e-13)
    found = torch.autograd.grad(half, (x, weight), grad)
    # Both halves are x, so the whole hands it two equal gradients.
    expected = torch.autograd.grad(whole, (x, weight), torch.cat((grad, grad), dim=1))
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(2 * mine, reference, rtol=1e-12, atol=1e-12)
