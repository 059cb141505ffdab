"""Context ranks hold every token once, and read about equally much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.batching.wave_packing import max_group_tokens, max_shard_length
from moefold.batching.zigzag import Span, chunks, chunks_of, held_spans, num_held

LENGTHS = st.lists(st.integers(1, 70), max_size=8)
SIZES = st.sampled_from([1, 2, 3, 4, 8])


def positions(spans: tuple[Span, ...]) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


def causal_work(length: int, index: int, size: int) -> int:
    """How many positions the tokens of one rank look at in a document."""
    return sum(position + 1 for position in positions(held_spans((length,), index, size)))


@given(LENGTHS, SIZES)
def test_every_token_is_held_once(lengths: list[int], size: int) -> None:
    held = [positions(held_spans(lengths, index, size)) for index in range(size)]
    assert sorted(position for rank in held for position in rank) == list(range(sum(lengths)))
    assert all(rank == sorted(rank) for rank in held)
    assert [len(rank) for rank in held] == [num_held(lengths, index, size) for index in range(size)]


@given(st.integers(0, 200), SIZES)
def test_chunks_are_consecutive_and_nearly_equal(length: int, size: int) -> None:
    pieces = chunks(length, size)
    assert len(pieces) == 2 * size
    assert positions(pieces) == list(range(length))
    sizes = {stop - start for start, stop in pieces}
    assert max(sizes) - min(sizes) <= 1
    assert sorted(number for index in range(size) for number in chunks_of(index, size)) == list(range(2 * size))


@given(st.lists(st.integers(1, 70), min_size=1, max_size=8), SIZES)
def test_spans_are_never_empty_and_stay_inside_documents(lengths: list[int], size: int) -> None:
    edges = {sum(lengths[:i]) for i in range(len(lengths))}
    for index in range(size):
        for start, stop in held_spans(lengths, index, size):
            assert start < stop
            assert size == 1 or not any(start < edge < stop for edge in edges)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("length", [1_000, 4_096, 10_007])
def test_long_documents_are_equal_work(length: int, size: int) -> None:
    work = [causal_work(length, index, size) for index in range(size)]
    assert max(work) / min(work) < 1.02
    # Equal runs would not be: the last of them reads 2c - 1 times as much as the first.
    share = length // size
    first = sum(position + 1 for position in range(share))
    last = sum(position + 1 for position in range(length - share, length))
    assert last / first > 1.4 * size


@given(LENGTHS, SIZES)
def test_the_most_that_a_rank_can_hold_is_known(lengths: list[int], size: int) -> None:
    for length in lengths:
        assert max_shard_length(length, size) == max(num_held((length,), index, size) for index in range(size))
    bound = max_group_tokens(range(len(lengths)), lengths, size)
    assert max(num_held(lengths, index, size) for index in range(size)) <= bound


@given(st.integers(1, 10_000), st.integers(1, 500), SIZES)
def test_a_document_fits_when_its_even_share_fits(length: int, bound: int, size: int) -> None:
    assert (max_shard_length(length, size) <= bound) == (length <= bound * size)


def test_by_hand() -> None:
    assert held_spans((11,), 0, 2) == ((0, 3), (9, 11))
    assert held_spans((11,), 1, 2) == ((3, 6), (6, 9))
    assert held_spans((4, 2), 0, 2) == ((0, 1), (3, 4), (4, 5))
    assert held_spans((4, 2), 0, 1) == ((0, 6),)
