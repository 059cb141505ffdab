"""The gradient's norm and its bound, against float64 arithmetic on wide copies."""

from __future__ import annotations

import pytest
import torch

from moefold.optim.optimizer import clip_gradients, sum_of_squares, sums_of_squares


@pytest.mark.parametrize("shape", [(0,), (7,), (4096,), (3, 4099), (2, 64, 300)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_squares_add_up_as_in_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    part = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    rtol = {torch.float64: 1e-14, torch.float32: 2e-7, torch.bfloat16: 3e-6}[dtype]
    torch.testing.assert_close(sum_of_squares(part), part.double().square().sum(), rtol=rtol, atol=0.0)


def test_all_at_once_as_one_by_one() -> None:
    parts = [torch.randn(3, 4099), torch.zeros(0), torch.randn(96, 96)[:, 40:], torch.randn(7).bfloat16()]
    torch.testing.assert_close(sums_of_squares(parts), [sum_of_squares(part) for part in parts], rtol=3e-6, atol=0.0)
    assert sums_of_squares([]) == []


def test_gradients_of_several_dtypes_are_clipped_alike() -> None:
    gradients = [torch.randn(5), torch.randn(3).bfloat16(), torch.randn(2).double()]
    expected = [gradient * torch.tensor(0.4).to(gradient.dtype) for gradient in gradients]
    expected[2] = gradients[2] * 0.4
    clip_gradients(gradients, torch.tensor(5.0, dtype=torch.float64), bound=2.0)
    torch.testing.assert_close(gradients, expected, rtol=0.0, atol=0.0)


def test_parts_that_are_cut_from_others_count_their_own_entries() -> None:
    whole = torch.randn(96, 96, dtype=torch.float64)
    columns = sum_of_squares(whole[:, :40]) + sum_of_squares(whole[:, 40:])
    torch.testing.assert_close(columns, sum_of_squares(whole), rtol=1e-13, atol=0.0)


def test_the_norm_is_bounded_from_above_only() -> None:
    for norm, factor in ((4.0, 0.5), (1.0, 1.0)):
        gradient = torch.tensor([3.0, 4.0])
        clip_gradients([gradient], torch.tensor(norm, dtype=torch.float64), bound=2.0)
        assert torch.equal(gradient, torch.tensor([3.0, 4.0]) * factor)
