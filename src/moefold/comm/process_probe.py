"""What the kernel says about a process on this host, read from /proc: its state and its connections.

Nothing is asked of the process itself, so that one that is stopped or holds a lock is seen like any other. Network
files of /proc/PID/net are those of the process's own network namespace.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED = 1


def state_of(pid: int) -> str:
    """One letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended; empty if there is no process."""
    try:
        # The name before it may have brackets and blanks in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or SIGTSTP, or by a debugger."""
    return state_of(pid) in ("T", "t")


class Connection(NamedTuple):
    """An established one of IPv4, to another host.

    ``unanswered`` bytes were sent and not acknowledged; ``retries`` is how often the kernel has sent them again.
    """

    address: str
    unanswered: int
    retries: int


def network_of(pid: int) -> tuple[str, ...]:
    """Sentences about what is wrong with a process's connections to its peers; none if nothing is, or none is known."""
    try:
        connections, routes = list(_connections(pid)), list(_routes(pid))
    except (OSError, ValueError, IndexError):
        return ()
    said = {}
    for address, unanswered, retries in connections:
        if address.startswith("127."):
            continue
        if not any(_number(address) & mask == network for network, mask in routes):
            said[address] = f"no route to {address}: its interface is down"
        elif retries and unanswered:
            said.setdefault(address, f"{unanswered:,} bytes to {address} without an answer, sent again {retries} times")
    return tuple(said.values())


def _connections(pid: int) -> Iterator[Connection]:
    mine = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
        except OSError:
            continue
        if found is not None:
            mine.add(found[1])
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, _, retries, _, _, inode, *_ = line.split()
        here = local.split(":")[0] == remote.split(":")[0]
        if inode in mine and not here and int(state, 16) == _ESTABLISHED:
            address = socket.inet_ntoa(struct.pack("=I", int(remote.split(":")[0], 16)))
            yield Connection(address, int(queues.split(":")[0], 16), int(retries, 16))


def _routes(pid: int) -> Iterator[tuple[int, int]]:
    """Network and mask, as numbers."""
    for line in Path(f"/proc/{pid}/net/route").read_text().splitlines()[1:]:
        fields = line.split()
        network, mask = (int.from_bytes(struct.pack("=I", int(fields[at], 16)), "big") for at in (1, 7))
        yield network, mask


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")
