"""Documents inside a sample: a window of the token stream holds pieces of several, one after the other.

S sequence length. A sample has S + 1 tokens: the first S go in, the last S are predicted. `starts` are the places of
the window where a document begins, in rising order; the first is always 0, since the window's first token begins a
piece even if its document began earlier. A start at S belongs to a token that is only predicted.

Every document of a source as numbered pieces, and the piece with a given number.

S sequence length. A document of n tokens teaches n - 1 predictions. They are cut into pieces of S, the last one
shorter: piece k reads tokens kS to (k+1)S and predicts each one's successor, so it takes one token more than it reads,
and the next piece begins with that token. Documents of fewer than two tokens teach nothing and have no piece.

Pieces are numbered document by document. A table of all of them would be as large as the index of the files; so only
every 128th document's first number is kept, and the documents between two entries are looked up when one is wanted.
The table is made by one pass over the index on opening, which also finds whatever is out of order in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moefold.data.sources import Source
from moefold.errors import DataError


def window_starts(document_starts: np.ndarray, start: int) -> tuple[int, ...]:
    """Starts in the stream -> starts in the window that begins at `start`."""
    inside = (document_starts - start).tolist()
    return tuple(inside) if inside and inside[0] == 0 else (0, *inside)


def lengths(starts: Sequence[int], seq_len: int) -> list[int]:
    """Of the S tokens that go in: how many each piece has."""
    inside = [start for start in starts if start < seq_len]
    return [after - start for start, after in zip(inside, [*inside[1:], seq_len])]


def positions(starts: Sequence[int], seq_len: int) -> np.ndarray:
    """int64[S]: each token's distance from the start of its piece."""
    sizes = lengths(starts, seq_len)
    first = np.cumsum([0, *sizes[:-1]])
    return np.arange(seq_len) - np.repeat(first, sizes)


def piece_of_token(starts: Sequence[int], seq_len: int) -> np.ndarray:
    """int64[S]: the number of the piece that each token belongs to."""
    sizes = lengths(starts, seq_len)
    return np.repeat(np.arange(len(sizes)), sizes)


def crossing(starts: Sequence[int], seq_len: int) -> np.ndarray:
    """bool[S]: whether the label of this token is the first of another document, which nothing here foretells."""
    found = np.zeros(seq_len, bool)
    found[[start - 1 for start in starts if 0 < start <= seq_len]] = True
    return found


_BLOCK = 128
# Documents looked at in one go while the table is made: a whole number of blocks.
_RUN = _BLOCK << 13


class Piece(NamedTuple):
    """The first token in the source's stream, and how many tokens go in; one more is predicted."""

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
                counts.append(np.add.reduceat(pieces_of(bounds, seq_len), starts))
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
        counts = pieces_of(bounds, self._seq_len)
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


def pieces_of(bounds: np.ndarray, seq_len: int) -> np.ndarray:
    """How many pieces each document between two bounds has."""
    predictions = np.maximum(np.diff(bounds) - 1, 0)
    return -(-predictions // seq_len)
