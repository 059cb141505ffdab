"""One hypothesis profile for every machine, the part of slow tests that is run, and a word about tests that take long.

Examples are the same each time, without a deadline on a busy core. Training keeps the memory of its process, for good;
tests share a process, and some of them measure how large it is.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings
from tests.commit_seed import commit_seed
from tests.marks import MAX_SECONDS, cpu_seconds, is_always_run, is_drawn, too_long

# In how many parts slow tests are divided, of which one is run.
PARTS = "MOEFOLD_SLOW_PARTS"

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def memory_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefold.comm.spawn.disable_malloc_trim", lambda: False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts = int(os.environ.get(PARTS, "1"))
    if parts == 1:
        return
    drawn = {item: is_always_run(item.keywords) or is_drawn(item.nodeid, commit_seed(), parts) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not drawn[item]])
    items[:] = [item for item in items if drawn[item]]


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
