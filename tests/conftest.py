"""One hypothesis profile for every machine, and memory that is handed back.

Examples are the same each time, without a deadline on a busy core. Training keeps the memory of its process, for good;
tests share a process, and some of them measure how large it is.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def memory_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("moefold.comm.spawn", "moefold.ops.malloc"):
        monkeypatch.setattr(f"{module}.disable_malloc_trim", lambda: False)
