"""Preference pairs as samples: sample 2n is a chosen answer with its prompt, sample 2n + 1 the rejected one.

Token files of pairs hold document 2i, the chosen one, and document 2i + 1, the rejected one; `moefold tokenize
--preference` writes them. Pairs are shuffled, the two of a pair stay together, and so both are in the same step,
wherever they are packed. A document that is cut would be another answer, so one that is longer than a sample is
refused.
"""

from __future__ import annotations

from moefold.config.data import DataConfig
from moefold.data.packing import Pieces
from moefold.data.sample_order import ItemOrder
from moefold.data.samples import DocumentSamples, Split, _Found
from moefold.data.sources import Source
from moefold.errors import DataError


class PairSamples(DocumentSamples):
    """As documents, two by two."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> None:
        super().__init__(data, vocab_size, seed, split)
        self._items = ItemOrder(self.mixture, tuple(len(pieces) // 2 for pieces in self.pieces), seed, split)

    def _find(self, index: int) -> _Found:
        source, epoch, pair = self._items[index // 2]
        number = 2 * pair + index % 2
        return _Found(source, self.pieces[source][number], f"{source}:{epoch}:{number}")

    def _pieces(self, source: Source) -> Pieces:
        pieces = super()._pieces(source)
        documents = sum(source.num_documents(file) for file in range(len(source.files)))
        if documents % 2:
            raise DataError(f"{source.path}: {documents:,} documents are no pairs; use moefold tokenize --preference")
        if len(pieces) != documents:
            raise DataError(
                f"{source.path}: {documents:,} documents are {len(pieces):,} samples: some are longer than "
                f"data.seq_len = {self.seq_len:,} tokens, or empty; raise data.seq_len, or leave them out"
            )
        return pieces
