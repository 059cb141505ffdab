"""One rank's chunks in one safetensors file: a header that is a pure function of the chunks, then their bytes.

The header can be computed from the rank's table, so a reader never parses a header from a file: it computes the one
that must be there and compares. Any safetensors tool can read the file; its keys are the global names. A rank of flat
sharding has several boxes of a tensor: the keys of the second and later ones are NAME#1, NAME#2 and so on.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.files import FileRecord, check_written, naming, opened, write_file
from moefold.checkpoint.tensor_spec import DTYPE_NAMES, Box, ChunkSpec, inside, sizes_of
from moefold.errors import CheckpointError


def shard_order(chunks: Iterable[ChunkSpec]) -> list[ChunkSpec]:
    """Large dtypes first, so that every chunk starts at a multiple of its item size."""
    return sorted(chunks, key=lambda chunk: (-chunk.dtype.itemsize, chunk.name, chunk.corner))


def shard_header(chunks: Sequence[ChunkSpec]) -> bytes:
    """For chunks in shard order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    seen: Counter[str] = Counter()
    for chunk in chunks:
        key = f"{chunk.name}#{seen[chunk.name]}" if chunk.name in seen else chunk.name
        seen[chunk.name] += 1
        entries[key] = {
            "dtype": DTYPE_NAMES[chunk.dtype],
            "shape": list(chunk.sizes),
            "data_offsets": [offset, offset + chunk.num_bytes],
        }
        offset += chunk.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, chunks: Sequence[ChunkSpec], tensors: Iterable[Tensor]) -> FileRecord:
    """``tensors`` in the chunks' order, which is shard order; they may be made one at a time, as they are written."""
    return write_file(path, _contents(path, chunks, tensors))


def read_back(path: Path, chunks: Sequence[ChunkSpec], tensors: Iterable[Tensor]) -> None:
    """Raise unless the disk holds what was written."""
    check_written(path, _contents(path, chunks, tensors))


def _contents(path: Path, chunks: Sequence[ChunkSpec], tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield shard_header(chunks)
    for chunk, tensor in zip(chunks, tensors, strict=True):
        if tensor.dtype != chunk.dtype or tuple(tensor.shape) != chunk.sizes:
            raise CheckpointError(
                f"{path}: {chunk.name} is {tensor.dtype} {list(tensor.shape)}, not {chunk.dtype} {list(chunk.sizes)}"
            )
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            yield memoryview(flat.numpy())  # type: ignore[arg-type]


def shard_offsets(chunks: Sequence[ChunkSpec]) -> list[int]:
    """Where each chunk starts in the file, and at last the file's length; for chunks in shard order."""
    return list(accumulate((chunk.num_bytes for chunk in chunks), initial=len(shard_header(chunks))))


class ShardReader:
    """Reads boxes out of a shard; only their pages are read."""

    def __init__(self, path: Path, size: int) -> None:
        """``size`` is what the manifest says, where the file's hash is."""
        self.path, self.size = path, size
        with opened(path) as descriptor, naming(path):
            found = os.fstat(descriptor).st_size
            if found != size:
                raise CheckpointError(f"{path}: has {found:,} bytes, the manifest says {size:,}")
            # A private mapping: torch needs writable memory, and the file must not change.
            self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)

    def check_header(self, chunks: Sequence[ChunkSpec]) -> None:
        """Raise unless the file is of these chunks, which are those of the rank's table."""
        header, size = shard_header(chunks), shard_offsets(chunks)[-1]
        if self.size != size:
            raise CheckpointError(f"{self.path}: has {self.size:,} bytes, its table says {size:,}")
        if self._map[: len(header)] != header:
            raise CheckpointError(f"{self.path}: its header does not say what its table says")

    def view(self, dtype: torch.dtype, offset: int, chunk: Box, part: Box) -> Tensor:
        """``part`` of the chunk that starts at ``offset``, as a view into the file."""
        sizes = sizes_of(chunk)
        if not prod(sizes):
            return torch.empty(sizes_of(part), dtype=dtype)
        if offset % dtype.itemsize or offset + prod(sizes) * dtype.itemsize > self.size:
            raise CheckpointError(f"{self.path}: the index has a chunk at byte {offset:,}, where none can be")
        flat = torch.frombuffer(self._map, dtype=dtype, count=prod(sizes), offset=offset)
        return flat.view(sizes)[inside(part, chunk)]
