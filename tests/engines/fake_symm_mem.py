"""A fake of torch's symmetric memory on CPU: its two all-to-alls, with the life of their buffers.

What is refused, and where rows come to lie, was read in torch's nvshmem_extension.cu:

- All tensors must be symmetric: allocated by ``empty`` in the same shape on every rank, and rendezvoused whole.
- Peers read a call's input after the call has returned, and every call begins with a barrier. So what a call was given
  must not be changed before the *next* call has begun.
- An expert without rows takes up ``major_align`` rows of the output of ``all_to_all_vdev_2d``.
- Output is overwritten by the next call that is given the same buffer; whatever is not written is garbage.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from tests.engines.rank_threads import ThreadProcessGroup, require
from torch import Tensor

# In one warp, and in warps of a block of 512 threads.
_WARP, _TILES = 32, 16
_GARBAGE = 0xA5


class FakeSymmetricMemory:
    """Of one rank: the module's functions and torch.ops.symm_mem in one."""

    def __init__(self, group: ThreadProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.backend: str | None = None
        self._buffers: dict[int, Tensor] = {}
        self._met: set[int] = set()
        # What peers may still be reading, with the version that it had.
        self._being_read: list[tuple[Tensor, int]] = []

    # ---- torch.distributed._symmetric_memory ----

    def set_backend(self, name: str) -> None:
        require(not self._buffers, "the backend cannot change after an allocation")
        self.backend = name

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        require(self.backend == "NVSHMEM", f"all_to_all_vdev_2d is of NVSHMEM, the backend is {self.backend}")
        shapes = self.group.exchange("empty", (shape, dtype))
        require(len(set(shapes)) == 1, f"ranks allocate different shapes: {shapes}")
        made = torch.empty(shape, dtype=dtype, device=device).fill_(_GARBAGE)
        self._buffers[made.data_ptr()] = made
        return made

    def rendezvous(self, tensor: Tensor, group: ThreadProcessGroup) -> None:
        require(tensor.data_ptr() in self._buffers, "not a symmetric tensor")
        group.exchange("rendezvous", None)
        self._met.add(tensor.data_ptr())

    # ---- torch.ops.symm_mem ----

    def all_to_all_vdev_2d(
        self,
        input: Tensor,
        out: Tensor,
        in_splits: Tensor,
        out_splits_offsets: Tensor,
        group_name: str,
        major_align: int | None = None,
    ) -> None:
        self._check(input, out, in_splits, out_splits_offsets, group_name)
        require(in_splits.dim() == 1 and out_splits_offsets.shape == (2, len(in_splits)), "shapes of the splits")
        num_local = len(in_splits) // self.size
        require(self.size <= _WARP and num_local <= _TILES, "more ranks or experts than the kernel has room for")
        splits = in_splits.view(self.size, num_local)
        require(int(splits.sum()) <= len(input), "the splits are longer than the input")
        offsets = (in_splits.cumsum(0) - in_splits).view(self.size, num_local)
        sources = self._exchange("all_to_all_vdev_2d", (input, in_splits), (input, splits, offsets))
        align, start = (1 if major_align is None else major_align), 0
        found = torch.empty(2, num_local, self.size, dtype=torch.int64)
        written = torch.full_like(out, _GARBAGE)
        for expert in range(num_local):
            end = start
            for source, (rows, counts, places) in enumerate(sources):
                count, place = int(counts[self.rank, expert]), int(places[self.rank, expert])
                end = self._write(written, end, rows[place : place + count])
                found[:, expert, source] = torch.tensor([count, end - count])
            start += max(-(-(end - start) // align) * align, align)
        self._finish(out, written, out_splits_offsets, found)

    def all_to_all_vdev_2d_offset(
        self, input: Tensor, out: Tensor, in_splits_offsets: Tensor, out_splits_offsets: Tensor, group_name: str
    ) -> None:
        self._check(input, out, in_splits_offsets, out_splits_offsets, group_name)
        require(in_splits_offsets.dim() == 2 and len(in_splits_offsets) == 2, "shapes of the splits")
        num_local = in_splits_offsets.shape[1] // self.size
        require(self.size <= _TILES and num_local <= _WARP, "more ranks or experts than the kernel has room for")
        splits, offsets = in_splits_offsets.view(2, num_local, self.size)
        sources = self._exchange("all_to_all_vdev_2d_offset", (input, in_splits_offsets), (input, splits, offsets))
        found = torch.empty(2, self.size, num_local, dtype=torch.int64)
        written, end = torch.full_like(out, _GARBAGE), 0
        for source, (rows, counts, places) in enumerate(sources):
            for expert in range(num_local):
                count, place = int(counts[expert, self.rank]), int(places[expert, self.rank])
                end = self._write(written, end, rows[place : place + count])
                found[:, source, expert] = torch.tensor([count, end - count])
        self._finish(out, written, out_splits_offsets, found)

    # ---- inside ----

    def _check(self, input: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor, group_name: str) -> None:
        require(group_name == self.group.group_name, f"no group is named {group_name}")
        for tensor in (input, out, splits, out_splits):
            require(tensor.data_ptr() in self._met, "a tensor without rendezvous")
            require(tensor.shape == self._buffers[tensor.data_ptr()].shape, "a part of a symmetric tensor")
            require(tensor.is_contiguous(), "not contiguous")
        require(input.dtype == out.dtype and input.stride(0) == out.stride(0), "input and output differ in their rows")
        require(splits.dtype == out_splits.dtype == torch.int64, "splits must be int64")

    def _exchange(self, call: str, being_read: tuple[Tensor, ...], message: Any) -> list[Any]:
        for tensor, before in self._being_read:
            require(tensor._version == before, "a buffer was changed while peers may still read it")
        self._being_read = [(tensor, tensor._version) for tensor in being_read]
        # A snapshot: the other threads read it at their leisure.
        return self.group.exchange(call, tuple(part.clone() for part in message))

    def _write(self, out: Tensor, start: int, rows: Tensor) -> int:
        end = start + len(rows)
        require(end <= len(out), f"{end} rows are written into a buffer of {len(out)}")
        out[start:end] = rows
        return end

    def _finish(self, out: Tensor, written: Tensor, out_splits: Tensor, found: Tensor) -> None:
        for tensor in (out, out_splits):
            require(all(tensor is not other for other, _ in self._being_read), "output and input are one buffer")
        out.copy_(written)
        out_splits.copy_(found.view(2, -1))
        # Peers write the counts of their next call here as soon as they begin it.
        self._being_read.append((out_splits, out_splits._version))

    def module(self) -> ModuleType:
        module = ModuleType("torch.distributed._symmetric_memory")
        module.__dict__.update({"set_backend": self.set_backend, "empty": self.empty, "rendezvous": self.rendezvous})
        return module
