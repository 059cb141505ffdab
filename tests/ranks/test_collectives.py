"""Every collective with gradients: values and gradients against the sum or the whole tensor on one process."""

from __future__ import annotations

import pytest
import torch
from tests.support import on_ranks

from moefold.comm.collectives import (
    all_gather_replicated,
    all_gather_rows,
    all_reduce_partial,
    all_reduce_replicated,
    reduce_scatter_rows,
)
from moefold.comm.process_groups import Groups
from moefold.topology.folded_layout import shard_sizes

TOKENS, WIDTH = 7, 3


def everyones(shape: tuple[int, ...], seed: int, world: int) -> list[torch.Tensor]:
    """What each rank holds, the same on all of them because it is drawn in rank order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_rows_feed_different_work(world: int) -> None:
    """Rank r uses the whole with its own factor; the gradient of each row is the sum over ranks."""

    def work(groups: Groups) -> None:
        tp = groups["tp"]
        sizes = shard_sizes(TOKENS, world)
        (whole,) = everyones((TOKENS, WIDTH), 0, 1)
        factors = everyones((TOKENS, WIDTH), 1, world)
        mine = whole.split(sizes)[tp.index].clone().requires_grad_()
        gathered = all_gather_rows(mine, sizes, tp)
        torch.testing.assert_close(gathered, whole)
        (gathered * factors[tp.index]).sum().backward()
        torch.testing.assert_close(mine.grad, sum(factors).split(sizes)[tp.index])

    on_ranks(work, world, tp=world)


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_rows_feed_the_same_work(world: int) -> None:
    def work(groups: Groups) -> None:
        tp = groups["tp"]
        sizes = shard_sizes(TOKENS, world)
        whole, factor = everyones((TOKENS, WIDTH), 0, 2)
        mine = whole.split(sizes)[tp.index].clone().requires_grad_()
        (all_gather_replicated(mine, sizes, tp) * factor).sum().backward()
        torch.testing.assert_close(mine.grad, factor.split(sizes)[tp.index])

    on_ranks(work, world, tp=world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_reduced_rows_are_sums_and_their_gradients_gather(world: int, dtype: torch.dtype) -> None:
    def work(groups: Groups) -> None:
        tp = groups["tp"]
        sizes = shard_sizes(TOKENS, world)
        partials = [part.to(dtype) for part in everyones((TOKENS, WIDTH), 0, world)]
        (factor,) = everyones((TOKENS, WIDTH), 5, 1)
        factor = factor.to(dtype)
        mine = partials[tp.index].clone().requires_grad_()
        reduced = reduce_scatter_rows(mine, sizes, tp)
        # A 16-bit sum is carried in float32 and rounded once.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = torch.stack([part.to(wide) for part in partials]).sum(0).to(dtype)
        torch.testing.assert_close(reduced, expected.split(sizes)[tp.index])
        (reduced * factor.split(sizes)[tp.index]).sum().backward()
        torch.testing.assert_close(mine.grad, factor)

    on_ranks(work, world, tp=world)


def test_the_two_sums_differ_in_their_gradient() -> None:
    def work(groups: Groups) -> None:
        tp = groups["tp"]
        parts, factors = everyones((4,), 0, 2), everyones((4,), 1, 2)
        for add, expected in ((all_reduce_partial, sum(factors)), (all_reduce_replicated, factors[tp.index])):
            mine = parts[tp.index].clone().requires_grad_()
            total = add(mine, tp)
            torch.testing.assert_close(total, sum(parts))
            (total * factors[tp.index]).sum().backward()
            torch.testing.assert_close(mine.grad, expected)

    on_ranks(work, 2, tp=2)


def test_the_ledger_counts_forward_and_backward() -> None:
    def work(groups: Groups) -> list[int]:
        tp = groups["tp"]
        x = torch.randn(3, 5, requires_grad=True)
        all_gather_rows(x, (3, 3), tp).sum().backward()
        return [*tp.ledger.of("all_gather", "tp"), *tp.ledger.of("reduce_scatter", "tp")]

    assert on_ranks(work, 2, tp=2) == [[1, 3 * 5 * 4, 1, 6 * 5 * 4]] * 2
