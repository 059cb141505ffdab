"""Two hosts on one machine: network namespaces joined by a link of a chosen rate.

Each namespace has one end of a virtual cable whose other end is in the other namespace; a token bucket at each end
limits what leaves. `two_lossy_hosts` joins them by a link in user space instead. Nothing of the machine's own network
is touched, and everything goes with the namespaces. Needs the right to make namespaces; ``possible()`` tells.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from tests.lossy_link import LossyLink, open_tun

# Of this process, so that two programs have hosts of their own.
HOSTS = tuple(f"moefold-{os.getpid()}-{name}" for name in "ab")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def possible() -> bool:
    """Whether this process may make namespaces, links and rate limits."""
    try:
        with two_hosts("100mbit"):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    _remove()
    try:
        for name in HOSTS:
            _run("ip", "netns", "add", name)
        _run(
            *("ip", "-n", HOSTS[0], "link", "add", "cable", "type", "veth"),
            *("peer", "name", "cable", "netns", HOSTS[1]),
        )
        for number, name in enumerate(HOSTS):
            _run("ip", "-n", name, "addr", "add", f"10.99.0.{number + 1}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", *limit)
        yield
    finally:
        _remove()


@contextmanager
def two_lossy_hosts(seed: int = 0) -> Iterator[LossyLink]:
    """Joined by a link that passes everything on until it is told otherwise."""
    _remove()
    try:
        devices = []
        for number, name in enumerate(HOSTS):
            _run("ip", "netns", "add", name)
            # A thread has a namespace of its own; this one ends there.
            with ThreadPoolExecutor(1) as elsewhere:
                devices.append(elsewhere.submit(lambda host: move_to(host) and open_tun("cable"), number).result())
            _run("ip", "-n", name, "addr", "add", f"10.99.0.{number + 1}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        with closing(LossyLink(devices, seed)) as link:
            yield link
    finally:
        _remove()


def move_to(host: int) -> str:
    """Put this process on a host; returns the interface that leads to the other one."""
    namespace = os.open(f"/var/run/netns/{HOSTS[host]}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    finally:
        os.close(namespace)
    return "cable"


def _remove() -> None:
    for name in HOSTS:
        subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
