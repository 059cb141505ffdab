"""The `.idx` file beside a Megatron `.bin`: where every sequence begins, and which sequences form a document.

Little endian: magic (9 bytes), version 1 (uint64), token type (one byte), number of sequences n and of document marks d
(uint64 each), sizes in tokens (int32[n]), byte offsets in the `.bin` (int64[n]), document marks (int64[d]): document k
is the sequences marks[k] to marks[k + 1] - 1, so there are d - 1 documents.

What is checked when. On opening: every field of the header, the length of both files to the byte, the first and last
offset and mark, and the order of all entries if there are at most a million, else of 64 runs of 4,096 entries spread
over the file. Opening therefore takes milliseconds for any size. Later, every entry is checked when it is used, and
`check_everything` looks at all of them. Whatever is wrong is a DataError with the file, the field and the numbers.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moefold.data.byte_ranges import Bytes
from moefold.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_NO_TOKENS = {6: "float64", 7: "float32"}
LONGEST_SEQUENCE = 2**31 - 1
_CHECK_ALL = 1 << 20
_RUN, _NUM_RUNS = 4096, 64


def type_code(dtype: np.dtype) -> int:
    for code, known in TOKEN_TYPES.items():
        if np.dtype(known) == dtype:
            return code
    raise DataError(f"an index knows no tokens of type {dtype}; known: {', '.join(map(_type_name, TOKEN_TYPES))}")


@dataclass(frozen=True, eq=False)
class MegatronIndex:
    """The three tables, as views of the file."""

    name: str
    dtype: np.dtype
    bin_bytes: int
    sizes: np.ndarray
    pointers: np.ndarray
    marks: np.ndarray

    @property
    def num_tokens(self) -> int:
        return self.bin_bytes // self.dtype.itemsize

    @property
    def num_documents(self) -> int:
        return len(self.marks) - 1

    def document_span(self, document: int) -> tuple[int, int]:
        """The tokens of a document: its first, and the one after its last."""
        if not 0 <= document < self.num_documents:
            raise DataError(f"{self.name}: no document {document:,}; there are {self.num_documents:,}")
        start, end = self._start(document), self._start(document + 1)
        if start > end:
            raise self.wrong("document marks", f"document {document:,} runs from token {start:,} to {end:,}")
        return start, end

    def document_bounds(self, first: int, after: int) -> np.ndarray:
        """Where documents `first` to `after` - 1 begin, and where the last of them ends."""
        if not 0 <= first <= after <= self.num_documents:
            raise DataError(f"{self.name}: no documents {first:,} to {after:,}; there are {self.num_documents:,}")
        n, item, sequences = len(self.sizes), self.dtype.itemsize, self.marks[first : after + 1]
        if np.any((sequences < 0) | (sequences > n)):
            raise self.wrong("document marks", f"documents {first:,} to {after:,} lie outside the sequences")
        ends_all = sequences == n
        bounds = np.full(len(sequences), self.num_tokens)
        bounds[~ends_all] = self.pointers[sequences[~ends_all]] // item
        if bounds[0] < 0 or bounds[-1] > self.num_tokens or np.any(bounds[1:] < bounds[:-1]):
            raise self.wrong("offsets", f"documents {first:,} to {after:,} are out of order")
        return bounds

    def document_at(self, token: int) -> int:
        """The document that holds a token; of empty ones beside it, none."""
        return bisect_right(range(self.num_documents + 1), token, key=self._start) - 1

    def document_starts_in(self, start: int, length: int) -> np.ndarray:
        """Tokens of [start, start + length) that are the first of a document."""
        documents = range(self.num_documents)
        first = bisect_left(documents, start, key=self._start)
        after = bisect_left(documents, start + length, lo=first, key=self._start)
        sequences = self.marks[first:after]
        if np.any((sequences < 0) | (sequences >= len(self.sizes))):
            raise self.wrong("document marks", f"documents {first:,} to {after:,} lie outside the sequences")
        found = np.unique(self.pointers[sequences] // self.dtype.itemsize)
        if len(found) and not start <= found[0] <= found[-1] < start + length:
            raise self.wrong("document marks", f"documents {first:,} to {after:,} are out of order")
        return found

    def check_everything(self) -> None:
        """Look at every entry, a run at a time."""
        longest = max(len(self.sizes), len(self.marks))
        for first in range(0, longest, _CHECK_ALL):
            _check_sequences(self, first, first + _CHECK_ALL)
            _check_marks(self, first, first + _CHECK_ALL)

    def wrong(self, field: str, what: str) -> DataError:
        return DataError(f"{self.name}: {field}: {what}")

    def _start(self, document: int) -> int:
        """The first token of a document, or the end of the stream for the mark after the last."""
        sequence = int(self.marks[document])
        if not 0 <= sequence <= len(self.sizes):
            raise self.wrong("document marks", f"mark {document:,} is {sequence:,} of {len(self.sizes):,} sequences")
        if sequence == len(self.sizes):
            return self.num_tokens
        byte = int(self.pointers[sequence])
        if not 0 <= byte <= self.bin_bytes or byte % self.dtype.itemsize:
            raise self.wrong("offsets", f"sequence {sequence:,} is at byte {byte:,} of {self.bin_bytes:,}")
        return byte // self.dtype.itemsize


def open_index(source: Bytes, bin_bytes: int) -> MegatronIndex:
    """Read the header, and the tables only if the file has the length that the header asks for."""
    parse_header(source.read(0, min(source.size, HEADER.size)), source.size, source.name)
    return parse_index(source.whole(), source.name, bin_bytes)


def parse_header(head: bytes, num_bytes: int, name: str) -> tuple[np.dtype, int, int]:
    """Token type, number of sequences, number of marks."""
    if len(head) < HEADER.size:
        raise DataError(f"{name}: header: {num_bytes:,} bytes, fewer than the {HEADER.size} of a header")
    magic, version, code, num_sequences, num_marks = HEADER.unpack(head[: HEADER.size])
    if magic != MAGIC:
        raise DataError(f"{name}: magic: {magic!r} is not {MAGIC!r}; this is no Megatron index")
    if version != 1:
        raise DataError(f"{name}: version: {version}; only version 1 is known")
    if code in _NO_TOKENS:
        raise DataError(f"{name}: token type: code {code} means {_NO_TOKENS[code]}, which no token is")
    if code not in TOKEN_TYPES:
        raise DataError(f"{name}: token type: unknown code {code}; known: {', '.join(map(str, TOKEN_TYPES))}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_marks
    if num_bytes != expected:
        modes = "; it seems to hold modes of a multimodal set" if num_bytes == expected + num_sequences else ""
        raise DataError(
            f"{name}: counts: {num_sequences:,} sequences and {num_marks:,} document marks need {expected:,} bytes, "
            f"the file has {num_bytes:,}{modes}"
        )
    return np.dtype(TOKEN_TYPES[code]).newbyteorder("<"), num_sequences, num_marks


def parse_index(data: np.ndarray, name: str, bin_bytes: int) -> MegatronIndex:
    """The index in these bytes (uint8) of a `.bin` of this size; nothing is copied."""
    dtype, num_sequences, num_marks = parse_header(data[: HEADER.size].tobytes(), len(data), name)
    at = HEADER.size
    sizes = data[at : at + 4 * num_sequences].view("<i4")
    at += 4 * num_sequences
    pointers = data[at : at + 8 * num_sequences].view("<i8")
    at += 8 * num_sequences
    index = MegatronIndex(name, dtype, bin_bytes, sizes, pointers, data[at:].view("<i8"))
    _check_ends(index)
    for first, after in _runs(num_sequences):
        _check_sequences(index, first, after)
    for first, after in _runs(num_marks):
        _check_marks(index, first, after)
    return index


def _check_ends(index: MegatronIndex) -> None:
    n, item = len(index.sizes), index.dtype.itemsize
    if not len(index.marks):
        raise index.wrong("document marks", "there are none; even an empty set has one")
    if int(index.marks[0]) != 0 or int(index.marks[-1]) != n:
        raise index.wrong(
            "document marks", f"run from {int(index.marks[0]):,} to {int(index.marks[-1]):,}, not from 0 to {n:,}"
        )
    first, end = (int(index.pointers[0]), int(index.pointers[-1]) + int(index.sizes[-1]) * item) if n else (0, 0)
    if first != 0:
        raise index.wrong("offsets", f"the first sequence is at byte {first:,}, not 0")
    if end != index.bin_bytes:
        raise index.wrong("offsets", f"sequences end at byte {end:,}, the .bin file at {index.bin_bytes:,}")


def _check_sequences(index: MegatronIndex, first: int, after: int) -> None:
    """Sizes are not negative, and every sequence begins where the one before ends."""
    sizes = index.sizes[first:after].astype(np.int64)
    pointers = index.pointers[first : after + 1]
    if not len(sizes):
        return
    if sizes.min() < 0:
        at = int(np.argmax(sizes < 0))
        raise index.wrong("sizes", f"sequence {first + at:,} has {int(sizes[at]):,} tokens")
    if pointers.min() < 0 or pointers.max() > index.bin_bytes:
        at = int(np.argmax((pointers < 0) | (pointers > index.bin_bytes)))
        raise index.wrong("offsets", f"sequence {first + at:,} is at byte {pointers[at]:,} of {index.bin_bytes:,}")
    steps = sizes * index.dtype.itemsize
    wrong = pointers[1:] - pointers[:-1] != steps[: len(pointers) - 1]
    if wrong.any():
        at = int(np.argmax(wrong))
        raise index.wrong(
            "offsets",
            f"sequence {first + at:,} has {steps[at]:,} bytes at {pointers[at]:,}, the next is at {pointers[at + 1]:,}",
        )


def _check_marks(index: MegatronIndex, first: int, after: int) -> None:
    marks = index.marks[first : after + 1]
    # Between its checked ends, a table that never falls cannot leave its bounds.
    wrong = marks[1:] < marks[:-1]
    if wrong.any():
        at = int(np.argmax(wrong))
        raise index.wrong("document marks", f"mark {first + at + 1:,} is {marks[at + 1]:,}, after {marks[at]:,}")


def _runs(length: int) -> Iterator[tuple[int, int]]:
    if length <= _CHECK_ALL:
        yield 0, length
        return
    for number in range(_NUM_RUNS):
        first = (length - _RUN) * number // (_NUM_RUNS - 1)
        yield first, first + _RUN


def _type_name(code: int) -> str:
    return np.dtype(TOKEN_TYPES[code]).name
