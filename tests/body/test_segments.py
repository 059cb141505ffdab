from __future__ import annotations

import pytest
import torch

from moefold.ops.segments import count_keys, rank_within_key, rank_within_key_reference


@pytest.mark.parametrize("num_items", [0, 1, 37])
@pytest.mark.parametrize("with_priority", [False, True])
def test_rank_equals_the_comparison_of_every_pair(num_items: int, with_priority: bool) -> None:
    torch.manual_seed(num_items)
    key = torch.randint(0, 5, (num_items,))
    priority = torch.randint(0, 3, (num_items,)).double() if with_priority else None  # coarse, so that there are ties
    torch.testing.assert_close(rank_within_key(key, 7, priority), rank_within_key_reference(key, priority))


def test_counts_of_all_and_of_some_items() -> None:
    key = torch.tensor([2, 0, 2, 2])
    assert count_keys(key, 4).tolist() == [1, 0, 3, 0]
    assert count_keys(key, 4, torch.tensor([True, False, False, True])).tolist() == [0, 0, 2, 0]


def test_more_segments_than_a_16_bit_key_can_name() -> None:
    key = torch.tensor([70_000, 3, 70_000])
    assert rank_within_key(key, 80_000).tolist() == [0, 0, 1]
