"""Memory of this process, and how busy other processes keep the machine, as the Linux kernel counts them.

The peak is the kernel's high-water mark of resident memory since a moment, less what was resident then. Free memory
that malloc kept is returned first, or it would hide what the next run needs. The load of other processes is all busy
CPU time less that of this process and its children; wall times are worth little where it is high.

No torch here: a candidate sets its allocator before it imports torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_SYSTEM = Path("/proc/meminfo")
_CLEAR = Path("/proc/self/clear_refs")
# Written to clear_refs, it resets the high-water mark to what is resident now.
_RESET_PEAK = "5"


def resident_bytes() -> int | None:
    """None without /proc."""
    return _status("VmRSS")


def measured_peak(work: Callable[[], object]) -> tuple[int | None, int | None]:
    """(resident bytes before, largest increase while ``work`` ran)."""
    gc.collect()
    trim_malloc()
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        work()
        return None, None
    before = resident_bytes()
    work()
    peak = _status("VmHWM")
    return before, None if before is None or peak is None else peak - before


def trim_malloc() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int | None:
    """Memory that is left on the machine; None without /proc."""
    return _kibibytes(_SYSTEM, "MemAvailable")


def _status(name: str) -> int | None:
    return _kibibytes(_STATUS, name)


def _kibibytes(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


# ---- load of other processes ----

_STAT = Path("/proc/stat")
# Columns of the first line that count no computation: idle, and iowait.
_IDLE = (3, 4)


@dataclass(frozen=True)
class CpuTimes:
    wall: float
    busy: float
    own: float


def cpu_times() -> CpuTimes | None:
    """None without /proc. Children count once they have ended."""
    try:
        ticks = [int(word) for word in _STAT.read_text("utf-8").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE) / os.sysconf("SC_CLK_TCK")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return CpuTimes(time.monotonic(), busy, sum(each.ru_utime + each.ru_stime for each in used))


def busy_cores_of_others(since: CpuTimes | None) -> float | None:
    """Mean number of cores that other processes kept busy since then."""
    until = cpu_times()
    if since is None or until is None or until.wall <= since.wall:
        return None
    return max(0.0, (until.busy - since.busy - (until.own - since.own)) / (until.wall - since.wall))
