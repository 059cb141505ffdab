"""The seed that CI draws its proof cases from: another one with every commit, and the same one for the same commit.

A fixed seed proves the same cases for ever and never sees the rest. `MOEFOLD_SEED=N` sets it, to repeat what another
commit has drawn; outside of a git checkout it is 1. `python -m tests.commit_seed` prints it.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

VARIABLE = "MOEFOLD_SEED"
_DIGITS = 6


@cache
def commit_seed() -> int:
    given = os.environ.get(VARIABLE)
    return int(given) if given else seed_of(_head())


def seed_of(commit: str | None) -> int:
    """The first digits of a commit's hash as a number."""
    return int(commit[:_DIGITS], 16) if commit else 1


def _head() -> str | None:
    command = ["git", "rev-parse", "--verify", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


if __name__ == "__main__":
    print(commit_seed())
