"""Which item of which source a sample is: a function of the seed and the sample's number, computed and not stored.

The mixture says which source sample `i` comes from and the how manyth draw of it this is. The draw's epoch shuffles the
source's items (windows, or pieces of documents) with a key of its own, and the place within the epoch picks the item.
Within an epoch of its source, every item comes exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from moefold.data.mixture import Mixture
from moefold.data.permute import Permutation


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
