"""All-to-all between ranks of one host through shared memory: a rank writes its rows once, and its peers read them.

gloo sends messages between processes of one computer through sockets: every byte is copied into the kernel and out of
it again, and each peer costs system calls. Here every rank has a segment of anonymous memory (a memfd) that its peers
map. An exchange is: write the rows for all peers and where each one's begin, announce it, and copy from each peer's
segment as soon as that peer has announced the same exchange. Nobody waits for a peer to have read: a segment has two
slots in turn, and a peer that has announced an exchange has read all of the one before.

The announcement is a counter in the segment, and waiting is the kernel's futex: a waiting rank sleeps and leaves its
core to the others. Counters wrap, so they are compared by their difference. A peer that ends is noticed while waiting
for it, within a fraction of a second. Stores of a process become visible to others in the order in which they were made
on x86-64 alone, so elsewhere this is not used.

Every rank of a group must run the same exchanges in the same order, one at a time, as with any process group.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moefold.comm.process_probe import state_of
from moefold.errors import LostPeerError

# The head of a segment: the counter, then for each slot where it begins, and where in it the rows of each peer begin.
_HEAD_BYTES = 1 << 16
_SLOTS = 2
_MOST_PEERS = 1024
# Copies begin at the boundary of a cache line.
_ALIGNMENT = 64
_SMALLEST_SLOT = 1 << 20
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
# For every peer: first rows and numbers of rows.
Pieces = Sequence[Sequence[tuple[int, int]]]
# How long a rank sleeps before it looks whether its peer is alive.
_SLEEP_SECONDS = 0.2


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@dataclass(frozen=True)
class _Peer:
    """Which process a rank is, and its segment; equal ``host`` means that segments can be mapped."""

    host: tuple[int, ...]
    process: int
    segment: int


class _Segment:
    """A rank's shared memory, mapped here; it may grow."""

    def __init__(self, peer: _Peer) -> None:
        self.process = peer.process
        self._file = os.open(f"/proc/{peer.process}/fd/{peer.segment}", os.O_RDWR)
        self._map()

    def _map(self) -> None:
        self._memory = mmap.mmap(self._file, os.fstat(self._file).st_size)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.announced = ctypes.c_uint32.from_buffer(self._memory)
        # Per slot: its beginning, then one number per peer.
        self.places = (ctypes.c_uint64 * (_SLOTS * (1 + _MOST_PEERS))).from_buffer(self._memory, _ALIGNMENT)

    def span(self, first: int, length: int) -> Tensor:
        """Bytes of the segment, mapped anew if it has grown. What was mapped before is kept by who still uses it."""
        if first + length > self.bytes.numel():
            self._map()
        return self.bytes[first : first + length]

    def grow(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self._map()


class SharedMemory:
    """The exchanges of one group on one host."""

    def __init__(self, peers: Sequence[_Peer], index: int, name: str, seconds: float) -> None:
        self._segments = [_Segment(peer) for peer in peers]
        self._index, self._name, self._seconds = index, name, seconds
        self._exchanges = 0
        # Where each slot of this rank's segment begins, and how many bytes it has.
        self._slots = [(_HEAD_BYTES, 0)] * _SLOTS
        self._system = ctypes.CDLL(None, use_errno=True)

    def all_to_all(self, received: Tensor, rows: Tensor, recv: Pieces, send: Pieces) -> None:
        """``send[i]``: where the rows for peer i lie in ``rows``; ``recv[i]``: where those from it go in ``received``.

        As `dist.all_to_all_single`, but rows need not be in the order of the peers: they are copied anyway.
        """
        self._exchanges += 1
        number, slot, me = self._exchanges, self._exchanges % _SLOTS, self._index
        row_bytes = rows[:1].nbytes if rows.shape[0] else received[:1].nbytes
        source, target = rows.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
        starts = [0, *accumulate(sum(count for _, count in pieces) * row_bytes for pieces in send)]
        own, base = self._segments[me], self._slot(slot, source.numel())
        # What stays here is not written.
        for peer in self._others():
            _gather(own.span(base + starts[peer], starts[peer + 1] - starts[peer]), source, send[peer], row_bytes)
        places = slot * (1 + _MOST_PEERS)
        own.places[places : places + 1 + len(send)] = [base, *starts[:-1]]
        self._announce(number)
        _copy_own(target, recv[me], source, send[me], row_bytes)
        for peer in self._others():
            self._wait(peer, number)
            if length := sum(count for _, count in recv[peer]) * row_bytes:
                segment = self._segments[peer]
                first = segment.places[places] + segment.places[places + 1 + me]
                _scatter(target, recv[peer], segment.span(first, length), row_bytes)

    def _others(self) -> list[int]:
        """Beginning after this rank, so that not all ranks read the same segment at once."""
        size = len(self._segments)
        return [(self._index + step) % size for step in range(1, size)]

    def _slot(self, slot: int, size: int) -> int:
        """Where this slot begins, with room for ``size`` bytes: at the end of the segment, if it has to grow."""
        first, room = self._slots[slot]
        if size > room:
            segment = self._segments[self._index]
            room = max(_SMALLEST_SLOT, 1 << (size - 1).bit_length())
            first = max(_HEAD_BYTES, -(-segment.bytes.numel() // _ALIGNMENT) * _ALIGNMENT)
            segment.grow(first + room)
            self._slots[slot] = first, room
        return first

    def _announce(self, number: int) -> None:
        counter = self._segments[self._index].announced
        counter.value = number % 2**32
        self._system.syscall(_FUTEX, ctypes.byref(counter), _FUTEX_WAKE, len(self._segments), None, None, 0)

    def _wait(self, peer: int, number: int) -> None:
        """Until this peer has announced exchange ``number``."""
        segment, began = self._segments[peer], 0.0
        while True:
            seen = segment.announced.value
            if (seen - number) % 2**32 < 2**31:
                return
            counter, pause = ctypes.byref(segment.announced), ctypes.byref(_Timespec(0, int(_SLEEP_SECONDS * 1e9)))
            # Sleeps unless the counter has changed since it was read.
            woken = self._system.syscall(_FUTEX, counter, _FUTEX_WAIT, ctypes.c_uint32(seen), pause, None, 0)
            if woken == 0 or ctypes.get_errno() in (errno.EAGAIN, errno.EINTR):
                continue
            now = time.monotonic()
            began = began or now
            # A process that has ended is Z until its parent has waited for it. A peer may announce its last exchange
            # and end between two looks.
            if state_of(segment.process) in ("", "Z", "X") and segment.announced.value == seen:
                raise LostPeerError(f"all_to_all over {self._name}: the process of its rank {peer} has ended")
            if now - began > self._seconds:
                raise LostPeerError(f"all_to_all over {self._name}: rank {peer} is absent for {self._seconds:.0f} s")


def in_order(sizes: Sequence[int]) -> Pieces:
    """Rows of peer after peer."""
    return [[(first, size)] for first, size in zip(accumulate(sizes, initial=0), sizes)]


def _gather(target: Tensor, source: Tensor, pieces: Sequence[tuple[int, int]], row_bytes: int) -> None:
    """Pieces of the source, one after the other."""
    end = 0
    for first, count in pieces:
        begin, end = end, end + count * row_bytes
        if count:
            target[begin:end].copy_(source[first * row_bytes : (first + count) * row_bytes])


def _scatter(target: Tensor, pieces: Sequence[tuple[int, int]], source: Tensor, row_bytes: int) -> None:
    """The reverse."""
    end = 0
    for first, count in pieces:
        begin, end = end, end + count * row_bytes
        if count:
            target[first * row_bytes : (first + count) * row_bytes].copy_(source[begin:end])


def _copy_own(
    target: Tensor,
    recv: Sequence[tuple[int, int]],
    source: Tensor,
    send: Sequence[tuple[int, int]],
    row_bytes: int,
) -> None:
    """What a rank sends to itself; on one of the two sides it lies in one piece."""
    if len(send) == 1:
        ((first, count),) = send
        _scatter(target, recv, source[first * row_bytes : (first + count) * row_bytes], row_bytes)
    else:
        ((first, count),) = recv
        _gather(target[first * row_bytes : (first + count) * row_bytes], source, send, row_bytes)


class LazySharedMemory:
    """Opened by the group's first exchange, which all of its ranks have together."""

    def __init__(self, handle: ProcessGroup, index: int, size: int, name: str, seconds: float) -> None:
        self._what = handle, index, size, name, seconds
        self._opened = False
        self._found: SharedMemory | None = None

    def get(self) -> SharedMemory | None:
        if not self._opened:
            self._opened, self._found = True, open_shared_memory(*self._what)
        return self._found


def open_shared_memory(handle: ProcessGroup, index: int, size: int, name: str, seconds: float) -> SharedMemory | None:
    """For the ranks of a gloo group; None, on all of them, where one cannot map the memory of all others."""
    if size > _MOST_PEERS or platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return None
    segment = os.memfd_create(f"moefold-{name}")
    os.ftruncate(segment, _HEAD_BYTES)
    mine = torch.tensor([*_host(), os.getpid(), segment], dtype=torch.int64)
    told = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(told, mine, group=handle)
    peers = [_Peer(tuple(host), process, segment) for *host, process, segment in (one.tolist() for one in told)]
    shared = None
    if len({peer.host for peer in peers}) == 1:
        try:
            shared = SharedMemory(peers, index, name, seconds)
        except OSError:
            # Another user's process, or a kernel that does not let a process open its peers' files.
            shared = None
    agreed = torch.tensor(int(shared is not None))
    # Also the barrier after which all have mapped what they need, so that nobody has ended meanwhile.
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=handle)
    return shared if int(agreed) else None


def _host() -> tuple[int, int, int, int]:
    """This boot of this computer, in two numbers, and the namespaces of its process ids and of its network: containers
    with networks of their own are hosts of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
        processes, network = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    except OSError:
        return -1, -1, -1, os.getpid()
    return int(boot[:15], 16), int(boot[15:30], 16), processes, network
