"""Values that published runs gave the planner's constants; written by the fit, never by hand."""

from __future__ import annotations

FITTED: dict[str, float] = {}
