"""Values that published runs gave the planner's constants; written by the fit, never by hand."""

from __future__ import annotations

FITTED: dict[str, float] = {}
INTERVALS: dict[str, tuple[float, float]] = {"dense": (0.85, 1.15), "mixture": (0.85, 1.25)}
