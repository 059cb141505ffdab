"""A link between two network namespaces that loses and delays packets, in user space: kernels may lack netem.

Each namespace has a TUN device whose packets this process reads and writes to the other one's. A packet is dropped with
probability ``loss``, or passed on ``delay`` seconds later; both may change while the link is in use.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Sequence

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_PACKET_BYTES = 1 << 16
_POLL_SECONDS = 0.05


class LossyLink:
    """Passes packets between two open TUN devices in a thread of its own until it is closed."""

    def __init__(self, devices: Sequence[int], seed: int = 0) -> None:
        self.loss = self.delay = 0.0
        self.passed = self.dropped = 0
        self._devices, self._dice = tuple(devices), random.Random(seed)
        self._ends = False
        self._thread = threading.Thread(target=self._pass_on, name="lossy link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        for device in self._devices:
            os.close(device)

    def _pass_on(self) -> None:
        # Due time, a number that keeps the order of equal times, the device to write to, and the packet.
        waiting: list[tuple[float, int, int, bytes]] = []
        with selectors.DefaultSelector() as reading:
            for device, other in (self._devices, self._devices[::-1]):
                reading.register(device, selectors.EVENT_READ, other)
            while not self._ends:
                left = waiting[0][0] - time.monotonic() if waiting else _POLL_SECONDS
                for key, _ in reading.select(timeout=min(max(left, 0.0), _POLL_SECONDS)):
                    packet = os.read(key.fd, _PACKET_BYTES)
                    if self._dice.random() < self.loss:
                        self.dropped += 1
                        continue
                    self.passed += 1
                    heapq.heappush(waiting, (time.monotonic() + self.delay, self.passed, key.data, packet))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, _, device, packet = heapq.heappop(waiting)
                    os.write(device, packet)


def open_tun(name: str) -> int:
    """A new TUN device of the network namespace of the calling thread; it is there until the descriptor is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return device
