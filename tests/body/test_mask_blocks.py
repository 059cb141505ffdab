"""Blocks against the definition: every pair of a query and a key it sees, once, and no other."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch

from moefold.attention.mask_blocks import Block, Rows, Run, Sight, band, blocks, document_runs, stacks


def _random_runs(draw: Random, documents: int, parts: int) -> list[list[Run]]:
    """Each document cut into spans, dealt to holders; each holder's rows ascend."""
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    for document in range(documents):
        length = draw.randint(0, 40)
        cuts = sorted(draw.randint(0, length) for _ in range(2 * parts - 1))
        for start, stop in zip([0, *cuts], [*cuts, length]):
            if start < stop:
                held[draw.randrange(parts)].append((document, start, stop))
    runs = []
    for spans in held:
        row, mine = 0, []
        for document, start, stop in sorted(spans):
            mine.append(Run(document, start, stop, row))
            row += stop - start
        runs.append(mine)
    return runs


def _tokens(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.document, position) for run in runs for position in range(run.start, run.stop)]


def _seen(block: Block, window: int | None) -> list[tuple[int, int]]:
    visible = torch.ones(block.num_q, block.num_k, dtype=torch.bool)
    if block.sight is not Sight.FULL:
        visible = band(block.num_q, block.num_k, block.offset, window, visible.device)
    assert visible.any(1).all(), "a row of a block must see something"
    assert visible.any(0).all(), "a key of a block must be seen by someone"
    return [(block.q_row + q, block.k_row + k) for q, k in visible.nonzero().tolist()]


@pytest.mark.parametrize("seed", range(60))
def test_blocks_are_what_is_visible(seed: int) -> None:
    draw = Random(seed)
    window = draw.choice([None, 1, 2, 5, 9, 100])
    holders = _random_runs(draw, draw.randint(1, 4), draw.randint(1, 4))
    reader, holder = draw.choice(holders), draw.choice(holders)
    found = blocks(reader, holder, window, shortest_piece=draw.choice([1, 3, 128]))
    pairs = Counter(pair for block in found for pair in _seen(block, window))
    expected = {
        (q_row, k_row)
        for q_row, (q_document, q) in enumerate(_tokens(reader))
        for k_row, (k_document, k) in enumerate(_tokens(holder))
        if q_document == k_document and k <= q and (window is None or q - k < window)
    }
    assert pairs == Counter(expected)


@pytest.mark.parametrize("seed", range(20))
def test_stacks_hold_every_block_and_no_query_row_twice(seed: int) -> None:
    draw = Random(seed)
    holders = _random_runs(draw, 6, 3)
    found = blocks(holders[0], holders[0], 4, shortest_piece=2) + blocks(holders[0], holders[1], 4, shortest_piece=2)
    again = []
    for stack in stacks(found):
        rows = [start + i for start in stack.q.starts for i in range(stack.q.num)]
        assert len(set(rows)) == len(rows)
        for q_row, k_row in zip(stack.q.starts, stack.k.starts, strict=True):
            again.append(Block(q_row, stack.q.num, k_row, stack.k.num, stack.sight, stack.offset))
    assert Counter(again) == Counter(found)


def test_zigzag_halves_join_into_one_block() -> None:
    mine = [Run(0, 4, 8, 0), Run(0, 24, 28, 4)]
    earlier = [Run(0, 0, 4, 0), Run(0, 28, 32, 4)]
    later = [Run(0, 8, 12, 0), Run(0, 20, 24, 4)]
    assert blocks(mine, mine, None) == [Block(0, 8, 0, 8, Sight.CAUSAL)]
    assert blocks(mine, earlier, None) == [Block(0, 8, 0, 4, Sight.FULL)]
    assert blocks(mine, later, None) == [Block(4, 4, 0, 8, Sight.FULL)]


def test_equal_documents_are_one_stack_and_a_window_prunes() -> None:
    runs = document_runs((64, 64, 64))
    assert len(stacks(blocks(runs, runs, None))) == 1
    long = document_runs((1024,))
    found = blocks(long, long, 128)
    assert {block.num_k for block in found} <= {128, 255}
    assert len(stacks(found)) == 2


@pytest.mark.parametrize("starts", [(3,), (0, 4, 8), (1, 6, 11), (0, 2, 4), (0, 5, 6)])
def test_rows_are_taken_put_and_added(starts: tuple[int, ...]) -> None:
    rows, x = Rows(starts, 4), torch.randn(16, 2)
    torch.testing.assert_close(rows.take(x), torch.stack([x[start : start + 4] for start in starts]))
    total = torch.zeros(16, 2)
    rows.add(total, torch.ones(len(starts), 4, 2))
    expected = torch.zeros(16)
    for start in starts:
        expected[start : start + 4] += 1
    torch.testing.assert_close(total[:, 0], expected)
    if expected.max() == 1:
        rows.put(total, 7 * torch.ones(len(starts), 4, 2))
        torch.testing.assert_close(total[:, 1], 7 * expected)
