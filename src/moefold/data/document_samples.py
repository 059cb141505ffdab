"""Samples that are documents: sample `i` is one document, or one piece of a document longer than seq_len.

The order is a pure function of the seed and the number, like that of windows (`samples.py`), and every piece of a
source comes once per epoch. A sample's length is known from the index alone: every rank can tell the lengths of a whole
step, and so plan who computes what, before a token is read and without asking anyone.
"""

from __future__ import annotations

from typing import NamedTuple

from moefold.config.data import DataConfig
from moefold.data.mixture import Draws
from moefold.data.packing import Piece, Pieces
from moefold.data.samples import Sample, Samples, Split, Stock
from moefold.data.sources import Source
from moefold.errors import DataError


class DocumentSamples:
    """One document each, of at most seq_len tokens that go in."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> None:
        self._stock = Stock(data, vocab_size, seed, split)
        self.seq_len = data.seq_len
        self.mixture, self.sources = self._stock.mixture, self._stock.sources
        self.pieces = tuple(self._pieces(source) for source in self.sources)
        self.fingerprint = self._stock.fingerprint()
        self._draws = Draws(self.mixture, tuple(map(len, self.pieces)), seed, split)

    def sample(self, index: int) -> Sample:
        found = self._find(index)
        tokens = self._stock.read(found.source, found.piece.start, found.piece.length + 1)
        return Sample(tokens, (0,), found.id)

    def length(self, index: int) -> int:
        """How many tokens of a sample go in; nothing is read to know it."""
        return self._find(index).piece.length

    @property
    def num_tokens(self) -> int:
        return self._stock.num_tokens

    def _find(self, index: int) -> _Found:
        source, epoch, number = self._draws[index]
        return _Found(source, self.pieces[source][number], f"{source}:{epoch}:{number}")

    def _pieces(self, source: Source) -> Pieces:
        pieces = Pieces(source, self.seq_len)
        if not len(pieces):
            raise DataError(f"{source.path}: {source.num_tokens:,} tokens, but no document of two or more")
        return pieces


class _Found(NamedTuple):
    source: int
    piece: Piece
    id: str


AnySamples = Samples | DocumentSamples


def open_samples(data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> AnySamples:
    """The samples that `data.packing` asks for."""
    kind = DocumentSamples if data.packing in ("padded", "bin_packed") else Samples
    return kind(data, vocab_size, seed, split)
