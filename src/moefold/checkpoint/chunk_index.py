"""Which rank's file holds which box of which tensor, for readers that cannot open every rank's table.

Thousands of ranks that load each need boxes from a few of thousands of files. The index is a sorted copy of all tables:

    index_rows.bin     for each tensor, in the order of names, its chunks, in the order of their first indices: rank,
                       byte offset in the rank's data file, first index per dim, last plus one per dim
    index_pages.bin    where each tensor's rows lie, in pages of at most 4,096 rows: the tensor's number, first byte,
                       rows, lowest first and highest last-plus-one index of dim 0, and the page's sha256

All are 64-bit integers. The manifest has the hashes of both files. A reader has the pages from the process that checked
them, bisects for a tensor, and reads and checks the few pages that reach into the box it wants; so it opens only the
data files that it takes numbers from.

Rank 0 writes the index, from what every rank sends of its own table (`sent_rows`). It is a function of the tables alone
(`build_index`), and is not trusted instead of them: when ranks load, each compares one rank's table with it
(`check_rank`), and a full verification builds it again.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.checkpoint.files import naming, opened, read_recorded, write_file
from moefold.checkpoint.manifest import MAX_JSON_BYTES, IndexFiles, Manifest, TensorEntry, read_table
from moefold.checkpoint.shard_file import shard_offsets
from moefold.checkpoint.tensor_spec import Box, ChunkSpec, is_rank_record, volume
from moefold.errors import CheckpointError

ROWS, PAGES = "index_rows.bin", "index_pages.bin"
PAGE_ROWS = 4096
_NUMBER = np.dtype("<i8")
# Columns of a page: tensor, first byte, rows, lowest, highest, and the hash as four numbers.
_TENSOR, _FIRST_BYTE, _NUM_ROWS, _LOWEST, _HIGHEST, _HASH = range(6)
_PAGE_COLUMNS = _HASH + 4

Numbers = NDArray[np.int64]


class Located(NamedTuple):
    """A chunk in a rank's data file."""

    rank: int
    offset: int
    box: Box


# ---- writing ----


def rows_of(chunks: Sequence[ChunkSpec]) -> Numbers:
    """Of one rank's table: a number for the name, offset, first indices, last plus one; missing dims are 0."""
    listed = [
        (chunk, offset)
        for chunk, offset in zip(chunks, shard_offsets(chunks), strict=False)
        if not is_rank_record(chunk.name)
    ]
    dims = max((len(chunk.shape) for chunk, _ in listed), default=0)
    rows = np.zeros((len(listed), 2 + 2 * dims), _NUMBER)
    for row, (chunk, offset) in zip(rows, listed, strict=True):
        row[:2] = _name_number(chunk.name), offset
        row[2 : 2 + len(chunk.box)] = [part.start for part in chunk.box]
        row[2 + dims : 2 + dims + len(chunk.box)] = [part.stop for part in chunk.box]
    return rows


def sent_rows(chunks: Sequence[ChunkSpec]) -> bytes:
    """What a rank sends of its table. By columns, which compress well: neighbours in them are alike."""
    rows = rows_of(chunks)
    return zlib.compress(np.array(rows.shape, _NUMBER).tobytes() + rows.T.tobytes(), 1)


def received_rows(content: bytes) -> Numbers:
    numbers = np.frombuffer(zlib.decompress(content), _NUMBER)
    return numbers[2:].reshape(numbers[1], numbers[0]).T


def _name_number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def write_index(directory: Path, tensors: Mapping[str, TensorEntry], by_rank: Iterable[Numbers]) -> IndexFiles:
    pages, rows = build_index(directory, tensors, by_rank)
    return IndexFiles(
        pages=write_file(directory / PAGES, [pages.tobytes()]), rows=write_file(directory / ROWS, map(_bytes_of, rows))
    )


