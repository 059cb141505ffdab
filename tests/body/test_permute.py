from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moefold.moe.permute import (
    Grouped,
    count_assignments,
    gather_probs,
    gather_rows,
    group_by_expert,
    group_by_expert_reference,
    group_padded,
    unpermute_rows,
)

EXPERTS = 5


class Drawn(NamedTuple):
    experts: Tensor
    kept: Tensor | None


def draw(num_tokens: int, dropping: bool) -> Drawn:
    torch.manual_seed(num_tokens)
    expert_tK = torch.rand(num_tokens, EXPERTS - 1).argsort(1)[:, :3]  # the last expert gets nothing
    return Drawn(expert_tK, (torch.rand(num_tokens, 3) < 0.6) if dropping else None)


def grouped(routing: Drawn) -> Grouped:
    return group_by_expert(routing, EXPERTS, int(count_assignments(routing, EXPERTS).sum()))


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("dropping", [False, True])
def test_groups_equal_the_loop(num_tokens: int, dropping: bool) -> None:
    routing = draw(num_tokens, dropping)
    expected = group_by_expert_reference(routing, EXPERTS)
    rows_per_expert = count_assignments(routing, EXPERTS).tolist()
    assert rows_per_expert == [len(group) for group in expected]
    groups = group_by_expert(routing, EXPERTS, sum(rows_per_expert))
    assert [part.tolist() for part in groups.assignment_N.split(rows_per_expert)] == expected
    assert groups.token_N.tolist() == [choice // 3 for group in expected for choice in group]


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("capacity", [1, 4, 20])
def test_padded_groups_are_the_same_rows_with_padding(num_tokens: int, dropping: bool, capacity: int) -> None:
    routing = draw(num_tokens, dropping)
    groups = group_padded(routing, EXPERTS, capacity)
    found = groups.assignment_N.view(EXPERTS, capacity).tolist()
    for slots, choices in zip(found, group_by_expert_reference(routing, EXPERTS), strict=True):
        assert slots == (choices + [3 * num_tokens] * capacity)[:capacity]
    assert torch.equal(groups.token_N, groups.assignment_N // 3)


@pytest.mark.parametrize("padded", [False, True])
def test_unpermute_rows_is_the_gradient_of_gather_rows(padded: bool) -> None:
    routing = draw(13, True)
    groups = group_padded(routing, EXPERTS, 20) if padded else grouped(routing)
    x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    rows = gather_rows(x, groups.token_N)
    upstream = torch.randn_like(rows)
    (grad,) = torch.autograd.grad(rows, x, upstream)
    torch.testing.assert_close(grad, unpermute_rows(upstream, groups.token_N, 13))
    by_loop = torch.zeros_like(x)
    for row, token in enumerate(groups.token_N.tolist()):
        if token < 13:
            by_loop[token] += upstream[row]
    torch.testing.assert_close(grad, by_loop, rtol=0, atol=0)


def test_padding_read_zeros_and_return_nothing() -> None:
    routing = draw(13, True)
    assert routing.kept is not None
    groups = group_padded(routing, EXPERTS, 20)
    empty_N = groups.token_N == 13
    x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(13, 3, dtype=torch.float64)
    rows = gather_rows(x, groups.token_N)
    assert (rows[empty_N] == 0).all()
    assert (gather_probs(weight, groups.assignment_N)[empty_N] == 0).all()
    home = unpermute_rows(rows + empty_N[:, None] * 1e9, groups.token_N, 13)
    torch.testing.assert_close(home, x * routing.kept.sum(1, keepdim=True))
    home.sum().backward()
    torch.testing.assert_close(x.grad, routing.kept.sum(1, keepdim=True).expand(13, 4).double())


def test_probs_follow_their_assignments() -> None:
    routing, weight = draw(13, True), torch.rand(13, 3)
    groups = grouped(routing)
    expected = [
        weight.flatten()[choice].item() for group in group_by_expert_reference(routing, EXPERTS) for choice in group
    ]
    assert gather_probs(weight, groups.assignment_N).tolist() == expected
