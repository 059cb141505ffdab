"""What was held when: a list of storages that came and went, and the moment at which most was held.

Storages are numbered in the order in which they were first seen. An event says by how many bytes one of them grew or
shrank. What a storage *is* often shows only later (whether a tensor is kept for backward is known when its forward has
ended), so events are written down as they come, and added up at the end, when every storage has its category.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# In the order in which they are printed.
CATEGORIES = (
    "parameters",
    "gathered parameters",
    "weight copies",
    "gradients",
    "optimizer state",
    "activations",
    "communication",
    "other",
)


class Event(NamedTuple):
    """A storage grew by so many bytes; negative when it shrank or was freed."""

    storage: int
    change: int


class Mark(NamedTuple):
    """Something ended just before this event."""

    event: int
    what: str


@dataclass(frozen=True)
class Peak:
    """The first moment at which the most bytes were held."""

    total: int
    # By category: at that moment, and the most of each at any moment.
    then: dict[str, int]
    most: dict[str, int]
    when: str
    # Storages that were alive at that moment.
    alive: dict[int, int]


def peak_of(events: Sequence[Event], category: Mapping[int, str], marks: Sequence[Mark]) -> Peak:
    """Add events up; a storage without a category counts as "other"."""
    held: Counter[str] = Counter()
    most: Counter[str] = Counter()
    total, highest, at = 0, -1, 0
    for number, (storage, change) in enumerate(events):
        kind = category.get(storage, "other")
        held[kind] += change
        total += change
        if change > 0 and held[kind] > most[kind]:
            most[kind] = held[kind]
        if total > highest:
            highest, at = total, number
    alive = alive_after(events[: at + 1])
    then: Counter[str] = Counter()
    for storage, size in alive.items():
        then[category.get(storage, "other")] += size
    return Peak(
        max(highest, 0),
        {kind: then[kind] for kind in CATEGORIES},
        {kind: most[kind] for kind in CATEGORIES},
        under_way_at(at, marks),
        alive,
    )


def alive_after(events: Sequence[Event]) -> dict[int, int]:
    """Bytes of every storage that is still held."""
    sizes: Counter[int] = Counter()
    for storage, change in events:
        sizes[storage] += change
    return {storage: size for storage, size in sizes.items() if size}


def under_way_at(event: int, marks: Sequence[Mark]) -> str:
    """What was going on: whatever ended next."""
    following = bisect_right([mark.event for mark in marks], event)
    return marks[following].what if following < len(marks) else "after the step"
