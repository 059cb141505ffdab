"""One hypothesis profile for every machine: the same examples each time, and no deadline on a busy core."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")
