"""Memory of every rank of a host that its peers can read and write: torch's symmetric memory on GPUs.

Each rank allocates two equal buffers and maps those of all others (`torch.distributed._symmetric_memory`, over NVLink).
An exchange uses one of them, and the next one the other. It begins with a barrier, so a rank that passes the barrier of
exchange n + 1 knows that its peers have finished exchange n, and in exchange n + 2 it may write what they read then.

Two kinds of exchange, for kernels that compute meanwhile (`moe/kernels/tile_exchange_triton.py`):

- rows or columns of the others are copied here, source after source, on a stream of its own: GPUs have copy engines for
  that, and no SM is busy. After each copy a flag of its source is set to the number of the exchange, so that flags need
  never be lowered;
- ranks store in each other's buffers and raise counters there. Those are lowered by who has read what they announce.

On CPUs the buffers may be any memory that processes share; copies run on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.p2p import CommStream, comm_stream
from moefold.errors import ExchangeError

# Counters lie behind the data.
_ALIGNMENT = 16


class PeerBuffer(NamedTuple):
    """A buffer of every rank, as bytes, as mapped here; ``barrier`` of the ranks, on the current stream."""

    of_rank: Sequence[Tensor]
    barrier: Callable[[], None]


class PeerMemory:
    def __init__(self, rank: int, buffers: tuple[PeerBuffer, PeerBuffer], stream: CommStream) -> None:
        own = buffers[0].of_rank[rank]
        self.rank, self.size, self.stream = rank, len(buffers[0].of_rank), stream
        self.data_bytes = own.numel() - counter_bytes(self.size)
        # How many exchanges there have been, this one included.
        self.use = 0
        # By source: the last exchange whose copy has arrived.
        self.arrived_W = torch.zeros(self.size, dtype=torch.int32, device=own.device)
        self._buffers, self._device = buffers, own.device
        self._addresses = [
            torch.tensor([data.data_ptr() for data in buffer.of_rank], device=own.device) for buffer in buffers
        ]
        self._copying: object = None

    @property
    def buffers_W(self) -> Tensor:
        """The address of every rank's buffer of this exchange, and of its counters."""
        return self._addresses[self.use % 2]

    @property
    def counters_W(self) -> Tensor:
        return self.buffers_W + self.data_bytes

    @property
    def counters(self) -> Tensor:
        """This rank's own, by source."""
        return self._data(self.rank)[self.data_bytes :].view(torch.int32)[: self.size]

    def starts(self, sizes: Sequence[int]) -> Tensor:
        """[W + 1]: where each rank's part begins."""
        return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=self._device)

    def gather_rows(self, x_tK: Tensor, sizes: Sequence[int]) -> Tensor:
        """[S, K], in which each rank's rows are being copied."""
        gathered_SK = x_tK.new_empty(sum(sizes), x_tK.shape[1])
        parts = gathered_SK.split(list(sizes))
        self._begin(x_tK)
        sources = [self._view(rank, (size, x_tK.shape[1]), x_tK.dtype) for rank, size in enumerate(sizes)]
        self._copy(parts, sources)
        return gathered_SK

    def gather_columns(self, x_Sk: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Flat: for each rank its columns of this rank's rows, which are being copied."""
        mine, first = rows[self.rank], sum(rows[: self.rank])
        arriving = x_Sk.new_empty(mine * sum(columns))
        parts = [
            part.view(mine, size)
            for part, size in zip(arriving.split([mine * size for size in columns]), columns, strict=True)
        ]
        self._begin(x_Sk)
        sources = [
            self._view(rank, (sum(rows), size), x_Sk.dtype)[first : first + mine] for rank, size in enumerate(columns)
        ]
        self._copy(parts, sources)
        return arriving

    def next_parts(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Where the others store what they compute for this rank. Valid until the next exchange but one."""
        self._begin(None)
        return self._view(self.rank, shape, dtype)

    def lower_counters(self) -> None:
        self.counters.zero_()

    def beside(self, sends: Callable[[], object], computes: Callable[[], object]) -> None:
        """Two kernels at once, the first of which waits for tiles of the second."""
        handle = self.stream.submit(sends)
        computes()
        self.stream.wait(handle, _nothing)

    def _begin(self, x: Tensor | None) -> None:
        """The next exchange; ``x`` is what others read of this rank."""
        if self._copying is not None:
            # Nothing is left to wait for, unless a copy has failed.
            self.stream.wait(self._copying, _nothing)
            self._copying = None
        self.use += 1
        if x is not None:
            self._view(self.rank, x.shape, x.dtype).copy_(x)
        self._buffers[self.use % 2].barrier()

    def _copy(self, parts: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """This rank's own at once, the others' beside what follows: the next rank's first, so that not all ranks read
        one rank's memory at a time."""
        parts[self.rank].copy_(sources[self.rank])
        _set_flag(self.arrived_W, self.rank, self.use)
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        copies = [(source, parts[source], sources[source]) for source in order]
        self._copying = self.stream.submit(partial(_copy_all, copies, self.arrived_W, self.use))

    def _data(self, rank: int) -> Tensor:
        return self._buffers[self.use % 2].of_rank[rank]

    def _view(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        needed = dtype.itemsize * torch.Size(shape).numel()
        if needed > self.data_bytes:
            raise ExchangeError(f"peer memory has {self.data_bytes:,} bytes, and this exchange needs {needed:,}")
        return self._data(rank)[:needed].view(dtype).view(*shape)


def counter_bytes(num_ranks: int) -> int:
    """Behind the data of a buffer."""
    return -(-4 * num_ranks // _ALIGNMENT) * _ALIGNMENT


def gpu_peer_memory(group: torch.distributed.ProcessGroup, data_bytes: int, device: torch.device) -> PeerMemory:
    """A collective of the group's ranks. Never run: it needs GPUs that are joined by NVLink."""
    from torch.distributed import _symmetric_memory as symmetric

    size = -(-data_bytes // _ALIGNMENT) * _ALIGNMENT + counter_bytes(group.size())

    def allocate() -> PeerBuffer:
        own = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
        handle = symmetric.rendezvous(own, group)
        return PeerBuffer(
            [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())], handle.barrier
        )

    return PeerMemory(group.rank(), (allocate(), allocate()), comm_stream(device))


def _copy_all(copies: Sequence[tuple[int, Tensor, Tensor]], arrived_W: Tensor, use: int) -> None:
    for source, target, data in copies:
        target.copy_(data)
        _set_flag(arrived_W, source, use)


def _set_flag(flag_W: Tensor, index: int, value: int) -> None:
    """After what was done before it: on the current stream, without a kernel, where there is one."""
    if flag_W.is_cuda:
        from torch._C._distributed_c10d import _SymmetricMemory

        _SymmetricMemory.stream_write_value32(flag_W, index, value)
    else:
        flag_W[index] = value


def _nothing() -> bool:
    """To do while waiting."""
    return False
