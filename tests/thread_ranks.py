"""Ranks as threads, for tests of the seams that model code is written against: no process groups, no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from moefold.nn.batch import Batch
from moefold.nn.parallel_interfaces import OneChunk, Reach
from moefold.topology.folded_layout import shard_sizes

T = TypeVar("T")


class Meeting:
    """Where all ranks lay something on the table, look at everything, and clear it."""

    def __init__(self, world: int) -> None:
        self.table: list[Tensor] = [torch.empty(0)] * world
        self.barrier = threading.Barrier(world, timeout=120)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.table[rank] = x.detach()
        self.barrier.wait()
        everything = list(self.table)
        self.barrier.wait()
        return everything


class CutTokens(OneChunk):
    """The TokenSharding of ranks that each hold a share of one batch; what needs a gradient is left out."""

    def __init__(self, num_tokens: int, world: int, rank: int, meeting: Meeting) -> None:
        self.sizes, self.rank, self.meeting = shard_sizes(num_tokens, world), rank, meeting

    def all_gather(self, x_t: Tensor, batch: Batch) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x_t))

    def local_shard(self, x_N: Tensor, batch: Batch | None = None) -> Tensor:
        return x_N.split(self.sizes)[self.rank]

    def sum_counts(self, counts: Tensor, reach: Reach, batch: Batch) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, counts)).sum(0)

    def gather(self, x_tD: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def reduce(self, x_TD: Tensor) -> Tensor:
        raise NotImplementedError

    local_model = sum_heads = reduce


def on_threads(num_tokens: int, world: int, work: Callable[[CutTokens], T]) -> Sequence[T]:
    meeting = Meeting(world)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: work(CutTokens(num_tokens, world, rank, meeting)), range(world)))
