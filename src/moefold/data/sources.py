"""A source of a mixture: one file, or the files of a folder in the order of their names, read as one token stream.

Every file is opened and checked once at the start; after that only the most recently used stay open, so a source may
have more files than a process may have open. A file that comes back is compared with what it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

import numpy as np

from moefold.config.data import BUILTIN, SourceConfig
from moefold.data.builtin import builtin_corpus
from moefold.data.byte_ranges import exists, list_folder
from moefold.data.tokens import TokenFile, open_token_file
from moefold.errors import DataError

_MOST_OPEN = 128


@dataclass(frozen=True)
class FileFacts:
    """What must not change while a run uses a file, and between its parts."""

    name: str
    num_tokens: int
    digest: str


class Source:
    """Windows of all tokens of a source, across the borders of its files."""

    def __init__(self, config: SourceConfig, vocab_size: int, split: str, most_open: int = _MOST_OPEN) -> None:
        self.path = config.path
        self._open: OrderedDict[int, TokenFile] = OrderedDict()
        self._most_open, self._lock = most_open, Lock()
        self._openers = _openers(config, vocab_size, split)
        self.files = tuple(self._first_look(number) for number in range(len(self._openers)))
        self._bounds = [0, *accumulate(facts.num_tokens for facts in self.files)]
        self._scanned: dict[int, np.ndarray] = {}

    @property
    def num_tokens(self) -> int:
        return self._bounds[-1]

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream."""
        parts = [self._file(number).window(at, count) for number, at, count in self._parts(start, length)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def document_starts_in(self, start: int, length: int) -> np.ndarray:
        """Positions of the stream where a document begins; every file begins one."""
        parts = [
            self._file(number).document_starts_in(at, count) + self._bounds[number]
            for number, at, count in self._parts(start, length)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def num_documents(self, number: int) -> int:
        """Of one file. A file without an index is read through once, and what was found is kept."""
        if number in self._scanned:
            return len(self._scanned[number]) - 1
        file = self._file(number)
        if not file.has_index:
            self._scanned[number] = file.document_bounds(0, file.num_documents)
        return file.num_documents

    def document_bounds(self, number: int, first: int, after: int) -> np.ndarray:
        """Where documents `first` to `after` - 1 of one file begin in the stream, and where the last of them ends."""
        found = self._scanned.get(number)
        bounds = self._file(number).document_bounds(first, after) if found is None else found[first : after + 1]
        return bounds + self._bounds[number]

    def describe(self, position: int) -> str:
        """File, document and offset of a token, for a message."""
        ((number, at, _),) = self._parts(position, 1)
        file = self._file(number)
        document = file.document_at(at)
        first, _ = file.document_span(document)
        return f"{file.name}: document {document:,}, offset {at - first:,} (token {at:,} of the file)"

    def _parts(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """(file, first token in it, number of tokens) of every file that a window touches."""
        end = start + length
        if start < 0 or length < 0 or end > self.num_tokens:
            raise DataError(f"{self.path}: has {self.num_tokens:,} tokens, not {length:,} from {start:,}")
        found, number = [], bisect_right(self._bounds, start) - 1
        while start < end:
            stop = min(end, self._bounds[number + 1])
            if stop > start:
                found.append((number, start - self._bounds[number], stop - start))
            start, number = stop, number + 1
        return found

    def _first_look(self, number: int) -> FileFacts:
        file = self._openers[number]()
        self._keep(number, file)
        return _facts(file)

    def _file(self, number: int) -> TokenFile:
        with self._lock:
            file = self._open.get(number)
            if file is None:
                file = self._openers[number]()
                if _facts(file) != self.files[number]:
                    raise DataError(
                        f"{file.name}: was changed while in use: {_facts(file)}, before {self.files[number]}"
                    )
            self._keep(number, file)
            return file

    def _keep(self, number: int, file: TokenFile) -> None:
        self._open[number] = file
        self._open.move_to_end(number)
        while len(self._open) > self._most_open:
            self._open.popitem(last=False)


def _facts(file: TokenFile) -> FileFacts:
    return FileFacts(file.name, file.num_tokens, file.digest)


def _openers(config: SourceConfig, vocab_size: int, split: str) -> list[Callable[[], TokenFile]]:
    """How to open each file of a source, in order."""
    if config.path == BUILTIN:
        return [lambda: builtin_corpus(split == "validation")]

    def opener(path: str) -> Callable[[], TokenFile]:
        return lambda: open_token_file(path, vocab_size, config.dtype, config.end_of_document)

    return [opener(path) for path in _paths(config.path)]


def _paths(path: str) -> list[str]:
    if path.endswith((".npy", ".bin", ".idx")):
        return [path]
    if exists(path + ".idx") or exists(path + ".bin"):
        return [path]
    names = list_folder(path)
    if names is None:
        raise DataError(f"{path}: there is no {path}.bin with {path}.idx, no .npy file and no folder of this name")
    pairs = {ending: {name[:-4] for name in names if name.endswith(ending)} for ending in (".bin", ".idx")}
    lonely = sorted(pairs[".bin"] ^ pairs[".idx"])
    if lonely:
        missing = ".idx" if lonely[0] in pairs[".bin"] else ".bin"
        raise DataError(f"{path}: {lonely[0]}{missing} is missing; its pair was not written to the end, or not copied")
    found = sorted(pairs[".bin"] | {name for name in names if name.endswith(".npy")})
    if not found:
        raise DataError(f"{path}: a folder without .bin/.idx pairs or .npy files ({len(names):,} other files)")
    return [f"{path.rstrip('/')}/{name}" for name in found]
