"""Samples by number: sample `i` of a run is a pure function of the seed and i.

No loader keeps a place, a buffer or a random state. `draws.py` says which item of which source a sample is; here an
item is a window of the token stream, in `document_samples.py` it is a piece of one document. All of it costs the same
for sample 0 and for sample 10^12, and nothing depends on how many ranks ask: the whole state of the data is one
integer, the number of samples taken.

A source of N tokens has (N - 1) // S windows of S + 1 tokens, each overlapping the next by the one token that is
predicted from one and read by the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moefold.config.data import DataConfig, SourceConfig
from moefold.data.mixture import Draws, Mixture
from moefold.data.packing import window_starts
from moefold.data.sources import Source
from moefold.errors import ConfigError, DataError, Problem

Split = Literal["train", "validation"]
# Raise this when the same fingerprint would come to mean another order.
_ORDER_VERSION = 1


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokens, of which all but the last go in and all but the first are predicted; where documents begin among them
    (first of all 0); and a name: source:epoch:item."""

    tokens: np.ndarray
    document_starts: tuple[int, ...]
    id: str

    @property
    def length(self) -> int:
        """How many tokens go in."""
        return len(self.tokens) - 1


class Stock:
    """What a split of a run draws from: its sources, their shares, and what makes this choice different from others."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split) -> None:
        self._configs = _source_configs(data, split)
        self.vocab_size, self._seq_len, self._documents = vocab_size, data.seq_len, data.packing
        self.seed, self.split = seed, split
        self.mixture = Mixture([config.weight for config in self._configs], seed, split, "mixture")
        self.sources = tuple(Source(config, vocab_size, split) for config in self._configs)

    @property
    def num_tokens(self) -> int:
        return sum(source.num_tokens for source in self.sources)

    def read(self, source: int, start: int, length: int) -> np.ndarray:
        """Tokens of a source's stream, all inside the vocabulary."""
        tokens = self.sources[source].window(start, length).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            at = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise DataError(
                f"{self.sources[source].describe(start + at)}: token {int(tokens[at]):,} is outside the vocabulary of "
                f"{self.vocab_size:,}"
            )
        return tokens

    def fingerprint(self) -> str:
        """Whatever the order depends on. Where the files lie does not matter: they may move to another disk."""
        facts: dict[str, object] = {
            "version": _ORDER_VERSION,
            "seed": self.seed,
            "split": self.split,
            "seq_len": self._seq_len,
            "places": self.mixture.places,
            "sources": [
                {
                    "end_of_document": config.end_of_document,
                    "files": [[os.path.basename(f.name), f.num_tokens, f.digest] for f in source.files],
                }
                for config, source in zip(self._configs, self.sources)
            ],
        }
        # Left out where there was no choice once, so that older checkpoints find the same.
        if self._documents != "concat":
            facts["documents"] = self._documents
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Samples:
    """Windows of the token stream."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> None:
        self._stock = Stock(data, vocab_size, seed, split)
        self.seq_len = data.seq_len
        self.mixture, self.sources = self._stock.mixture, self._stock.sources
        self.windows = tuple(self._count_windows(source) for source in self.sources)
        self.fingerprint = self._stock.fingerprint()
        self._draws = Draws(self.mixture, self.windows, seed, split)

    def sample(self, index: int) -> Sample:
        source, epoch, window = self._draws[index]
        start = window * self.seq_len
        tokens = self._stock.read(source, start, self.seq_len + 1)
        starts = self.sources[source].document_starts_in(start, self.seq_len + 1)
        return Sample(tokens, window_starts(starts, start), f"{source}:{epoch}:{window}")

    def length(self, index: int) -> int:
        """How many tokens of a sample go in; nothing is read to know it."""
        return self.seq_len

    @property
    def num_tokens(self) -> int:
        return self._stock.num_tokens

    def _count_windows(self, source: Source) -> int:
        if source.num_tokens <= self.seq_len:
            raise DataError(
                f"{source.path}: {source.num_tokens:,} tokens; one sample needs seq_len + 1 = {self.seq_len + 1:,}"
            )
        return (source.num_tokens - 1) // self.seq_len


def _source_configs(data: DataConfig, split: Split) -> tuple[SourceConfig, ...]:
    if split == "train":
        if not data.sources:
            raise ConfigError(Problem("data.train", "names no tokens to train on", "name a path, or `builtin`"))
        return data.sources
    if data.validation is None:
        raise ConfigError(Problem("data.validation", "names no tokens to validate on", "name a path, or `builtin`"))
    return (SourceConfig(path=data.validation),)
