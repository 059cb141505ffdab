"""Samples by number: sample `i` of a run is a pure function of the seed and i.

No loader has a position, a buffer or a random state: the whole state of the data is one integer, the number of samples
taken. `sample_order.py` says which item of which source a sample is. Sample 10^12 costs as much as sample 0, and
nothing depends on the number of ranks.

`Samples`: an item is a window of the token stream. A source of N tokens has (N - 1) // seq_len windows of seq_len + 1
tokens; the last token of a window is the first of the next.

`DocumentSamples`: an item is a document, or a piece of a document longer than seq_len (`packing.py`). The index alone
gives a sample's length, so every rank can plan the whole step before a token is read, without communication.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from moefold.config.data import DataConfig, SourceConfig
from moefold.data.packing import Piece, Pieces, starts_in_window
from moefold.data.sample_order import ItemOrder, Mixture
from moefold.data.sources import Source
from moefold.errors import ConfigError, DamagedDataError, DataError, Problem
from moefold.redaction import without_login

Split = Literal["train", "validation"]
# Increment when the order changes for unchanged inputs of the fingerprint.
_ORDER_VERSION = 1


@dataclass(frozen=True, eq=False)
class Sample:
    """`tokens[:-1]` are the inputs and `tokens[1:]` the labels. `document_starts` are the indices where documents
    begin, 0 always among them; `id` is source:epoch:item. `loss_mask` has a bool for each token, False for one that
    does not count as a label; None where all count."""

    tokens: np.ndarray
    document_starts: tuple[int, ...]
    id: str
    loss_mask: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Number of input tokens."""
        return len(self.tokens) - 1


