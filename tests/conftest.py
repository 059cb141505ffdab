"""One hypothesis profile for every machine, memory that is handed back, and a word about tests that take long.

Examples are the same each time, without a deadline on a busy core. Training keeps the memory of its process, for good;
tests share a process, and some of them measure how large it is.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings
from tests.marks import MAX_SECONDS, cpu_seconds, too_long

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def memory_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("moefold.comm.spawn", "moefold.ops.malloc"):
        monkeypatch.setattr(f"{module}.disable_malloc_trim", lambda: False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    start = cpu_seconds()
    try:
        yield
    finally:
        item.user_properties.append(("cpu_seconds", cpu_seconds() - start))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if lines := too_long(terminalreporter.getreports("passed")):
        terminalreporter.section(f"over {MAX_SECONDS:g} s of processor time: should these be marked slow?")
        for line in lines:
            terminalreporter.line(line)
