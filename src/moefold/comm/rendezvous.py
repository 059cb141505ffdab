"""Where ranks of several hosts find each other: the store of a launcher, and which start of the run they belong to.

torch's agent keeps its store when it starts ranks again, and ranks publish their addresses there under the same keys as
before. A rank that reads them too early connects to one that is dead and fails, which costs a restart, and its peers
wait for it five times their limit: the next step came after 22 s, after 58 s, or never. So ranks first agree on the
number of their start, and publish under it.

Rank 0 of a start takes the next number and waits until all ranks have registered under it; then it opens the start.
The others register under the newest number, and again whenever it changes, until theirs is opened while they wait: a
number that was open before a rank arrived belongs to a start that it has missed. So nothing depends on how often each
host has started its ranks, which differs when an agent was lost and came back.

Hosts with launchers of our own get the number and the ranks of a start from a decision (`membership.py`) instead.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from moefold.comm.launchers import Hosts, Place
from moefold.comm.membership import HostStart
from moefold.errors import TrainingError

_POLL_SECONDS = 0.02
_CONNECT_SECONDS = 2.0
_GET_ADDRESS = 0x8915  # SIOCGIFADDR

Answer = TypeVar("Answer")


def store_at(place: Place, timeout: timedelta) -> Store:
    """The store through which ranks of srun or mpirun find each other; rank 0 serves it.

    torch listens on all interfaces whatever the address. An address in numbers is where the peers connect to, so that
    one alone is opened; a name may mean another address here than it means to them.
    """
    assert place.address is not None and place.port is not None
    listening = None
    if place.rank == 0 and (address := as_number(place.address)) is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, place.port), family=family).detach()
    return TCPStore(
        place.address, place.port, place.world, place.rank == 0, timeout=timeout, master_listen_fd=listening
    )


class HostStore:
    """The store of a job whose hosts each have a launcher of ours: one launcher serves it, all others reach it there.

    torch's client waits without limit for a host that vanished, and holds off signals while it waits. So a launcher
    asks in a thread that it can leave behind, each time over a new connection.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._served: Store | None = None

    def serve(self) -> None:
        """On this host's own address, from now on."""
        if self._served is not None:
            return
        address, port = self.hosts.addresses[self.hosts.index], self.hosts.port
        try:
            number = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(number[4][:2], family=number[0])
        except OSError as error:
            raise TrainingError(f"host {self.hosts.index} cannot listen on {address}:{port}: {error}") from None
        self._served = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())

    def close(self) -> None:
        self._served = None

    @property
    def serves(self) -> bool:
        return self._served is not None

    def ask(self, host: int, question: Callable[[Store], Answer]) -> Answer | None:
        """What the store of a host answers; None if it is not reached."""
        answers: list[Answer] = []

        def work() -> None:
            # Another process may listen there, or the host may vanish at any moment.
            with suppress(OSError, RuntimeError, TrainingError):
                answers.append(question(self._connect(host, 0.0)[0]))

        asking = threading.Thread(target=work, daemon=True)
        asking.start()
        asking.join(2 * _CONNECT_SECONDS)
        return answers[0] if answers else None

    def join(self, start: HostStart, seconds: float, local_rank: int) -> tuple[Store, int, int]:
        """In a rank: the store of this start, its rank and the world."""
        rank = start.first_rank(self.hosts.index) + local_rank
        try:
            shared, own = self._connect(start.store, seconds)
        except TrainingError as error:
            raise TrainingError(f"rank {rank}: {error}") from None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own))
        return PrefixStore(f"moefold/start_{start.number}", shared), rank, start.world

    def _connect(self, host: int, seconds: float) -> tuple[Store, str]:
        """A client of a host's store, and the address by which this host reaches it; tries again for ``seconds``."""
        address, port, ends = self.hosts.addresses[host], self.hosts.port, time.monotonic() + seconds
        while True:
            try:
                with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as reached:
                    own = reached.getsockname()[0]
                break
            except OSError as error:
                if time.monotonic() + _CONNECT_SECONDS / 4 > ends:
                    raise TrainingError(f"host {host} was not reached at {address}:{port}: {error}") from None
                time.sleep(_CONNECT_SECONDS / 4)
        left = timedelta(seconds=max(1.0, ends - time.monotonic()))
        return TCPStore(address, port, None, False, timeout=left, wait_for_workers=False), own


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise TrainingError(f"no network interface has the address {address}; name it in GLOO_SOCKET_IFNAME")


def as_number(address: str) -> str | None:
    """An address in numbers, also for localhost; None for other names."""
    try:
        return str(ipaddress.ip_address("127.0.0.1" if address == "localhost" else address))
    except ValueError:
        return None


def agree_on_start(store: Store, rank: int, world: int, seconds: float) -> Store:
    """``store`` under a prefix that only this start of the ranks has; waits at most ``seconds`` for all of them."""
    deadline = time.monotonic() + seconds
    number = store.add("moefold/starts", 1) if rank == 0 else 0
    while True:
        newest = store.add("moefold/starts", 0)
        if rank == 0 and newest != number:
            raise TrainingError(f"rank 0 was started again (start {newest}) while start {number} waited for its ranks")
        if rank > 0 and newest != number and not store.check([_open(newest)]):
            number = newest
            store.set(_here(number, rank), "")
        if rank == 0 and store.check([_here(number, other) for other in range(1, world)]):
            store.set(_open(number), "")
        if number and store.check([_open(number)]):
            return PrefixStore(f"moefold/start_{number}", store)
        if time.monotonic() > deadline:
            missing = [other for other in range(1, world) if not store.check([_here(newest, other)])]
            raise TrainingError(f"start {newest}: ranks {missing[:8]} of {world} did not come within {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _here(number: int, rank: int) -> str:
    return f"moefold/start_{number}/here_{rank}"


def _open(number: int) -> str:
    return f"moefold/start_{number}/open"
