"""Writes fitted constants as the module that the planner reads."""

from __future__ import annotations

from collections.abc import Mapping

from moefold.plan.timing.constants import MEANINGS, Constants

_HEAD = '''"""Values that published runs gave the planner's constants, and how far runs lie from predictions.

Written by `moefold plan --score FOLDER --constants FILE`, never by hand.
"""

from __future__ import annotations
'''


def fitted_source(constants: Constants, intervals: Mapping[str, tuple[float, float]]) -> str:
    """Python source with four digits of each value: more would be noise."""
    values = "".join(f'    "{meaning.name}": {value:.4g},\n' for meaning, value in zip(MEANINGS, constants.values))
    ranges = "".join(f'    "{kind}": ({low:.3f}, {high:.3f}),\n' for kind, (low, high) in intervals.items())
    return (
        f"{_HEAD}\nFITTED: dict[str, float] = {{\n{values}}}\n"
        "# Measured over predicted step times: the tenth and the ninetieth percentile of runs left out.\n"
        f"INTERVALS: dict[str, tuple[float, float]] = {{\n{ranges}}}\n"
    )
