from __future__ import annotations

import pytest
import torch

from moefold.moe.topk import capacity_of, keep_within_capacity, keep_within_capacity_reference


def test_capacity_is_the_ceiling_and_never_zero() -> None:
    assert capacity_of(10, 1.0, 2, 8) == 3
    assert capacity_of(30, 0.1, 1, 1) == 3  # the float product is 3.0000000000000004
    assert capacity_of(100, 1.1, 1, 10) == 11
    assert capacity_of(0, 1.0, 2, 8) == 1


@pytest.mark.parametrize("with_priority", [False, True])
@pytest.mark.parametrize("sizes", [(13,), (5, 0, 8)])
def test_kept_choices_equal_the_loop(with_priority: bool, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(len(sizes))
    expert = torch.rand(13, 6).argsort(1)[:, :3]
    priority = torch.randint(0, 4, (13, 3)).double() if with_priority else None
    of_token = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    capacities = tuple(2 + i for i in range(len(sizes)))
    kept = keep_within_capacity(expert, priority, of_token, capacities, 6)
    assert torch.equal(kept, keep_within_capacity_reference(expert, priority, of_token, capacities, 6))
    assert not kept.all()


def test_the_least_probable_is_dropped_and_ties_go_by_position() -> None:
    expert, one_set = torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    priority = torch.tensor([[0.2], [0.9], [0.2], [0.5]])
    assert keep_within_capacity(expert, priority, one_set, (3,), 2).flatten().tolist() == [True, True, False, True]
    assert keep_within_capacity(expert, None, one_set, (3,), 2).flatten().tolist() == [True, True, True, False]


def test_no_tokens_is_fine() -> None:
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert keep_within_capacity(none, None, none[:, 0], (1, 1), 4).shape == (0, 2)
