"""How far a long command has come."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def with_progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """A bar on a terminal, a line now and then elsewhere; always on stderr, so that output stays clean."""
    from rich.console import Console
    from rich.progress import track

    if sys.stderr.isatty():
        yield from track(items, what, total=total, console=Console(stderr=True))
        return
    for number, item in enumerate(items, 1):
        yield item
        if number % 20 == 0 or number == total:
            print(f"{what}: {number} of {total}", file=sys.stderr, flush=True)
