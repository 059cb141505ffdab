"""Samples by number: sample `i` of a run is a pure function of the seed and i.

No loader keeps a place, a buffer or a random state. The mixture says which source a sample comes from and the how
manyth draw of it this is; the draw's epoch shuffles the source's windows with a key of its own, and the place within
the epoch picks the window. All of it costs the same for sample 0 and for sample 10^12, and nothing depends on how many
ranks ask: the whole state of the data is one integer, the number of samples taken.

A source of N tokens has (N - 1) // S windows of S + 1 tokens, each overlapping the next by the one token that is
predicted from one and read by the other. Within an epoch of its source, every window comes exactly once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from moefold.config.data import DataConfig, SourceConfig
from moefold.data.mixture import Mixture
from moefold.data.packing import window_starts
from moefold.data.permute import Permutation
from moefold.data.sources import Source
from moefold.errors import ConfigError, DataError, Problem

Split = Literal["train", "validation"]
# Raise this when the same fingerprint would come to mean another order.
_ORDER_VERSION = 1


@dataclass(frozen=True, eq=False)
class Sample:
    """S + 1 tokens, where documents begin among them (first of all 0), and a name: source:epoch:window."""

    tokens: np.ndarray
    document_starts: tuple[int, ...]
    id: str


class Samples:
    """The samples of one split of a run."""

    def __init__(self, data: DataConfig, vocab_size: int, seed: int, split: Split = "train") -> None:
        configs = _source_configs(data, split)
        self.seq_len, self.vocab_size = data.seq_len, vocab_size
        self.mixture = Mixture([config.weight for config in configs], seed, split, "mixture")
        self.sources = tuple(Source(config, vocab_size, split) for config in configs)
        self.windows = tuple(self._count_windows(source) for source in self.sources)
        self.fingerprint = _fingerprint(self, configs, seed, split)
        windows = self.windows

        # A few orders are in use at a time: that of each source's epoch, and of the one before.
        @lru_cache(maxsize=4 * len(configs))
        def order(source: int, epoch: int) -> Permutation:
            return Permutation(windows[source], seed, split, source, epoch)

        self._order = order

    def place(self, index: int) -> tuple[int, int, int]:
        """(source, epoch of the source, window) of a sample."""
        source, draw = self.mixture.draw(index)
        epoch, place = divmod(draw, self.windows[source])
        return source, epoch, self._order(source, epoch)[place]

    def sample(self, index: int) -> Sample:
        number, epoch, window = self.place(index)
        source, start = self.sources[number], window * self.seq_len
        tokens = source.window(start, self.seq_len + 1).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            at = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise DataError(
                f"{source.describe(start + at)}: token {int(tokens[at]):,} is outside the vocabulary of "
                f"{self.vocab_size:,}"
            )
        starts = source.document_starts_in(start, self.seq_len + 1)
        return Sample(tokens, window_starts(starts, start), f"{number}:{epoch}:{window}")

    @property
    def num_tokens(self) -> int:
        return sum(source.num_tokens for source in self.sources)

    def _count_windows(self, source: Source) -> int:
        if source.num_tokens <= self.seq_len:
            raise DataError(
                f"{source.path}: {source.num_tokens:,} tokens; one sample needs seq_len + 1 = {self.seq_len + 1:,}"
            )
        return (source.num_tokens - 1) // self.seq_len


def _source_configs(data: DataConfig, split: Split) -> tuple[SourceConfig, ...]:
    if split == "train":
        return data.sources
    if data.validation is None:
        raise ConfigError(Problem("data.validation", "names no tokens to validate on", "name a path, or `builtin`"))
    return (SourceConfig(path=data.validation),)


def _fingerprint(samples: Samples, configs: Sequence[SourceConfig], seed: int, split: Split) -> str:
    """Whatever the order depends on. Where the files lie does not matter: they may move to another disk."""
    facts = {
        "version": _ORDER_VERSION,
        "seed": seed,
        "split": split,
        "seq_len": samples.seq_len,
        "places": samples.mixture.places,
        "sources": [
            {
                "end_of_document": config.end_of_document,
                "files": [[os.path.basename(f.name), f.num_tokens, f.digest] for f in source.files],
            }
            for config, source in zip(configs, samples.sources)
        ],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
