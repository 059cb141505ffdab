"""The link in user space that `tests/host_faults.py` puts between two hosts; needs no right to make namespaces."""

from __future__ import annotations

import socket
import time
from contextlib import closing

from tests.lossy_link import LossyLink


def _pair() -> tuple[list[socket.socket], LossyLink]:
    """Sockets that keep packets apart stand for the two devices."""
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    outside = [end[0] for end in ends]
    for each in outside:
        each.settimeout(5.0)
    return outside, LossyLink([end[1].detach() for end in ends], seed=1)


def test_packets_arrive_in_order_and_late() -> None:
    (a, b), link = _pair()
    with a, b, closing(link):
        link.delay = 0.2
        began = time.monotonic()
        for number in range(20):
            a.send(bytes([number]))
        b.send(b"other way")
        assert [b.recv(99)[0] for _ in range(20)] == list(range(20))
        assert a.recv(99) == b"other way" and time.monotonic() - began >= 0.2


def test_packets_are_lost_as_told() -> None:
    (a, b), link = _pair()
    with a, b, closing(link):
        link.loss = 0.5
        for _ in range(100):
            a.send(b"x")
        while link.passed + link.dropped < 100:
            time.sleep(0.01)
        assert 30 <= link.dropped <= 70
        link.loss = 1.0
        a.send(b"never")
        while link.passed + link.dropped < 101:
            time.sleep(0.01)
        link.loss = 0.0
        a.send(b"last")
        received = []
        while not received or received[-1] != b"last":
            received.append(b.recv(99))
        assert b"never" not in received and len(received) == link.passed
