"""Buffers in the host's memory for offloaded tensors, pinned where a GPU copies from and to them, with a bound.

Pinning memory is slow, so buffers are kept and used again. Sizes change with every routing, so they are rounded up to
one of eight sizes per power of two (at most an eighth is lost), and a buffer is used for its own size only. Where the
bound would be exceeded, free buffers of other sizes go first; if that is not enough, ``take`` returns None and the
tensor stays on the device: a full pool neither waits nor fails.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SIZES_PER_OCTAVE = 8


class HostBuffer:
    """``last_read``: after the last copy from it."""

    def __init__(self, buffer: Tensor) -> None:
        self.bytes = buffer
        self.last_read: torch.cuda.Event | None = None

    def as_dtype(self, dtype: torch.dtype, size: int) -> Tensor:
        return self.bytes[: size * dtype.itemsize].view(dtype)


class HostPool:
    """``limit``: bytes at most; None: no bound."""

    def __init__(self, limit: int | None, pinned: bool) -> None:
        self.limit, self.pinned = limit, pinned
        self.allocated = 0
        # By size: all buffers, and those that are free.
        self._buffers: dict[int, list[HostBuffer]] = {}
        self._free: dict[int, list[HostBuffer]] = {}
        # Phases that communicate may run on a thread of their own.
        self._lock = threading.RLock()

    def take(self, size: int) -> HostBuffer | None:
        with self._lock:
            return self._take(rounded_up(size))

    def _take(self, size: int) -> HostBuffer | None:
        if free := self._free.get(size):
            return free.pop()
        if self.limit is not None and self.allocated + size > self.limit:
            self._drop_free(self.allocated + size - self.limit)
            if self.allocated + size > self.limit:
                return None
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        made = HostBuffer(buffer.pin_memory() if self.pinned else buffer)
        self.allocated += size
        self._buffers.setdefault(size, []).append(made)
        return made

    def give(self, buffer: HostBuffer, last_read: torch.cuda.Event | None) -> None:
        """``last_read``: the copy that must have ended before the buffer is written again."""
        with self._lock:
            buffer.last_read = last_read
            self._free.setdefault(buffer.bytes.numel(), []).append(buffer)

    def buffers(self) -> list[Tensor]:
        return [buffer.bytes for buffers in self._buffers.values() for buffer in buffers]

    def _drop_free(self, needed: int) -> None:
        """torch keeps pinned memory from being reused until copies from and to it have ended."""
        for size, free in self._free.items():
            while free and needed > 0:
                self._buffers[size].remove(free.pop())
                self.allocated -= size
                needed -= size


def rounded_up(size: int) -> int:
    """The next of eight sizes per power of two."""
    step = 1 << max(0, (size - 1).bit_length() - 1)
    unit = max(1, step // SIZES_PER_OCTAVE)
    return -(-size // unit) * unit
