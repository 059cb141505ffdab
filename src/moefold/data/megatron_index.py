"""The `.idx` file beside a Megatron `.bin`: where every sequence begins, and which sequences form a document.

Little endian: magic (9 bytes), version 1 (uint64), token dtype (one byte), number of sequences n and of document
indices d (uint64 each), sequence_lengths in tokens (int32[n]), sequence_pointers, which are byte offsets in the `.bin`
(int64[n]), document_indices (int64[d]): document k has the sequences document_indices[k] to document_indices[k + 1] -
1, so there are d - 1 documents.

Checked on opening: every field of the header, the length of both files, the first and last pointer and document index,
and the order of all entries if there are at most a million, else of 64 runs of 4,096 entries spread over the file. So
opening takes milliseconds for any size. Later, every entry is checked when it is used, and `check_all_entries` checks
all of them. Every error is a DataError with the file, the field and the numbers.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moefold.data.byte_ranges import ByteFile
from moefold.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_FLOAT_TYPES = {6: "float64", 7: "float32"}
MAX_SEQUENCE_LENGTH = 2**31 - 1
_CHECK_ALL = 1 << 20
_RUN, _NUM_RUNS = 4096, 64


def type_code(dtype: np.dtype) -> int:
    for code, known in TOKEN_TYPES.items():
        if np.dtype(known) == dtype:
            return code
    raise DataError(
        f"a Megatron index has no code for tokens of type {dtype}; known: {', '.join(map(_type_name, TOKEN_TYPES))}"
    )


@dataclass(frozen=True, eq=False)
class MegatronIndex:
    """The three tables, as views of the file."""

    name: str
    dtype: np.dtype
    bin_bytes: int
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray

    @property
    def num_tokens(self) -> int:
        return self.bin_bytes // self.dtype.itemsize

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def document_span(self, document: int) -> tuple[int, int]:
        """First token and end (exclusive) of a document."""
        if not 0 <= document < self.num_documents:
            raise DataError(f"{self.name}: no document {document:,}; there are {self.num_documents:,}")
        start, end = self._start(document), self._start(document + 1)
        if start > end:
            raise self.error("document_indices", f"document {document:,} runs from token {start:,} to {end:,}")
        return start, end

    def document_bounds(self, first: int, after: int) -> np.ndarray:
        """Where documents `first` to `after` - 1 begin, and where the last of them ends."""
        if not 0 <= first <= after <= self.num_documents:
            raise DataError(f"{self.name}: no documents {first:,} to {after:,}; there are {self.num_documents:,}")
        n, item, sequences = len(self.sequence_lengths), self.dtype.itemsize, self.document_indices[first : after + 1]
        if np.any((sequences < 0) | (sequences > n)):
            raise self.error("document_indices", f"documents {first:,} to {after:,} lie outside the sequences")
        ends_all = sequences == n
        bounds = np.full(len(sequences), self.num_tokens)
        bounds[~ends_all] = self.sequence_pointers[sequences[~ends_all]] // item
        if bounds[0] < 0 or bounds[-1] > self.num_tokens or np.any(bounds[1:] < bounds[:-1]):
            raise self.error("sequence_pointers", f"documents {first:,} to {after:,} are not in order")
        return bounds

    def document_at(self, token: int) -> int:
        """The document that contains a token; never an empty document."""
        return bisect_right(range(self.num_documents + 1), token, key=self._start) - 1

    def document_starts_in(self, start: int, length: int) -> np.ndarray:
        """Tokens of [start, start + length) that are the first of a document."""
        documents = range(self.num_documents)
        first = bisect_left(documents, start, key=self._start)
        after = bisect_left(documents, start + length, lo=first, key=self._start)
        sequences = self.document_indices[first:after]
        if np.any((sequences < 0) | (sequences >= len(self.sequence_lengths))):
            raise self.error("document_indices", f"documents {first:,} to {after:,} lie outside the sequences")
        found = np.unique(self.sequence_pointers[sequences] // self.dtype.itemsize)
        if len(found) and not start <= found[0] <= found[-1] < start + length:
            raise self.error("document_indices", f"documents {first:,} to {after:,} are not in order")
        return found

    def check_all_entries(self) -> None:
        """Check every entry, a run at a time."""
        num_entries = max(len(self.sequence_lengths), len(self.document_indices))
        for first in range(0, num_entries, _CHECK_ALL):
            _check_sequences(self, first, first + _CHECK_ALL)
            _check_document_indices(self, first, first + _CHECK_ALL)

    def error(self, field: str, what: str) -> DataError:
        return DataError(f"{self.name}: {field}: {what}")

    def _start(self, document: int) -> int:
        """The first token of a document; the end of the stream for the entry after the last document."""
        sequence = int(self.document_indices[document])
        if not 0 <= sequence <= len(self.sequence_lengths):
            raise self.error(
                "document_indices", f"entry {document:,} is {sequence:,} of {len(self.sequence_lengths):,} sequences"
            )
        if sequence == len(self.sequence_lengths):
            return self.num_tokens
        byte = int(self.sequence_pointers[sequence])
        if not 0 <= byte <= self.bin_bytes or byte % self.dtype.itemsize:
            raise self.error("sequence_pointers", f"sequence {sequence:,} is at byte {byte:,} of {self.bin_bytes:,}")
        return byte // self.dtype.itemsize


def open_index(source: ByteFile, bin_bytes: int) -> MegatronIndex:
    """Read the header, and the tables only if the file has the length that follows from the header."""
    parse_header(source.read(0, min(source.size, HEADER.size)), source.size, source.name)
    return parse_index(source.read_all(), source.name, bin_bytes)


def parse_header(head: bytes, num_bytes: int, name: str) -> tuple[np.dtype, int, int]:
    """Token dtype, number of sequences, number of document indices."""
    if len(head) < HEADER.size:
        raise DataError(f"{name}: header: {num_bytes:,} bytes, fewer than the {HEADER.size} of a header")
    magic, version, code, num_sequences, num_document_indices = HEADER.unpack(head[: HEADER.size])
    if magic != MAGIC:
        raise DataError(f"{name}: magic: {magic!r} is not {MAGIC!r}; this is not a Megatron index")
    if version != 1:
        raise DataError(f"{name}: version: {version}; only version 1 is supported")
    if code in _FLOAT_TYPES:
        raise DataError(f"{name}: token type: code {code} means {_FLOAT_TYPES[code]}, which is not an integer type")
    if code not in TOKEN_TYPES:
        raise DataError(f"{name}: token type: unknown code {code}; known: {', '.join(map(str, TOKEN_TYPES))}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_document_indices
    if num_bytes != expected:
        modes = "; it seems to have the modes of a multimodal dataset" if num_bytes == expected + num_sequences else ""
        raise DataError(
            f"{name}: counts: {num_sequences:,} sequences and {num_document_indices:,} document indices need "
            f"{expected:,} bytes, the file has {num_bytes:,}{modes}"
        )
    return np.dtype(TOKEN_TYPES[code]).newbyteorder("<"), num_sequences, num_document_indices


def parse_index(data: np.ndarray, name: str, bin_bytes: int) -> MegatronIndex:
    """The index in ``data`` (uint8) of a `.bin` of ``bin_bytes``; nothing is copied."""
    dtype, num_sequences, num_document_indices = parse_header(data[: HEADER.size].tobytes(), len(data), name)
    at = HEADER.size
    sequence_lengths = data[at : at + 4 * num_sequences].view("<i4")
    at += 4 * num_sequences
    sequence_pointers = data[at : at + 8 * num_sequences].view("<i8")
    at += 8 * num_sequences
    index = MegatronIndex(name, dtype, bin_bytes, sequence_lengths, sequence_pointers, data[at:].view("<i8"))
    _check_ends(index)
    for first, after in _runs(num_sequences):
        _check_sequences(index, first, after)
    for first, after in _runs(num_document_indices):
        _check_document_indices(index, first, after)
    return index


def _check_ends(index: MegatronIndex) -> None:
    n, item = len(index.sequence_lengths), index.dtype.itemsize
    if not len(index.document_indices):
        raise index.error("document_indices", "there are none; even an empty dataset has one")
    if int(index.document_indices[0]) != 0 or int(index.document_indices[-1]) != n:
        raise index.error(
            "document_indices",
            f"run from {int(index.document_indices[0]):,} to {int(index.document_indices[-1]):,}, not from 0 to {n:,}",
        )
    first, end = (
        (int(index.sequence_pointers[0]), int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * item)
        if n
        else (0, 0)
    )
    if first != 0:
        raise index.error("sequence_pointers", f"the first sequence is at byte {first:,}, not 0")
    if end != index.bin_bytes:
        raise index.error("sequence_pointers", f"sequences end at byte {end:,}, the .bin file at {index.bin_bytes:,}")


def _check_sequences(index: MegatronIndex, first: int, after: int) -> None:
    """Sizes are not negative, and every sequence begins where the one before ends."""
    sequence_lengths = index.sequence_lengths[first:after].astype(np.int64)
    sequence_pointers = index.sequence_pointers[first : after + 1]
    if not len(sequence_lengths):
        return
    if sequence_lengths.min() < 0:
        at = int(np.argmax(sequence_lengths < 0))
        raise index.error("sequence_lengths", f"sequence {first + at:,} has {int(sequence_lengths[at]):,} tokens")
    if sequence_pointers.min() < 0 or sequence_pointers.max() > index.bin_bytes:
        at = int(np.argmax((sequence_pointers < 0) | (sequence_pointers > index.bin_bytes)))
        raise index.error(
            "sequence_pointers", f"sequence {first + at:,} is at byte {sequence_pointers[at]:,} of {index.bin_bytes:,}"
        )
    num_bytes = sequence_lengths * index.dtype.itemsize
    invalid = sequence_pointers[1:] - sequence_pointers[:-1] != num_bytes[: len(sequence_pointers) - 1]
    if invalid.any():
        at = int(np.argmax(invalid))
        raise index.error(
            "sequence_pointers",
            f"sequence {first + at:,} has {num_bytes[at]:,} bytes at {sequence_pointers[at]:,}, "
            f"the next is at {sequence_pointers[at + 1]:,}",
        )


def _check_document_indices(index: MegatronIndex, first: int, after: int) -> None:
    document_indices = index.document_indices[first : after + 1]
    # First and last entry were checked, so entries that never decrease are within bounds.
    invalid = document_indices[1:] < document_indices[:-1]
    if invalid.any():
        at = int(np.argmax(invalid))
        raise index.error(
            "document_indices",
            f"entry {first + at + 1:,} is {document_indices[at + 1]:,}, after {document_indices[at]:,}",
        )


def _runs(length: int) -> Iterator[tuple[int, int]]:
    if length <= _CHECK_ALL:
        yield 0, length
        return
    for number in range(_NUM_RUNS):
        first = (length - _RUN) * number // (_NUM_RUNS - 1)
        yield first, first + _RUN


def _type_name(code: int) -> str:
    return np.dtype(TOKEN_TYPES[code]).name