def build_index(
    directory: Path, tensors: Mapping[str, TensorEntry], by_rank: Iterable[Numbers]
) -> tuple[Numbers, list[Numbers]]:
    """The pages' places, and the pages. ``by_rank`` has each rank's ``rows_of``; ``directory`` is for messages."""
    names = sorted(tensors)
    table = _all_rows(directory, names, by_rank)
    dims = (table.shape[1] - 3) // 2
    edges = np.searchsorted(table[:, 0], np.arange(len(names) + 1))
    places: list[tuple[int, ...]] = []
    pages: list[Numbers] = []
    at = 0
    for number, name in enumerate(names):
        own = len(tensors[name].shape)
        columns = [1, 2, *range(3, 3 + own), *range(3 + dims, 3 + dims + own)]
        rows = table[edges[number] : edges[number + 1]][:, columns]
        rows = rows[np.lexsort((rows[:, 0], *(rows[:, 2 + dim] for dim in reversed(range(own)))))]
        for first in range(0, len(rows), PAGE_ROWS):
            page = np.ascontiguousarray(rows[first : first + PAGE_ROWS], _NUMBER)
            reach = (int(page[:, 2].min()), int(page[:, 2 + own].max())) if own else (0, 0)
            places.append((number, at, len(page), *reach, *_hash_of(page)))
            pages.append(page)
            at += page.nbytes
    return np.array(places, _NUMBER).reshape(len(places), _PAGE_COLUMNS), pages


def _all_rows(directory: Path, names: Sequence[str], by_rank: Iterable[Numbers]) -> Numbers:
    """Sorted by tensor: its number among the names, rank, offset, and the box in as many dims as any tensor has."""
    ranks = list(by_rank)
    dims = max(((rows.shape[1] - 2) // 2 for rows in ranks), default=0)
    table = np.zeros((sum(map(len, ranks)), 3 + 2 * dims), np.int64)
    at = 0
    for rank, rows in enumerate(ranks):
        own, part = (rows.shape[1] - 2) // 2, table[at : at + len(rows)]
        part[:, 0], part[:, 1], part[:, 2] = rows[:, 0], rank, rows[:, 1]
        part[:, 3 : 3 + own], part[:, 3 + dims : 3 + dims + own] = rows[:, 2 : 2 + own], rows[:, 2 + own :]
        at += len(rows)
    known = np.array([_name_number(name) for name in names], np.int64)
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known[order], table[:, 0]), max(len(names) - 1, 0))
    strange = np.flatnonzero(known[order][place] != table[:, 0]) if len(names) else np.arange(len(table))
    if len(strange) or len(set(known.tolist())) != len(names):
        rank = int(table[strange[0], 1]) if len(strange) else 0
        raise CheckpointError(f"{directory}: rank {rank} wrote a tensor that is not among the manifest's")
    table[:, 0] = order[place]
    return table[np.argsort(table[:, 0], kind="stable")]


def _bytes_of(page: Numbers) -> bytes:
    return page.tobytes()


def _hash_of(page: Numbers) -> tuple[int, ...]:
    return tuple(np.frombuffer(hashlib.sha256(page.tobytes()).digest(), _NUMBER).tolist())


# ---- reading ----


