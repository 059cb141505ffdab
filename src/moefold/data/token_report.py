"""What is in token files, or what rows would become: lengths, how much counts in the loss, and documents as text.

Lengths come from the index, and what counts from the mask, a run of documents at a time. Documents are shown as runs of
tokens that count and that do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from moefold.data.chat import ChatTokenizer
from moefold.data.input_rows import input_files, rows_of, split_tasks
from moefold.data.token_files import TokenFile, open_token_file
from moefold.data.token_origin import Origin, read_origin
from moefold.data.tokenization import ENCODERS, Kind, TokenizeOptions, Tokenizer
from moefold.errors import DataError

_RUN = 1 << 14
# More documents than this are not tokenized to look at a file of rows.
MAX_ROWS = 1000


class Part(NamedTuple):
    """A run of tokens of a document, as text or, without a tokenizer, as ids."""

    text: str
    counts: bool


class Shown(NamedTuple):
    document: int
    tokens: int
    counted: int
    parts: list[Part]


class Bar(NamedTuple):
    """Documents of `first` to `last` tokens."""

    first: int
    last: int
    documents: int
    tokens: int


@dataclass
class Report:
    """``counted``: tokens that count in the loss; ``unlabelled``: documents in which none does."""

    kind: str
    documents: int = 0
    tokens: int = 0
    counted: int = 0
    unlabelled: int = 0
    has_loss_mask: bool = False
    shortest: int = 0
    median: int = 0
    longest: int = 0
    histogram: list[Bar] = field(default_factory=list)
    samples: list[Shown] = field(default_factory=list)


class Document(NamedTuple):
    ids: np.ndarray
    mask: np.ndarray


class TokenDocuments:
    """The documents of a token file."""

    def __init__(self, path: str, vocab_size: int) -> None:
        self.file: TokenFile = open_token_file(path, vocab_size)
        self.origin: Origin | None = read_origin(path)

    def document(self, number: int) -> Document:
        start, end = self.file.document_span(number)
        return Document(self.file.window(start, end - start), self.file.loss_mask(start, end - start))

    def runs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Lengths of documents, and how many tokens of each count, a run of documents at a time."""
        for first in range(0, self.file.num_documents, _RUN):
            bounds = self.file.document_bounds(first, min(first + _RUN, self.file.num_documents))
            lengths = np.diff(bounds)
            if not self.file.has_loss_mask:
                yield lengths, lengths
                continue
            mask = self.file.loss_mask(int(bounds[0]), int(bounds[-1] - bounds[0]))
            before = np.append(0, np.cumsum(mask, dtype=np.int64))
            yield lengths, np.diff(before[bounds - bounds[0]])


def tokenized_rows(path: str, options: TokenizeOptions, tokenizer: Tokenizer | ChatTokenizer) -> list[Document]:
    """The first documents of a file of rows, as `moefold tokenize` would write them."""
    inputs, _ = input_files([path])
    rows = (row for task in split_tasks(inputs) for chunk in task for row in rows_of(chunk, options.columns))
    documents, masks = ENCODERS[options.kind](list(islice(rows, MAX_ROWS)), options, tokenizer)
    return [
        Document(ids, np.ones(len(ids), bool) if masks is None else masks[number])
        for number, ids in enumerate(documents)
        if len(ids)
    ]


def kind_of_rows(path: str) -> Kind:
    """By the keys of the first row."""
    inputs, _ = input_files([path])
    columns = ("messages", "chosen", "text")
    first = next((row for task in split_tasks(inputs) for chunk in task for row in rows_of(chunk, columns)), None)
    if first is None:
        raise DataError(f"{path}: has no rows")
    keys = first.value if isinstance(first.value, dict) else {}
    return "chat" if "messages" in keys else "preference" if "chosen" in keys else "text"


def summarize(kind: str, runs: Iterable[tuple[np.ndarray, np.ndarray]], has_loss_mask: bool) -> Report:
    report = Report(kind, has_loss_mask=has_loss_mask)
    lengths = [np.zeros(0, np.int64)]
    for length, counted in runs:
        lengths.append(length)
        report.counted += int(counted.sum())
        report.unlabelled += int((counted == 0).sum())
    found = np.concatenate(lengths)
    report.documents, report.tokens = len(found), int(found.sum())
    if len(found):
        report.shortest, report.median, report.longest = int(found.min()), int(np.median(found)), int(found.max())
    report.histogram = histogram(found)
    return report


def histogram(lengths: np.ndarray) -> list[Bar]:
    """By powers of two: 1, 2 to 3, 4 to 7, ..."""
    bars = []
    first = 1
    while len(lengths) and first <= lengths.max():
        inside = lengths[(lengths >= first) & (lengths < 2 * first)]
        bars.append(Bar(first, 2 * first - 1, len(inside), int(inside.sum())))
        first *= 2
    while bars and not bars[0].documents:
        bars.pop(0)
    return bars


def shown(number: int, document: Document, tokenizer: Tokenizer | ChatTokenizer | None, most: int) -> Shown:
    """A document as runs of tokens that count and that do not, cut after `most` tokens."""
    ids, mask = document.ids[:most], document.mask[:most]
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    parts = [
        Part(_text(ids[first:after], tokenizer), bool(mask[first])) for first, after in pairwise(cuts) if after > first
    ]
    return Shown(number, len(document.ids), int(document.mask.sum()), parts)


def _text(ids: np.ndarray, tokenizer: Tokenizer | ChatTokenizer | None) -> str:
    numbers: Sequence[int] = ids.tolist()
    return " ".join(map(str, numbers)) + " " if tokenizer is None else tokenizer.decode(numbers)
