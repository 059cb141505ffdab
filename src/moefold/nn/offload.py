"""Saved tensors that wait in the host's memory between a forward and its backward.

A ``Slot`` is one storage, however many views of it autograd saves. The slots of one block of one chunk (a stage's
forward of one microbatch) are a group. A group is copied out when its forward ends. The pipeline says in which order
chunks go backward (``schedule/offload_order.py``), so the order of reloads is known without a warm-up step: when the
backward reaches a group, the one that follows is copied back meanwhile. Of a chunk that goes backward right after its
forward, the last group stays. A group that has to be waited for because nobody asked for it ahead of time is a
**stall**, and is counted.

Copies on a GPU go from and to pinned memory, out on one stream and back on another, ordered by events: a copy out
waits for the computation that made the tensor and for the last reader of its host buffer; a copy back waits for its own
copy out (without that a reload right after the forward reads what has not been written); the computation waits for the
copy back. Blocks that a stream did not allocate are recorded on it (``record_stream``), so that the allocator does not
reuse them too early. (Executed on fake CUDA tensors, `dryrun/fake_cuda`; not on a GPU.) On a CPU, host and device are
the same memory and copies are plain.

**The pool.** Pinning memory is slow, so host buffers are kept and used again. Sizes change with every routing, so they
are rounded up to one of eight sizes per power of two (at most an eighth is lost), and a buffer is used for its own size
only. The pool has a bound. Where it would be exceeded, free buffers of other sizes go first; if that is not enough,
``take`` returns None and the tensor stays on the device: a full pool neither waits nor fails.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence

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


# (stage, microbatch)
Chunk = tuple[int, int]
# A copy of less is not worth its launch.
LEAST_BYTES = 4096


class Slot:
    """One storage: on the device (``here``), in a host buffer, or on its way."""

    def __init__(self, tensor: Tensor, group: OffloadGroup) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        # Detached: what waits must not hold the graph that made it.
        self.here: Tensor | None = tensor.detach().as_strided((size,), (1,), 0)
        self.dtype, self.size, self.device, self.group = tensor.dtype, size, tensor.device, group
        self.host: HostBuffer | None = None
        self.sent: torch.cuda.Event | None = None
        self.back: torch.cuda.Event | None = None

    def __del__(self) -> None:
        # Its backward never asked for it.
        if self.host is not None:
            self.group.offload.pool.give(self.host, self.sent)


class Away:
    """A view of a slot's storage; the slot is freed with the last of them."""

    __slots__ = ("offset", "size", "slot", "stride")

    def __init__(self, slot: Slot, tensor: Tensor) -> None:
        self.slot = slot
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def get(self) -> Tensor:
        return self.slot.group.offload.get(self.slot).as_strided(self.size, self.stride, self.offset)


class OffloadGroup:
    """The slots of one block's forward, or of one of its phases."""

    def __init__(self, offload: Offload, chunk: Chunk | None) -> None:
        self.offload, self.chunk = offload, chunk
        self._slots: list[weakref.ref[Slot]] = []
        # Copies back have been started; the backward has got here.
        self.is_asked_for = self.is_reached = False

    def add(self, tensor: Tensor) -> Slot:
        slot = Slot(tensor, self)
        self._slots.append(weakref.ref(slot))
        return slot

    def slots(self) -> Iterator[Slot]:
        """In the order in which the backward needs them, more or less: the last saved first."""
        for reference in reversed(self._slots):
            if (slot := reference()) is not None:
                yield slot

    @property
    def is_empty(self) -> bool:
        return not self._slots