class SplitSources:
    """The sources of a split, their mixture, and the fingerprint of both."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split) -> None:
        self._configs = _source_configs(data, split)
        self.vocab_size, self._seq_len, self._packing = vocab_size, data.seq_len, data.packing
        self.seed, self.split = seed, split
        # With `skip`: raises if tokens that will be read are damaged; and is told of a sample that was left out.
        self.skips = data.verification.on_damage == "skip"
        self.check: Callable[[int, int, int], None] | None = None
        self.on_skip: Callable[[str, str], None] | None = None
        self.mixture = Mixture([config.weight for config in self._configs], seed, split, "mixture")
        self.sources = tuple(Source(config, vocab_size, split) for config in self._configs)

    @property
    def num_tokens(self) -> int:
        return sum(source.num_tokens for source in self.sources)

    @property
    def has_loss_mask(self) -> bool:
        """Whether a sample's labels may not all count: by a mask, or because it may be left out."""
        return self.skips or any(source.has_loss_mask for source in self.sources)

    def take(self, source: int, start: int, length: int, sample: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens and loss mask of a sample. One that is damaged is left out, if the run says so: nothing counts."""
        try:
            if self.check is not None:
                self.check(source, start, length)
            return self.read(source, start, length), self.loss_mask(source, start, length)
        except DamagedDataError as error:
            if not self.skips:
                raise
            if self.on_skip is not None:
                self.on_skip(sample, str(error))
            return np.zeros(length, np.int64), np.zeros(length, bool)

    def loss_mask(self, source: int, start: int, length: int) -> np.ndarray | None:
        found = self.sources[source]
        return found.loss_mask(start, length) if found.has_loss_mask else None

    def read(self, source: int, start: int, length: int) -> np.ndarray:
        """Tokens of a source; raises if one is outside the vocabulary."""
        tokens = self.sources[source].window(start, length).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            at = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise DamagedDataError(
                f"{self.sources[source].describe(start + at)}: token {int(tokens[at]):,} is outside the vocabulary of "
                f"{self.vocab_size:,}"
            )
        return tokens

    def fingerprint(self) -> str:
        """Hash of all that the order depends on. Folders are not included, so files may be moved."""
        facts: dict[str, object] = {
            "version": _ORDER_VERSION,
            "seed": self.seed,
            "split": self.split,
            "seq_len": self._seq_len,
            "places": self.mixture.block_counts,
            "sources": [
                {
                    "end_of_document": config.end_of_document,
                    "files": [[os.path.basename(without_login(f.name)), f.num_tokens, f.digest] for f in source.files],
                }
                for config, source in zip(self._configs, self.sources)
            ],
        }
        # Only for other packings than the oldest one, so that fingerprints in older checkpoints stay valid.
        if self._packing != "concat":
            facts["documents"] = self._packing
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Samples:
    """Windows of the token stream."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> None:
        self._split_sources = SplitSources(data, vocab_size, seed, split)
        self.seq_len = data.seq_len
        self.mixture, self.sources = self._split_sources.mixture, self._split_sources.sources
        self.windows = tuple(self._count_windows(source) for source in self.sources)
        self.fingerprint = self._split_sources.fingerprint()
        self._items = ItemOrder(self.mixture, self.windows, seed, split)

    def sample(self, index: int) -> Sample:
        source, epoch, window = self._items[index]
        start, name = window * self.seq_len, f"{source}:{epoch}:{window}"
        tokens, mask = self._split_sources.take(source, start, self.seq_len + 1, name)
        starts = self.sources[source].document_starts_in(start, self.seq_len + 1)
        return Sample(tokens, starts_in_window(starts, start), name, mask)

    def location(self, index: int) -> tuple[int, int, int]:
        """Source, first token and number of tokens of a sample."""
        source, _, window = self._items[index]
        return source, window * self.seq_len, self.seq_len + 1

    def on_read(self, check: Callable[[int, int, int], None], on_skip: Callable[[str, str], None]) -> None:
        """What `data.verification.on_damage: skip` needs: a check of tokens, and whom to tell of what is left out."""
        self._split_sources.check, self._split_sources.on_skip = check, on_skip

    def length(self, index: int) -> int:
        """Number of input tokens of a sample; reads no tokens."""
        return self.seq_len

    def __len__(self) -> int:
        """Samples of one epoch of every source."""
        return sum(self.windows)

    @property
    def num_tokens(self) -> int:
        return self._split_sources.num_tokens

    @property
    def has_loss_mask(self) -> bool:
        """Whether some tokens of some sample may not count in the loss; the same on every rank."""
        return self._split_sources.has_loss_mask

    def _count_windows(self, source: Source) -> int:
        if source.num_tokens <= self.seq_len:
            raise DataError(
                f"{source.path}: {source.num_tokens:,} tokens; one sample needs seq_len + 1 = {self.seq_len + 1:,}"
            )
        return (source.num_tokens - 1) // self.seq_len


class DocumentSamples:
    """Documents, and pieces of documents longer than seq_len."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> None:
        self._split_sources = SplitSources(data, vocab_size, seed, split)
        self.seq_len = data.seq_len
        self.mixture, self.sources = self._split_sources.mixture, self._split_sources.sources
        self.pieces = tuple(self._pieces(source) for source in self.sources)
        self.fingerprint = self._split_sources.fingerprint()
        self._items = ItemOrder(self.mixture, tuple(map(len, self.pieces)), seed, split)

    def sample(self, index: int) -> Sample:
        found = self._find(index)
        tokens, mask = self._split_sources.take(found.source, found.piece.start, found.piece.length + 1, found.id)
        return Sample(tokens, (0,), found.id, mask)

    def location(self, index: int) -> tuple[int, int, int]:
        """Source, first token and number of tokens of a sample."""
        found = self._find(index)
        return found.source, found.piece.start, found.piece.length + 1

    def on_read(self, check: Callable[[int, int, int], None], on_skip: Callable[[str, str], None]) -> None:
        """As for `Samples`."""
        self._split_sources.check, self._split_sources.on_skip = check, on_skip

    def length(self, index: int) -> int:
        """Number of input tokens of a sample, from the index; reads no tokens."""
        return self._find(index).piece.length

    def __len__(self) -> int:
        """Samples of one epoch of every source."""
        return sum(map(len, self.pieces))

    @property
    def num_tokens(self) -> int:
        return self._split_sources.num_tokens

    @property
    def has_loss_mask(self) -> bool:
        """Whether some tokens of some sample may not count in the loss; the same on every rank."""
        return self._split_sources.has_loss_mask

    def _find(self, index: int) -> _Found:
        source, epoch, number = self._items[index]
        return _Found(source, self.pieces[source][number], f"{source}:{epoch}:{number}")

    def _pieces(self, source: Source) -> Pieces:
        pieces = Pieces(source, self.seq_len)
        if not len(pieces):
            raise DataError(f"{source.path}: {source.num_tokens:,} tokens, but no document of two or more tokens")
        return pieces


class _Found(NamedTuple):
    source: int
    piece: Piece
    id: str


class PairSamples(DocumentSamples):
    """Preference pairs: sample 2n is a chosen answer with its prompt, sample 2n + 1 the rejected one.

    Token files of pairs hold document 2i, the chosen one, and document 2i + 1, the rejected one; `moefold tokenize
    --preference` writes them. Pairs are shuffled, the two of a pair stay together, and so both are in the same step,
    wherever they are packed. A document that is cut would be another answer, so one that is longer than a sample is
    refused.
    """

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


AnySamples = Samples | DocumentSamples


def open_samples(data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> AnySamples:
    """The samples for `data.packing`."""
    kind = DocumentSamples if data.packing in ("padded", "bin_packed") else Samples
    return kind(data, vocab_size, seed, split)


def _source_configs(data: DataConfig, split: Split) -> tuple[SourceConfig, ...]:
    if split == "train":
        if not data.sources:
            raise ConfigError(Problem("data.train", "names no tokens to train on", "set it to a path, or `builtin`"))
        return data.sources
    if data.validation is None:
        raise ConfigError(
            Problem("data.validation", "names no tokens to validate on", "set it to a path, or `builtin`")
        )
    return (SourceConfig(path=data.validation),)
