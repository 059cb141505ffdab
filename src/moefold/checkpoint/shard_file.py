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
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.files import FileRecord, check_written, naming, opened, write_file
from moefold.checkpoint.tensor_spec import DTYPE_NAMES, Box, ChunkSpec, inside, intersection
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


class ShardReader:
    """Reads boxes out of a shard; only their pages are read."""

    def __init__(self, path: Path, chunks: Sequence[ChunkSpec]) -> None:
        """``chunks`` come from the rank's table, whose hash was checked; the file's length was too."""
        self.path = path
        header = shard_header(chunks)
        self.offsets: dict[str, list[tuple[int, ChunkSpec]]] = {}
        offset = len(header)
        for chunk in chunks:
            self.offsets.setdefault(chunk.name, []).append((offset, chunk))
            offset += chunk.num_bytes
        with opened(path) as descriptor, naming(path):
            size = os.fstat(descriptor).st_size
            if size != offset:
                raise CheckpointError(f"{path}: has {size:,} bytes, its table says {offset:,}")
            # A private mapping: torch needs writable memory, and the file must not change.
            self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        if self._map[: len(header)] != header:
            raise CheckpointError(f"{path}: its header does not say what its table says")

    def view(self, name: str, box: Box) -> Tensor:
        """A box that lies inside one of the chunks, as a view into the file."""
        offset, chunk = next(found for found in self.offsets[name] if intersection(box, found[1].box) == box)
        if not chunk.num_elements:
            return torch.empty(chunk.sizes, dtype=chunk.dtype)
        flat = torch.frombuffer(self._map, dtype=chunk.dtype, count=chunk.num_elements, offset=offset)
        return flat.view(chunk.sizes)[inside(box, chunk.box)]
