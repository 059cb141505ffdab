"""How much memory a computation takes at most, and what it held on to before.

The peak is the kernel's figure: the highest resident size since a moment, less what was resident then. Free memory
that the heap kept is handed back first, or it would hide what the next run needs. No torch here: a contestant sets its
allocator first.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_SYSTEM = Path("/proc/meminfo")
_CLEAR = Path("/proc/self/clear_refs")
# Written to clear_refs, it sets the high-water mark back to what is resident now.
_FORGET_PEAK = "5"


def resident_bytes() -> int | None:
    """None where the kernel does not say."""
    return _status("VmRSS")


def measured_peak(work: Callable[[], object]) -> tuple[int | None, int | None]:
    """(resident bytes before, how many more there were at most while it worked)."""
    gc.collect()
    return_free_memory()
    try:
        _CLEAR.write_text(_FORGET_PEAK)
    except OSError:
        work()
        return None, None
    before = resident_bytes()
    work()
    peak = _status("VmHWM")
    return before, None if before is None or peak is None else peak - before


def return_free_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int | None:
    """What programs could still be given; None where the kernel does not say."""
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
