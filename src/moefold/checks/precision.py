"""Rules about the formats of messages: what ranks send and sum is no narrower than what they compute with."""

from __future__ import annotations

from moefold.config.precision import BYTES, FORMATS, Format
from moefold.config.run import RunConfig
from moefold.errors import Problem


def gathered_parameters_lose_no_digits(run: RunConfig) -> Problem | None:
    """A narrower format would change values where a parameter is sharded, and only there."""
    precision = run.precision
    if precision.gather in (None, precision.params, precision.compute):
        return None
    return Problem(
        "precision.gather",
        f"{precision.gather} is neither the format of parameters ({precision.params}) nor of matmuls "
        f"({precision.compute})",
        f"use {' or '.join(dict.fromkeys((precision.compute, precision.params)))}",
    )


def sums_are_no_narrower_than_what_they_add(run: RunConfig) -> list[Problem]:
    precision, compute = run.precision, _format(run.precision.compute)
    asked = {"precision.reduce": precision.reduce, "precision.tp_reduce": precision.tp_reduce}
    return [
        Problem(
            path,
            f"sums in {named} of what is computed in {compute}",
            f"use {' or '.join(name for name in FORMATS if BYTES[name] >= BYTES[compute])}",
        )
        for path, named in asked.items()
        if named is not None and compute is not None and BYTES[named] < BYTES[compute]
    ]


def _format(name: str) -> Format | None:
    """None for formats that are planned only."""
    return next((known for known in FORMATS if known == name), None)


RULES = (gathered_parameters_lose_no_digits, sums_are_no_narrower_than_what_they_add)
