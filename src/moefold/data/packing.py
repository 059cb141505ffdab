"""Documents within samples.

A window of the token stream (seq_len + 1 tokens: seq_len inputs, and the label of the last) holds parts of several
documents. `starts` are the indices in the window where a document begins, ascending. The first is always 0, as the
window's first token begins a part even if its document began earlier. A start at seq_len belongs to a token that is
only a label.

`Pieces` numbers the documents of a source for samples that are documents. A document of n tokens has n - 1 labels. They
are divided into pieces of seq_len labels, the last one shorter; a piece has one token more than labels, and the next
piece begins with that token. Documents of fewer than two tokens have no piece. Pieces are numbered document by
document. A table of all of them would be as large as the index, so only the first piece of every 128th document is
stored, and the documents between two entries are looked up. Making the table reads the whole index once, which detects
invalid entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moefold.data.sources import Source
from moefold.errors import DataError

_BLOCK = 128
# Documents read at a time while the table is made; a multiple of _BLOCK.
_RUN = _BLOCK << 13


def starts_in_window(document_starts: np.ndarray, start: int) -> tuple[int, ...]:
    """Document starts in the stream -> in the window that begins at `start`."""
    inside = (document_starts - start).tolist()
    return tuple(inside) if inside and inside[0] == 0 else (0, *inside)


def document_lengths(starts: Sequence[int], seq_len: int) -> list[int]:
    """Number of input tokens of each document of a window."""
    inside = [start for start in starts if start < seq_len]
    return [after - start for start, after in zip(inside, [*inside[1:], seq_len])]


def crosses_document(starts: Sequence[int], seq_len: int) -> np.ndarray:
    """bool[seq_len]: True where the label is the first token of another document."""
    found = np.zeros(seq_len, bool)
    found[[start - 1 for start in starts if 0 < start <= seq_len]] = True
    return found


class Piece(NamedTuple):
    """The first token in the source's stream, and the number of input tokens; one more token is the last label."""

    start: int
    length: int


class Pieces:
    """All pieces of one source."""

    def __init__(self, source: Source, seq_len: int) -> None:
        self._source, self._seq_len = source, seq_len
        self._num_documents = [source.num_documents(file) for file in range(len(source.files))]
        counts: list[np.ndarray] = []
        files: list[np.ndarray] = []
        documents: list[np.ndarray] = []
        for file, num_documents in enumerate(self._num_documents):
            for first in range(0, num_documents, _RUN):
                bounds = source.document_bounds(file, first, min(first + _RUN, num_documents))
                starts = np.arange(0, len(bounds) - 1, _BLOCK)
                counts.append(np.add.reduceat(num_pieces(bounds, seq_len), starts))
                files.append(np.full(len(starts), file))
                documents.append(first + starts)
        none = np.zeros(0, np.int64)
        self._first = np.cumsum(np.concatenate([[0], *counts]).astype(np.int64))
        self._file, self._document = np.concatenate([none, *files]), np.concatenate([none, *documents])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> Piece:
        if not 0 <= number < len(self):
            raise IndexError(f"piece {number} of {len(self)}")
        block = int(np.searchsorted(self._first, number, side="right")) - 1
        file, first = int(self._file[block]), int(self._document[block])
        after = min(first + _BLOCK, self._num_documents[file])
        bounds = self._source.document_bounds(file, first, after)
        counts = num_pieces(bounds, self._seq_len)
        ends = np.cumsum(counts)
        inside = number - int(self._first[block])
        at = int(np.searchsorted(ends, inside, side="right"))
        if at == len(ends) or ends[-1] != self._first[block + 1] - self._first[block]:
            raise DataError(
                f"{self._source.files[file].name}: documents {first:,} to {after:,} were changed while in use"
            )
        skipped = (inside - int(ends[at]) + int(counts[at])) * self._seq_len
        start, end = int(bounds[at]) + skipped, int(bounds[at + 1])
        return Piece(start, min(self._seq_len, end - start - 1))


def num_pieces(bounds: np.ndarray, seq_len: int) -> np.ndarray:
    """The number of pieces of each document, whose tokens lie between consecutive bounds."""
    labels = np.maximum(np.diff(bounds) - 1, 0)
    return -(-labels // seq_len)
