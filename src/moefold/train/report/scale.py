"""Ranges to draw that one outlier cannot ruin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def visible_range(values: npt.NDArray[np.float64], *, from_zero: bool) -> tuple[float, float]:
    """The range to draw. A value far above nearly all others would flatten the rest: it is cut off instead."""
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    usual_low, usual_high = (float(quantile) for quantile in np.quantile(known, (0.02, 0.98)))
    spread = max(usual_high - usual_low, abs(usual_high) * 0.05)
    if len(known) >= 20 and spread > 0:
        high = min(high, usual_high + 3 * spread)
    if from_zero:
        return min(0.0, low), high * 1.05 if high > 0 else 1.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - room, high + room
