"""Ranks as threads, for fakes of communication libraries: a process group whose members exchange Python objects.

Every call of a fake is a meeting of all members. Each brings the name of the call; a member that brings another name
fails the meeting for all, as a mismatched collective would hang a job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from torch.distributed import ProcessGroup

from moefold.comm.process_groups import Group, Ledger

T = TypeVar("T")


class ContractError(AssertionError):
    """A call that the real library would refuse, or answer with garbage."""


def require(holds: bool, words: str) -> None:
    if not holds:
        raise ContractError(words)


class Meeting:
    def __init__(self, world: int) -> None:
        self.world = world
        self.table: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=120)

    def exchange(self, rank: int, call: str, thing: Any) -> list[Any]:
        self.table[rank] = (call, thing)
        self.barrier.wait()
        everything = list(self.table)
        self.barrier.wait()
        calls = [name for name, _ in everything]
        require(len(set(calls)) == 1, f"ranks are in different calls: {calls}")
        return [each for _, each in everything]


class ThreadProcessGroup:
    """What fakes and adapters use of a process group."""

    group_name = "ep"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self._rank = meeting, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.meeting.world

    def exchange(self, call: str, thing: Any) -> list[Any]:
        return self.meeting.exchange(self._rank, call, thing)


def on_rank_threads(world: int, work: Callable[[Group], T]) -> list[T]:
    """Run ``work(ep group)`` on every rank; the first real failure is raised, not the broken barriers it causes."""
    meeting = Meeting(world)

    def live(rank: int) -> T:
        handle = cast(ProcessGroup, ThreadProcessGroup(meeting, rank))
        try:
            return work(Group("ep", tuple(range(world)), rank, handle, Ledger()))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(live, rank) for rank in range(world)]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
