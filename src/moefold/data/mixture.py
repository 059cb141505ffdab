"""Which source a sample comes from: exact shares in every block of samples, shuffled within the block.

A block has a fixed number of places. Weights give each source a whole number of them (largest remainders), so after
every block the mixture is exact, and nothing drifts over a run of months. Which place belongs to whom is shuffled anew
for each block; a fixed pattern could give one rank the same source for ever. Sample `i` lies in block `i // size`, and
a source's draws are numbered in the order of the samples, so both are known without looking at earlier blocks.

Which item of which source a sample is: a function of the seed and the sample's number, computed and not stored.

The mixture says which source sample `i` comes from and the how manyth draw of it this is. The draw's epoch shuffles the
source's items (windows, or pieces of documents) with a key of its own, and the place within the epoch picks the item.
Within an epoch of its source, every item comes exactly once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

import numpy as np

from moefold.data.shuffle import Permutation, mix_array, round_keys
from moefold.errors import DataError

_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 10, 1 << 16
# A block grows until the smallest source has so many places: its share is then right to about one percent.
_ENOUGH_PLACES = 64
_KEPT_BLOCKS = 4


class Mixture:
    """index -> (source, number of the draw from this source)."""

    def __init__(self, weights: Sequence[float], *key: int | str) -> None:
        self.places = places(weights)
        self.block = sum(self.places)
        self._key = key
        self._bounds = np.cumsum(self.places)
        self._only = next((s for s, count in enumerate(self.places) if count == self.block), None)
        self._blocks: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._lock = Lock()

    def draw(self, index: int) -> tuple[int, int]:
        if index < 0:
            raise ValueError(f"sample {index}")
        if self._only is not None:
            return self._only, index
        block, place = divmod(index, self.block)
        sources, ranks = self._block(block)
        source = int(sources[place])
        return source, block * self.places[source] + int(ranks[place])

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        # A loader thread and the trainer may both ask.
        with self._lock:
            if number not in self._blocks:
                self._blocks[number] = self._shuffled(number)
            self._blocks.move_to_end(number)
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            return self._blocks[number]

    def _shuffled(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Of every place of a block: its source, and how many earlier places have the same one."""
        (first,) = round_keys(1, *self._key, number)
        hashed = mix_array(np.arange(self.block, dtype=np.uint64) + np.uint64(first))
        sources = np.searchsorted(self._bounds, np.argsort(hashed, kind="stable"), side="right")
        ranks = np.empty(self.block, np.int64)
        for source, count in enumerate(self.places):
            ranks[sources == source] = np.arange(count)
        return sources, ranks


def places(weights: Sequence[float]) -> tuple[int, ...]:
    """How many places of a block each source gets."""
    if not weights:
        raise DataError("a mixture of no sources; name at least one")
    for number, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise DataError(f"weight of source {number} is {weight}; use a finite number, zero or more")
    # Of the largest: weights near the end of the float range must not overflow when they are summed.
    scaled = [weight / max(max(weights), 5e-324) for weight in weights]
    total = math.fsum(scaled)
    if total <= 0:
        raise DataError(f"the weights of {len(weights)} sources sum to zero; at least one must be positive")
    shares = [weight / total for weight in scaled]
    smallest = min(share for share in shares if share > 0)
    block = _SMALLEST_BLOCK
    while block < _LARGEST_BLOCK and smallest * block < _ENOUGH_PLACES:
        block *= 2
    counts = _largest_remainders(shares, block)
    for number, (weight, count) in enumerate(zip(weights, counts)):
        if weight > 0 and not count:
            raise DataError(
                f"weight of source {number} is {weight}, less than one in {block:,} of the whole; "
                "make it larger, or zero to leave the source out"
            )
    return counts


def _largest_remainders(shares: Sequence[float], block: int) -> tuple[int, ...]:
    exact = [share * block for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda s: (counts[s] - exact[s], s))
    # Rounding errors of the shares can leave one too many as well as too few; who has most gives it.
    missing = block - sum(counts)
    for number in range(max(0, missing)):
        counts[by_remainder[number % len(counts)]] += 1
    for _ in range(max(0, -missing)):
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


class Draws:
    """`draws[i]` is (source, epoch of the source, item) of sample i; `counts` says how many items each source has."""

    def __init__(self, mixture: Mixture, counts: Sequence[int], seed: int, split: str) -> None:
        self._mixture, self._counts = mixture, counts

        # A few orders are in use at a time: that of each source's epoch, and of the one before.
        @lru_cache(maxsize=4 * len(counts))
        def order(source: int, epoch: int) -> Permutation:
            return Permutation(counts[source], seed, split, source, epoch)

        self._order = order

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        source, draw = self._mixture.draw(index)
        epoch, place = divmod(draw, self._counts[source])
        return source, epoch, self._order(source, epoch)[place]
