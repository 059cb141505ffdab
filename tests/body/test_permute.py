from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefold.ops.permute import add_empty_row, group_by_expert, group_by_loop, group_padded, put_back, take_rows

EXPERTS = 5


def draw(num_tokens: int, dropping: bool) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(num_tokens)
    expert_tK = torch.rand(num_tokens, EXPERTS - 1).argsort(1)[:, :3]  # the last expert gets nothing
    return expert_tK, (torch.rand(num_tokens, 3) < 0.6) if dropping else None


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("dropping", [False, True])
def test_groups_equal_the_loop(num_tokens: int, dropping: bool) -> None:
    expert, kept = draw(num_tokens, dropping)
    expected = group_by_loop(expert, kept, EXPERTS)
    groups = group_by_expert(expert, kept, EXPERTS)
    assert [part.tolist() for part in groups.choice_N.split(groups.rows_per_expert_E.tolist())] == expected
    assert groups.token_N.tolist() == [choice // 3 for group in expected for choice in group]


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("capacity", [1, 4, 20])
def test_padded_groups_are_the_same_rows_with_empty_slots(num_tokens: int, dropping: bool, capacity: int) -> None:
    expert, kept = draw(num_tokens, dropping)
    groups = group_padded(expert, kept, EXPERTS, capacity)
    found = groups.choice_P.view(EXPERTS, capacity).tolist()
    for slots, choices in zip(found, group_by_loop(expert, kept, EXPERTS), strict=True):
        assert slots == (choices + [3 * num_tokens] * capacity)[:capacity]
    assert torch.equal(groups.filled_P, groups.choice_P < 3 * num_tokens)
    assert torch.equal(groups.token_P[~groups.filled_P], torch.full_like(groups.token_P[~groups.filled_P], num_tokens))


def test_put_back_is_the_gradient_of_take_rows() -> None:
    expert, kept = draw(13, True)
    groups = group_by_expert(expert, kept, EXPERTS)
    x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    rows = take_rows(x, groups.token_N)
    upstream = torch.randn_like(rows)
    (grad,) = torch.autograd.grad(rows, x, upstream)
    torch.testing.assert_close(grad, put_back(upstream, groups.token_N, 13))
    by_loop = torch.zeros_like(x)
    for row, token in enumerate(groups.token_N.tolist()):
        by_loop[token] += upstream[row]
    torch.testing.assert_close(grad, by_loop, rtol=0, atol=0)


def test_empty_slots_read_zeros_and_return_nothing() -> None:
    expert, kept = draw(13, True)
    groups = group_padded(expert, kept, EXPERTS, 20)
    x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    rows = take_rows(add_empty_row(x), groups.token_P)
    assert (rows[~groups.filled_P] == 0).all()
    home = put_back(rows, groups.token_P, 14)[:13]
    assert kept is not None
    torch.testing.assert_close(home, x * kept.sum(1, keepdim=True))
    home.sum().backward()
    torch.testing.assert_close(x.grad, kept.sum(1, keepdim=True).expand(13, 4).double())