class Offload:
    """``ahead``: how many groups are copied back before the backward reaches them."""

    def __init__(self, pool: HostPool, device: torch.device, ahead: int = 1, least: int = LEAST_BYTES) -> None:
        self.pool, self.ahead, self.least = pool, ahead, least
        self.chunk: Chunk | None = None
        # Groups that were waited for, tensors that stayed because the pool was full, and bytes that were copied out.
        self.stalls = self.not_taken = self.bytes_out = 0
        self._order: Sequence[Chunk] = ()
        self._num_backwards = 0
        self._last: OffloadGroup | None = None
        self._stays: frozenset[Chunk] = frozenset()
        self._groups: dict[Chunk, list[OffloadGroup]] = {}
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None

    # ---- what the pipeline says ----

    def start_step(self, order: Sequence[Chunk], stays: frozenset[Chunk]) -> None:
        """``order``: chunks as they go backward; ``stays``: those whose last group stays."""
        self._order, self._stays, self._num_backwards = order, stays, 0
        self._groups.clear()
        self._last = None

    def start_forward(self, chunk: Chunk) -> None:
        """The chunk that goes backward next comes back while this forward runs."""
        self.chunk = chunk
        for following in self._order[self._num_backwards : self._num_backwards + 1]:
            for group in self._groups.get(following, [])[: -self.ahead - 1 : -1]:
                self._ask_for(group)

    def end_backward(self, chunk: Chunk) -> None:
        self._num_backwards += 1
        self._groups.pop(chunk, None)

    # ---- forward ----

    def is_sent(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.untyped_storage().nbytes() >= self.least

    def new_group(self) -> OffloadGroup:
        return OffloadGroup(self, self.chunk)

    def send(self, group: OffloadGroup) -> None:
        """Its forward is over: copy out what its backward will need. Where the chunk goes backward at once, its last
        group stays, so each waits for the next."""
        if group.is_empty:
            return
        if group.chunk in self._stays:
            last, self._last = self._last, group
            if last is None or last.chunk != group.chunk:
                return
            group = last
        if group.chunk is not None:
            self._groups.setdefault(group.chunk, []).append(group)
        for slot in group.slots():
            assert slot.here is not None
            slot.host = self.pool.take(slot.size * slot.here.element_size())
            if slot.host is None:
                self.not_taken += 1
                continue
            self._copy_out(slot, slot.here, slot.host)
            self.bytes_out += slot.size * slot.here.element_size()
            slot.here = None

    def _copy_out(self, slot: Slot, here: Tensor, host: HostBuffer) -> None:
        target = host.as_dtype(slot.dtype, slot.size)
        if self._streams is None:
            target.copy_(here)
            return
        out, _ = self._streams
        out.wait_stream(torch.cuda.current_stream(slot.device))
        if host.last_read is not None:
            out.wait_event(host.last_read)
        with torch.cuda.stream(out):
            target.copy_(here, non_blocking=True)
        here.record_stream(out)
        slot.sent = out.record_event()

    # ---- backward ----

    def get(self, slot: Slot) -> Tensor:
        group = slot.group
        if not group.is_reached:
            group.is_reached = True
            self.stalls += not group.is_asked_for and slot.here is None
            self._ask_for(group)
            self._ask_for_following(group)
        assert slot.here is not None
        if slot.back is not None:
            current = torch.cuda.current_stream(slot.device)
            current.wait_event(slot.back)
            slot.here.record_stream(current)
        return slot.here

    def _ask_for(self, group: OffloadGroup) -> None:
        if not group.is_asked_for:
            group.is_asked_for = True
            for slot in group.slots():
                if slot.here is None:
                    self._copy_back(slot)

    def _ask_for_following(self, group: OffloadGroup) -> None:
        for count, follower in enumerate(self._following(group)):
            if count == self.ahead:
                return
            self._ask_for(follower)

    def _following(self, group: OffloadGroup) -> Iterator[OffloadGroup]:
        """Groups in the order in which they go backward, after this one."""
        if group.chunk is None or group.chunk not in self._order:
            return
        groups = self._groups.get(group.chunk, [])
        # A group that stayed is the last of its chunk.
        yield from reversed(groups[: groups.index(group)] if group in groups else groups)
        for chunk in self._order[self._order.index(group.chunk) + 1 :]:
            yield from reversed(self._groups.get(chunk, []))

    def _copy_back(self, slot: Slot) -> None:
        host = slot.host
        assert host is not None
        source, slot.host = host.as_dtype(slot.dtype, slot.size), None
        if self._streams is None:
            slot.here = source.clone()
            self.pool.give(host, None)
            return
        _, back = self._streams
        assert slot.sent is not None
        back.wait_event(slot.sent)
        with torch.cuda.stream(back):
            slot.here = torch.empty(slot.size, dtype=slot.dtype, device=slot.device)
            slot.here.copy_(source, non_blocking=True)
        slot.back = back.record_event()
        self.pool.give(host, slot.back)