class ChunkIndex:
    """The chunks of a checkpoint, by tensor and box."""

    def __init__(self, path: Path, manifest: Manifest, pages: Numbers, rows: bytes | mmap.mmap) -> None:
        """``rows`` are the bytes of all pages; a page is checked before it is used. ``path`` is named in messages."""
        self.path, self._manifest, self.rows = path, manifest, rows
        self._names = sorted(manifest.tensors)
        self.pages = pages
        # Pages that were read, and are right.
        self.checked: dict[int, Numbers] = {}

    @classmethod
    def of_tables(cls, directory: Path, manifest: Manifest, tables: Iterable[Sequence[ChunkSpec]]) -> ChunkIndex:
        pages, rows = build_index(directory, manifest.tensors, map(rows_of, tables))
        return cls(directory, manifest, pages, b"".join(map(_bytes_of, rows)))

    def find(self, name: str, box: Box) -> Iterator[Located]:
        """The chunks that have elements of the box."""
        if not volume(box):
            return
        dims = len(box)
        starts, stops = [part.start for part in box], [part.stop for part in box]
        for rows in self._reaching(name, box):
            first, last = rows[:, 2 : 2 + dims], rows[:, 2 + dims :]
            for row in rows[((first < stops) & (last > starts) & (first < last)).all(axis=1)].tolist():
                yield Located(row[0], row[1], tuple(map(slice, row[2 : 2 + dims], row[2 + dims :])))

    def check_rank(self, rank: int, chunks: Sequence[ChunkSpec]) -> None:
        """Raise unless the index has this rank's table: each of its chunks, once, where it is in the data file."""
        listed: dict[str, list[Located]] = {}
        for chunk, offset in zip(chunks, shard_offsets(chunks), strict=False):
            if not is_rank_record(chunk.name):
                listed.setdefault(chunk.name, []).append(Located(rank, offset, chunk.box))
        for name, expected in listed.items():
            # Chunks of one tensor lie in the file in the order of their first indices, as in the index.
            dims = len(expected[0].box)
            found = [row for rows in self._reaching(name) for row in rows[rows[:, 0] == rank].tolist()]
            boxes = [Located(row[0], row[1], tuple(map(slice, row[2 : 2 + dims], row[2 + dims :]))) for row in found]
            if boxes != expected:
                raise CheckpointError(f"{self.path}: has other chunks of {name} than the table of rank {rank}")

    def check_pages(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._page(number)

    def _reaching(self, name: str, box: Box | None = None) -> Iterator[Numbers]:
        """The tensor's pages that have rows with elements in the box's range of dim 0."""
        number = bisect_left(self._names, name)
        first, last = np.searchsorted(self.pages[:, _TENSOR], [number, number + 1]).tolist()
        for page in range(first, last):
            if not box or (self.pages[page, _LOWEST] < box[0].stop and self.pages[page, _HIGHEST] > box[0].start):
                yield self._page(page)

    def _page(self, number: int) -> Numbers:
        if number not in self.checked:
            self.checked[number] = self._checked(self.pages[number])
        return self.checked[number]

    def _checked(self, place: Numbers) -> Numbers:
        tensor, at, count = place[:_LOWEST].tolist()
        name = self._names[tensor]
        shape = self._manifest.tensors[name].shape
        columns = 2 + 2 * len(shape)
        content = self.rows[at : at + count * columns * 8]
        if len(content) != count * columns * 8:
            raise CheckpointError(f"{self.path}: ends before the rows of {name}")
        rows = np.frombuffer(content, _NUMBER).reshape(count, columns)
        if _hash_of(rows) != tuple(place[_HASH:].tolist()):
            raise CheckpointError(f"{self.path}: damaged, the rows of {name} do not have their hash")
        first, last = rows[:, 2 : 2 + len(shape)], rows[:, 2 + len(shape) :]
        fits = (rows[:, :2] >= 0).all() and (rows[:, 0] < self._manifest.world).all()
        if not (fits and (first >= 0).all() and (first <= last).all() and (last <= np.array(shape, np.int64)).all()):
            raise CheckpointError(f"{self.path}: has chunks of {name} that cannot be")
        return rows


def read_pages(directory: Path, manifest: Manifest) -> bytes:
    """Checked; for ``open_index``, here or on other ranks. Nothing for a checkpoint without an index."""
    if manifest.index is None:
        return b""
    path = directory / PAGES
    content = read_recorded(path, manifest.index.pages, MAX_JSON_BYTES)
    if len(content) % (_PAGE_COLUMNS * 8):
        raise CheckpointError(f"{path}: has {len(content):,} bytes, which are no pages")
    pages = _pages_in(content)
    sane = (pages[:, :_HASH] >= 0).all() and (pages[:, _TENSOR] < len(manifest.tensors)).all()
    if not sane or (np.diff(pages[:, _TENSOR]) < 0).any() or (pages[:, _NUM_ROWS] > PAGE_ROWS).any():
        raise CheckpointError(f"{path}: has pages that cannot be")
    return content


def open_index(directory: Path, manifest: Manifest, pages: bytes) -> ChunkIndex:
    """``pages`` as ``read_pages`` returned them. Without an index, one is made of all ranks' tables."""
    if manifest.index is None:
        tables = (read_table(directory, manifest, rank) for rank in range(manifest.world))
        return ChunkIndex.of_tables(directory, manifest, tables)
    path, size = directory / ROWS, manifest.index.rows.bytes
    with opened(path) as descriptor, naming(path):
        found = os.fstat(descriptor).st_size
        if found != size:
            raise CheckpointError(f"{path}: has {found:,} bytes, the manifest says {size:,}")
        rows = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else b""
    return ChunkIndex(path, manifest, _pages_in(pages), rows)


def _pages_in(content: bytes) -> Numbers:
    return np.frombuffer(content, _NUMBER).reshape(-1, _PAGE_COLUMNS)


def check_index(directory: Path, manifest: Manifest, tables: Iterable[Sequence[ChunkSpec]]) -> ChunkIndex:
    """The index, which must be to the last bit what these tables, of all ranks, make."""
    built = ChunkIndex.of_tables(directory, manifest, tables)
    if manifest.index is not None:
        found = open_index(directory, manifest, read_pages(directory, manifest))
        found.check_pages(range(len(found.pages)))
        if not np.array_equal(found.pages, built.pages) or len(found.rows) != len(built.rows):
            raise CheckpointError(f"{directory / PAGES}: is not the index of the ranks' tables")
    return built
