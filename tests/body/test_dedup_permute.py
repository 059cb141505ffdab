"""Rows go once to every place that wants them, and sums of what comes back are exact; gradients are each other's."""

from __future__ import annotations

import pytest
import torch

from moefold.moe.dedup_permute import (
    assignment_map,
    gather_tokens,
    reduce_tokens,
    token_rank_map,
    token_rank_mask,
)


@pytest.mark.parametrize(("rows", "places", "choices"), [(0, 3, 2), (1, 1, 1), (7, 4, 3), (50, 3, 8), (20, 8, 1)])
@pytest.mark.parametrize("dropping", [False, True])
def test_pairs_equal_a_loop(rows: int, places: int, choices: int, dropping: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    place = torch.randint(places, (rows, choices), generator=generator)
    kept = torch.rand(rows, choices, generator=generator) < 0.4 if dropping else None
    wanted = token_rank_mask(place, kept, places)
    wishes = {
        (int(place[row, k]), row) for row in range(rows) for k in range(choices) if kept is None or bool(kept[row, k])
    }
    pairs = token_rank_map(wanted, len(wishes))
    assert pairs.token_N.tolist() == [row for _, row in sorted(wishes)]

    x = torch.randn(rows, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    spread = gather_tokens(x, pairs)
    torch.testing.assert_close(spread, x[pairs.token_N])
    home = reduce_tokens(spread, pairs)
    torch.testing.assert_close(home, x * wanted.sum(1, keepdim=True))
    home.sum().backward()
    torch.testing.assert_close(x.grad, wanted.sum(1, keepdim=True).double().expand(rows, 5))


def test_narrow_rows_are_added_up_in_wide_numbers() -> None:
    """256 ones and then 256 halves in bfloat16 would stay at 256 if each partial sum were rounded."""
    place = torch.arange(512)[None]
    pairs = token_rank_map(token_rank_mask(place, None, 512), 512)
    ones = torch.ones(512, 1, dtype=torch.bfloat16)
    ones[256:] = 0.5
    assert float(reduce_tokens(ones, pairs)) == 384.0


@pytest.mark.parametrize(
    ("rows", "choices", "share"), [(0, 2, 1.0), (9, 3, 1.0), (9, 3, 0.5), (4, 1, 0.0), (30, 8, 0.2)]
)
def test_a_pair_for_every_choice(rows: int, choices: int, share: float) -> None:
    generator = torch.Generator().manual_seed(choices)
    order = torch.randperm(rows * choices, generator=generator)[: int(share * rows * choices)]
    pairs = assignment_map(order, rows, choices)
    x = torch.randn(rows, 5, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(gather_tokens(x, pairs), x[order // choices])
    answers = torch.randn(len(order), 5, dtype=torch.float64, generator=generator)
    expected = torch.zeros_like(x).index_add_(0, order // choices, answers)
    torch.testing.assert_close(reduce_tokens(answers, pairs), expected)
