"""How busy the machine was with other things while something was measured.

Times on the wall are worth little on a busy machine. What the kernel counts as busy, less what this process and its
children used, is what others did.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Of the first line's columns, those in which nobody computes: idle, and idle until a disk answers.
_IDLE = (3, 4)


@dataclass(frozen=True)
class Moment:
    wall: float
    busy: float
    own: float


def now() -> Moment | None:
    """None where the kernel does not say. Children count once they have ended."""
    try:
        ticks = [int(word) for word in _STAT.read_text("utf-8").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE) / os.sysconf("SC_CLK_TCK")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Moment(time.monotonic(), busy, sum(each.ru_utime + each.ru_stime for each in used))


def cores_of_others(since: Moment | None) -> float | None:
    """How many cores others kept busy since then, on average."""
    until = now()
    if since is None or until is None or until.wall <= since.wall:
        return None
    return max(0.0, (until.busy - since.busy - (until.own - since.own)) / (until.wall - since.wall))
