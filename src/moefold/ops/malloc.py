"""Memory that a process keeps once it has it.

The C library hands every large buffer back to the kernel when it is freed, and asks for a fresh one a moment later. The
kernel must clear each fresh page, one page fault per 4 KiB: a training step allocates and frees the same few buffers
over and over, and pays for them each time. Here the library is told to keep what it has. A process then stays as large
as it once was, which is what a training process does anyway.

It is set once, before the work, and cannot be taken back; that is why the launcher does it and no layer.
"""

from __future__ import annotations

import ctypes

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = 2**31 - 1
# How much more than asked for is taken from the kernel at once.
_STRIDE = 64 << 20


def disable_malloc_trim() -> bool:
    """Keep freed memory for the next buffer; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(what, value) for what, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _STRIDE)))
