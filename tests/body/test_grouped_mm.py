from __future__ import annotations

import pytest
import torch

from moefold.nn.matmul_kernels import GROUPED_MATMULS, grouped, sequential

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 7], [0, 0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("host", [False, True])
def test_sequential_applies_each_row_to_its_own_expert(counts: list[int], host: bool) -> None:
    rows = torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    out = sequential(rows, weight, torch.tensor(counts), counts if host else None)
    of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    expected = torch.einsum("rd,rfd->rf", rows, weight[of_row])
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, (rows, weight), upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (rows, weight), upstream))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_equals_sequential(counts: list[int], dtype: torch.dtype) -> None:
    rows = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, 16, dtype=dtype, requires_grad=True)
    expected = sequential(rows, weight, torch.tensor(counts), counts)
    out = grouped(rows, weight, torch.tensor(counts), None)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, (rows, weight), upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (rows, weight), upstream))
    assert (ours[1][torch.tensor(counts) == 0] == 0).all()


@pytest.mark.parametrize("name", GROUPED_MATMULS)
def test_no_rows_at_all_still_reach_the_backward_pass(name: str) -> None:
    rows = torch.zeros(0, 8, requires_grad=True)
    weight = torch.randn(2, 8, 8, requires_grad=True)
    out = GROUPED_MATMULS[name](rows, weight, torch.tensor([0, 0]), [0, 0])
    out.backward(torch.ones_like(out))
    assert weight.grad is not None and (weight.grad == 0).all()
    assert rows.grad is not None and rows.grad.shape == (0, 8)
