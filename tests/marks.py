"""What keeps tests short: `make check` tries a few parameters of a costly test, and tests that compute long are named.

`.ci/run` tries a part of all other parameters, drawn by the commit's seed: other ones with every commit, and the same
ones for the same commit; slow tests marked `every_commit` are in every part. `make nightly` tries them all. Tests that
hold a time (`timing`) need a core of their own, which a shared machine does not have: `make check` and `make nightly`
run them, `.ci/run` does not.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any
from zlib import crc32

import pytest

# Of processor time, which does not depend on what else the machine does.
MAX_SECONDS = 6.0


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of which only ``fast`` are not slow. A tuple holds the values of several arguments."""
    values = list(values)
    assert all(value in values for value in fast), f"{fast} is not among {values}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]), marks=[] if value in fast else [pytest.mark.slow]
        )
        for value in values
    ]


def is_always_run(keywords: Container[str]) -> bool:
    """By every commit: what is not slow, and slow tests that are the first thing a person would try."""
    return "slow" not in keywords or "every_commit" in keywords


def is_drawn(name: str, seed: int, parts: int) -> bool:
    """Whether a test is in the part of this seed; every test is in one of ``parts`` seeds in a row."""
    return crc32(name.encode()) % parts == seed % parts


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def too_long(reports: Iterable[Any]) -> list[str]:
    """Tests that are not marked and computed for longer than a test of `make check` should, the longest first."""
    found = [
        (seconds, report.nodeid)
        for report in reports
        if not {"slow", "nightly"} & set(report.keywords)
        for name, seconds in report.user_properties
        if name == "cpu_seconds" and seconds > MAX_SECONDS
    ]
    return [f"{seconds:.1f} s {name}" for seconds, name in sorted(found, reverse=True)]
