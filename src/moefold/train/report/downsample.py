"""Many steps on few pixels: buckets of neighbouring steps, each with its mean and its extremes.

Dropping points would hide exactly the spikes that a page is opened for, so a bucket keeps its lowest and highest value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_POINTS = 320
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Thinned:
    """A curve and the band around it; NaN where a bucket has no number. Unthinned curves have a band of no height."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers
    per_bucket: int

    @property
    def empty(self) -> bool:
        return not np.isfinite(self.mean).any()


def thin(steps: npt.NDArray[np.int64], values: Numbers, most: int = MOST_POINTS) -> Thinned:
    count = len(values)
    width = max(1, -(-count // most))
    full = -(-count // width) * width
    padded = np.full(full, np.nan)
    padded[:count] = values
    table = padded.reshape(-1, width)
    known = np.isfinite(table)
    any_known = known.any(1)
    # The step in the middle of the bucket.
    x = np.array([steps[min(start + width // 2, count - 1)] for start in range(0, full, width)], dtype=np.float64)
    total, number = np.where(known, table, 0.0).sum(1), known.sum(1)
    mean = np.divide(total, number, out=np.full(len(total), np.nan), where=any_known)
    low = np.where(any_known, np.where(known, table, np.inf).min(1, initial=np.inf), np.nan)
    high = np.where(any_known, np.where(known, table, -np.inf).max(1, initial=-np.inf), np.nan)
    return Thinned(x, mean, low, high, width)
