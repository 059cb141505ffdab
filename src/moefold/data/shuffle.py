"""A shuffled order that is computed and not stored: a keyed permutation of range(n), any place of it at once.

A Feistel network permutes numbers of b bits, whatever its round function: each round adds a hash of one half to the
other, and can be undone. With 2^b the next power of two above n, some results lie outside range(n); feeding those
through again until they fall inside (cycle walking, fewer than two passes on average) gives a permutation of range(n).
All arithmetic is on integers, so every machine finds the same order, and place 10^12 costs as much as place 0.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8
_64_BITS = (1 << 64) - 1


class Permutation:
    """`permutation[i]` for i in range(n); another key gives another order."""

    def __init__(self, n: int, *key: int | str) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} things")
        self.n = n
        bits = max(1, (n - 1).bit_length())
        self._low_bits = (bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._keys = round_keys(_ROUNDS, *key)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.n:
            raise IndexError(f"place {place} of {self.n}")
        while (place := self._network(place)) >= self.n:
            pass
        return place

    def _network(self, value: int) -> int:
        high, low = value >> self._low_bits, value & self._low_mask
        keys = iter(self._keys)
        for key in keys:
            high ^= mix(low + key) & self._high_mask
            low ^= mix(high + next(keys)) & self._low_mask
        return high << self._low_bits | low


def round_keys(count: int, *key: int | str) -> tuple[int, ...]:
    """Independent 64-bit numbers from a key of integers and words."""
    digest = hashlib.shake_256(repr(key).encode()).digest(8 * count)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 8 * count, 8))


def mix(value: int) -> int:
    """Scatter 64 bits (the finishing steps of splitmix64)."""
    value &= _64_BITS
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _64_BITS
    return value ^ value >> 31


def mix_array(values: np.ndarray) -> np.ndarray:
    """The same for many uint64 at once, which wrap around by themselves."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
