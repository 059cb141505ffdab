"""Which item of which source each sample is: a function of the seed and the sample's number, computed and not stored.

`Mixture` says which source sample `i` comes from and how many earlier samples came from it; `Permutation` shuffles the
items of each epoch of a source; `ItemOrder` combines the two.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

import numpy as np

from moefold.errors import DataError

_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 10, 1 << 16
# A block grows until the smallest source has this many samples of it, which bounds the rounding of its share to about 1
# %.
_MIN_SOURCE_SAMPLES = 64
_CACHED_BLOCKS = 4
_ROUNDS = 8
_64_BITS = (1 << 64) - 1


class Mixture:
    """Sample -> (source, number of earlier samples from this source).

    Samples are divided into blocks of fixed size. The weights give each source a whole number of a block's samples
    (largest remainders), so the shares are exact after every block and do not drift. Each block is shuffled with a key
    of its own; with a fixed pattern, one rank could get the same source at every step. Sample `i` is in block `i //
    size`, and both results follow from the block alone, without earlier blocks.
    """

    def __init__(self, weights: Sequence[float], *key: int | str) -> None:
        self.block_counts = block_counts(weights)
        self.block = sum(self.block_counts)
        self._key = key
        self._bounds = np.cumsum(self.block_counts)
        self._single_source = next((s for s, count in enumerate(self.block_counts) if count == self.block), None)
        self._blocks: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._lock = Lock()

    def draw(self, index: int) -> tuple[int, int]:
        if index < 0:
            raise ValueError(f"sample {index}")
        if self._single_source is not None:
            return self._single_source, index
        block, position = divmod(index, self.block)
        sources, earlier = self._block(block)
        source = int(sources[position])
        return source, block * self.block_counts[source] + int(earlier[position])

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        # Called by a loader thread and by the trainer.
        with self._lock:
            if number not in self._blocks:
                self._blocks[number] = self._shuffled(number)
            self._blocks.move_to_end(number)
            while len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
            return self._blocks[number]

    def _shuffled(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """For each sample of a block: its source, and how many earlier samples of the block have the same source."""
        (first,) = round_keys(1, *self._key, number)
        hashed = mix_array(np.arange(self.block, dtype=np.uint64) + np.uint64(first))
        sources = np.searchsorted(self._bounds, np.argsort(hashed, kind="stable"), side="right")
        earlier = np.empty(self.block, np.int64)
        for source, count in enumerate(self.block_counts):
            earlier[sources == source] = np.arange(count)
        return sources, earlier


def block_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """How many samples of a block each source gets."""
    if not weights:
        raise DataError("a mixture of no sources; name at least one")
    for number, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise DataError(f"weight of source {number} is {weight}; use a finite number, zero or more")
    # Relative to the largest, so that the sum of weights near the end of the float range does not overflow.
    scaled = [weight / max(max(weights), 5e-324) for weight in weights]
    total = math.fsum(scaled)
    if total <= 0:
        raise DataError(f"the weights of {len(weights)} sources sum to zero; at least one must be positive")
    shares = [weight / total for weight in scaled]
    smallest = min(share for share in shares if share > 0)
    block = _SMALLEST_BLOCK
    while block < _LARGEST_BLOCK and smallest * block < _MIN_SOURCE_SAMPLES:
        block *= 2
    counts = _largest_remainders(shares, block)
    for number, (weight, count) in enumerate(zip(weights, counts)):
        if weight > 0 and not count:
            raise DataError(
                f"weight of source {number} is {weight}, less than 1 / {block:,} of the sum; "
                "make it larger, or zero to leave the source out"
            )
    return counts


def _largest_remainders(shares: Sequence[float], block: int) -> tuple[int, ...]:
    exact = [share * block for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda s: (counts[s] - exact[s], s))
    # Rounding errors of the shares can make the sum too large as well; the largest count is then reduced.
    missing = block - sum(counts)
    for number in range(max(0, missing)):
        counts[by_remainder[number % len(counts)]] += 1
    for _ in range(max(0, -missing)):
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


class ItemOrder:
    """`order[i]` is (source, epoch of the source, item) of sample i; `counts` are the numbers of items per source.

    A source's items are windows or pieces of documents. Each epoch shuffles them with a key of its own, so every item
    comes exactly once per epoch of its source.
    """

    def __init__(self, mixture: Mixture, counts: Sequence[int], seed: int, split: str) -> None:
        self._mixture, self._counts = mixture, counts

        # In use at a time: the permutations of each source's current and previous epoch.
        @lru_cache(maxsize=4 * len(counts))
        def order(source: int, epoch: int) -> Permutation:
            return Permutation(counts[source], seed, split, source, epoch)

        self._order = order

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        source, draw = self._mixture.draw(index)
        epoch, position = divmod(draw, self._counts[source])
        return source, epoch, self._order(source, epoch)[position]


class Permutation:
    """`permutation[i]` for i in range(n); each key gives another order.

    A Feistel network permutes numbers of b bits, whatever its round function: each round xors a hash of one half into
    the other, and can be undone. With 2^b the next power of two above n, some results lie outside range(n); applying
    the network to those again until they lie inside (cycle walking, fewer than two passes on average) gives a
    permutation of range(n). All arithmetic is on integers, so every machine computes the same order, and index 10^12
    costs as much as index 0.
    """

    def __init__(self, n: int, *key: int | str) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} items")
        self.n = n
        bits = max(1, (n - 1).bit_length())
        self._low_bits = (bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._keys = round_keys(_ROUNDS, *key)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} of {self.n}")
        while (index := self._network(index)) >= self.n:
            pass
        return index

    def _network(self, value: int) -> int:
        high, low = value >> self._low_bits, value & self._low_mask
        keys = iter(self._keys)
        for key in keys:
            high ^= mix(low + key) & self._high_mask
            low ^= mix(high + next(keys)) & self._low_mask
        return high << self._low_bits | low


def round_keys(count: int, *key: int | str) -> tuple[int, ...]:
    """Independent 64-bit numbers from a key of integers and strings."""
    digest = hashlib.shake_256(repr(key).encode()).digest(8 * count)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 8 * count, 8))


def mix(value: int) -> int:
    """Hash of 64 bits: the finalizer of splitmix64."""
    value &= _64_BITS
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _64_BITS
    return value ^ value >> 31


def mix_array(values: np.ndarray) -> np.ndarray:
    """`mix` of an array of uint64; numpy's multiplication wraps around."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
