"""The computed shuffle and the mixture: every place once, exact shares, the same for ever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moefold.data.sample_order import Mixture, Permutation, block_counts, mix, mix_array
from moefold.errors import DataError


@pytest.mark.parametrize("n", [*range(1, 70), 100, 127, 128, 129, 255, 257, 1000, 1023, 1025, 4097])
def test_every_place_comes_once(n: int) -> None:
    for key in range(3):
        permutation = Permutation(n, "key", key)
        assert sorted(permutation[i] for i in range(n)) == list(range(n))


def test_keys_differ_and_nothing_is_left_in_place() -> None:
    n = 2000
    orders = [[Permutation(n, seed, "train", 0, epoch)[i] for i in range(n)] for seed in (1, 2) for epoch in (0, 1)]
    orders.append(list(range(n)))
    for a in range(len(orders)):
        for b in range(a):
            # Two independent orders agree in about one place.
            assert sum(x == y for x, y in zip(orders[a], orders[b])) < 12


def test_every_small_order_is_possible() -> None:
    seen = Counter(tuple(Permutation(3, key)[i] for i in range(3)) for key in range(3000))
    assert len(seen) == 6 and min(seen.values()) > 350, seen


def test_places_are_spread_evenly() -> None:
    n, parts = 10_007, 10
    permutation = Permutation(n, 5)
    table = np.zeros((parts, parts))
    for i in range(n):
        table[i * parts // n, permutation[i] * parts // n] += 1
    chi_square = ((table - n / parts**2) ** 2 / (n / parts**2)).sum()
    assert chi_square < 140, chi_square  # 81 degrees of freedom


def test_the_order_never_changes() -> None:
    permutation = Permutation(1000, 42, "train", 0, 0)
    assert [permutation[i] for i in range(6)] == [953, 799, 637, 34, 861, 118]
    assert Permutation(10**12, 42)[10**11] == 576_992_221_824
    mixture = Mixture([0.5, 0.3, 0.2], 42, "train", "mixture")
    assert [mixture.draw(i) for i in range(4)] == [(2, 0), (1, 0), (1, 1), (1, 2)]


def test_large_ranges_cost_no_more() -> None:
    permutation = Permutation(10**15, 1)
    found = {permutation[10**14 + i] for i in range(1000)}
    assert len(found) == 1000 and max(found) < 10**15


def test_wrong_places_are_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(3, 1)[3]
    with pytest.raises(ValueError):
        Permutation(0, 1)


def test_one_and_many_numbers_are_mixed_alike() -> None:
    values = [0, 1, 12345, 2**63, 2**64 - 1]
    assert [mix(value) for value in values] == mix_array(np.array(values, np.uint64)).tolist()


@pytest.mark.parametrize(
    "weights", [[1, 1], [0.7, 0.2, 0.1], [3, 0, 1], [1e-3, 1], [1e300, 1e300], [1e-310, 1e-310], [5.0] * 37, [0, 2]]
)
def test_shares_are_exact_in_every_block(weights: list[float]) -> None:
    mixture = Mixture(weights, 7)
    assert sum(mixture.block_counts) == mixture.block
    for count, weight in zip(mixture.block_counts, weights):
        share = weight / max(weights) / sum(w / max(weights) for w in weights)
        assert abs(count - share * mixture.block) < 1 and (count == 0) == (weight == 0)
    for block in (0, 3, 10**9):
        drawn = [mixture.draw(block * mixture.block + i) for i in range(mixture.block)]
        assert [Counter(s for s, _ in drawn)[s] for s in range(len(weights))] == list(mixture.block_counts)
        for source, count in enumerate(mixture.block_counts):
            # Draws of a source are numbered without gaps, in the order of the samples.
            numbers = [k for s, k in drawn if s == source]
            if len([c for c in mixture.block_counts if c]) > 1:
                assert numbers == list(range(block * count, block * count + count))


def test_blocks_differ() -> None:
    mixture, again = Mixture([1, 1], 7), Mixture([1, 1], 7)
    first, second = ([mixture.draw(b * mixture.block + i)[0] for i in range(mixture.block)] for b in (0, 1))
    assert first != second
    assert first == [again.draw(i)[0] for i in range(mixture.block)]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("weights", [[], [NAN], [1, NAN], [INF, 1], [-1, 2], [0, 0], [0.0], [1e-9, 1], [1, -INF]])
def test_weights_that_make_no_mixture_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match=r"weight|sources"):
        block_counts(weights)
