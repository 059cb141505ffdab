"""How far the clocks of other hosts are from rank 0's, by messages that go there and back.

All processes of a host read one monotonic clock. Another host's began at another time. Rank 0 sends a message and notes
its time, the other rank answers with its own, and rank 0 notes when the answer is there. If both ways took equally
long, the other clock was read in the middle:

    offset = other - (sent + received) / 2,   wrong by at most half of the time there and back

Of several exchanges the quickest is taken, since it bounds the error best. One rank of each host is asked, and ranks of
rank 0's host not at all: their offset is exactly 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.comm.collectives import all_gather_bytes, all_gather_no_grad, device_of
from moefold.comm.process_groups import Group

_ROUNDS = 20


def this_host() -> str:
    """The same for all processes that share a monotonic clock: the boot of one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def clock_offsets(
    world: Group, read: Callable[[], float] = time.perf_counter, host: str | None = None
) -> list[tuple[float, float]]:
    """Of every rank: seconds that its clock is ahead of rank 0's, and how wrong this may be. All ranks must call it."""
    if world.alone:
        return [(0.0, 0.0)]
    hosts = [name.decode() for name in all_gather_bytes((this_host() if host is None else host).encode(), world)]
    first = {name: hosts.index(name) for name in hosts}
    found = torch.zeros(world.size, 2, dtype=torch.float64)
    for rank in sorted(set(first.values()) - {first[hosts[0]]}):
        if world.index == 0:
            found[rank] = torch.tensor(_ask(rank, world, read), dtype=torch.float64)
        elif world.index == rank:
            _answer(world, read)
    device = device_of(world)
    from_first = all_gather_no_grad(found.to(device).flatten(), (found.numel(),) * world.size, world)
    offsets = from_first[: found.numel()].view_as(found).cpu().tolist()
    return [(offsets[first[name]][0], offsets[first[name]][1]) for name in hosts]


def _ask(rank: int, world: Group, read: Callable[[], float]) -> tuple[float, float]:
    best = (0.0, float("inf"))
    clock = torch.zeros(1, dtype=torch.float64, device=device_of(world))
    for _ in range(_ROUNDS):
        sent = read()
        dist.send(clock, world.ranks[rank], group=world.handle)
        dist.recv(clock, world.ranks[rank], group=world.handle)
        other = clock.item()
        half = (read() - sent) / 2
        if half < best[1]:
            best = (other - (sent + half), half)
    return best


def _answer(world: Group, read: Callable[[], float]) -> None:
    clock = torch.zeros(1, dtype=torch.float64, device=device_of(world))
    for _ in range(_ROUNDS):
        dist.recv(clock, world.ranks[0], group=world.handle)
        clock.fill_(read())
        dist.send(clock, world.ranks[0], group=world.handle)
