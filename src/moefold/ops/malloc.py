"""Keep freed memory in the process instead of returning it to the kernel.

glibc returns every large buffer to the kernel when it is freed, and requests a new one for the next allocation. The
kernel clears each new page, one page fault per 4 KiB; a training step allocates and frees the same buffers again and
again, and pays each time. Here trimming and mmap are disabled. The process then stays at its peak size, which is usual
for training.

The setting is global and permanent, so the launcher makes it, once, before the work starts.
"""

from __future__ import annotations

import ctypes

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = 2**31 - 1
# Extra bytes per request to the kernel.
_TOP_PAD_BYTES = 64 << 20


def disable_malloc_trim() -> bool:
    """Keep freed memory for the next buffer; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _TOP_PAD_BYTES))
    return all(mallopt(name, value) for name, value in settings)
