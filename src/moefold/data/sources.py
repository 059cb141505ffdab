"""A source of tokens: one file, the files of a folder in the order of their names, or the builtin corpus.

The files of a source are read as one token stream. Every file is opened and checked once at the start; after that only
the most recently used stay open, so a source may have more files than a process may have descriptors. A file that is
opened again must have the same length and digest.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from threading import Lock

import numpy as np

from moefold.config.data import BUILTIN, SourceConfig
from moefold.data.block_hashes import FilePart
from moefold.data.byte_ranges import exists, list_folder
from moefold.data.token_files import LOSS_MASK, MemoryFile, TokenFile, open_token_file
from moefold.errors import DataError

_MAX_OPEN = 128
_END = b"\x00"
_MAX_FILE_BYTES = 1 << 18
_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
    | {"pydoc_data", "lib-dynload", "sitecustomize.py", "usercustomize.py", "__phello__"}
)


@dataclass(frozen=True)
class FileIdentity:
    """What must not change while a run uses a file, nor between its restarts."""

    name: str
    num_tokens: int
    digest: str
    has_loss_mask: bool = False


class Source:
    """The token stream of all files of a source."""

    def __init__(self, config: SourceConfig, vocab_size: int, split: str, max_open: int = _MAX_OPEN) -> None:
        self.path = config.path
        self._open: OrderedDict[int, TokenFile] = OrderedDict()
        self._max_open, self._lock = max_open, Lock()
        self._openers = _openers(config, vocab_size, split)
        self.files = tuple(self._open_first_time(number) for number in range(len(self._openers)))
        self._bounds = [0, *accumulate(identity.num_tokens for identity in self.files)]
        self._scanned: dict[int, np.ndarray] = {}

    @property
    def num_tokens(self) -> int:
        return self._bounds[-1]

    @property
    def has_loss_mask(self) -> bool:
        """Whether any file has one; of a file without one every token counts."""
        return any(identity.has_loss_mask for identity in self.files)

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the stream."""
        parts = [self._file(number).window(at, count) for number, at, count in self.split_window(start, length)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def loss_mask(self, start: int, length: int) -> np.ndarray:
        """bool[length]: which of these tokens count in the loss."""
        parts = [self._file(number).loss_mask(at, count) for number, at, count in self.split_window(start, length)]
        return np.concatenate([np.empty(0, bool), *parts])

    def document_starts_in(self, start: int, length: int) -> np.ndarray:
        """Positions of the stream where a document begins; every file begins one."""
        parts = [
            self._file(number).document_starts_in(at, count) + self._bounds[number]
            for number, at, count in self.split_window(start, length)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def num_documents(self, number: int) -> int:
        """Of one file. A file without an index is read once, and the bounds of its documents are cached."""
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
        """File, document and offset of a token, for error messages."""
        ((number, at, _),) = self.split_window(position, 1)
        file = self._file(number)
        document = file.document_at(at)
        first, _ = file.document_span(document)
        return f"{file.name}: document {document:,}, offset {at - first:,} (token {at:,} of the file)"

    def file_parts(self, number: int) -> tuple[FilePart, ...]:
        """The files on disk of one token file."""
        return self._file(number).parts

    def split_window(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """(file, first token in it, number of tokens) of every file that a window overlaps."""
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

    def _open_first_time(self, number: int) -> FileIdentity:
        file = self._openers[number]()
        self._cache(number, file)
        return _identity(file)

    def _file(self, number: int) -> TokenFile:
        with self._lock:
            file = self._open.get(number)
            if file is None:
                file = self._openers[number]()
                if _identity(file) != self.files[number]:
                    raise DataError(
                        f"{file.name}: was changed while in use: is {_identity(file)}, was {self.files[number]}"
                    )
            self._cache(number, file)
            return file

    def _cache(self, number: int, file: TokenFile) -> None:
        self._open[number] = file
        self._open.move_to_end(number)
        while len(self._open) > self._max_open:
            self._open.popitem(last=False)


def _identity(file: TokenFile) -> FileIdentity:
    return FileIdentity(file.name, file.num_tokens, file.digest, file.has_loss_mask)


def _openers(config: SourceConfig, vocab_size: int, split: str) -> list[Callable[[], TokenFile]]:
    """How to open each file of a source, in order."""
    if config.path == BUILTIN:
        return [lambda: builtin_corpus(split == "validation")]

    def opener(path: str) -> Callable[[], TokenFile]:
        return lambda: open_token_file(path, vocab_size, config.dtype, config.end_of_document)

    return [opener(path) for path in source_paths(config.path)]


def source_paths(path: str) -> list[str]:
    """The token files of a source, in order: of a pair the path without its ending."""
    if path.endswith((".npy", ".bin", ".idx")):
        return [path]
    if exists(path + ".idx") or exists(path + ".bin"):
        return [path]
    listed = list_folder(path)
    if listed is None:
        if exists(path):
            raise DataError(
                f"{path}: is not a token file (.bin with .idx, or .npy); text is made into one by "
                f"`moefold tokenize {path} --out FOLDER`"
            )
        raise DataError(
            f"{path}: there is no {path}.bin with {path}.idx, no .npy file and no folder of this name; "
            "`moefold tokenize FILES --out FOLDER` writes token files"
        )
    names = [name for name in listed if not name.endswith(LOSS_MASK)]
    pairs = {ending: {name[:-4] for name in names if name.endswith(ending)} for ending in (".bin", ".idx")}
    unpaired = sorted(pairs[".bin"] ^ pairs[".idx"])
    if unpaired:
        missing = ".idx" if unpaired[0] in pairs[".bin"] else ".bin"
        raise DataError(f"{path}: {unpaired[0]}{missing} is missing; the pair was not completely written or copied")
    found = sorted(pairs[".bin"] | {name for name in names if name.endswith(".npy")})
    if not found:
        raise DataError(f"{path}: a folder without .bin/.idx pairs or .npy files ({len(names):,} other files)")
    return [f"{path.rstrip('/')}/{name}" for name in found]


@cache
def builtin_corpus(validation: bool, root: Path | None = None) -> MemoryFile:
    """A corpus that every machine has: the source of Python's standard library, one token per byte.

    Each module is a document, followed by a zero byte, which no source file contains, so a vocabulary of 256 suffices.
    About one file in sixteen, selected by a hash of its name, is in the validation split. The corpus is the same for
    every installation of a Python version: files are sorted by name, and tests, packages, generated and platform files
    are excluded.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for name in _corpus_files(root):
        if _is_validation(name) == validation:
            try:
                text = (root / name).read_bytes()
            except OSError as error:
                raise DataError(f"{root / name}: the builtin corpus cannot be read: {error.strerror}") from error
            if 0 < len(text) <= _MAX_FILE_BYTES and _END not in text:
                texts.append(text + _END)
    if not texts:
        raise DataError(f"{root}: this Python has no source of its standard library; use token files")
    starts = np.cumsum([0, *map(len, texts[:-1])])
    return MemoryFile("builtin", np.frombuffer(b"".join(texts), np.uint8), starts)


def _corpus_files(root: Path) -> list[str]:
    found = []
    for top, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED and not name.startswith("config-")]
        kept = (name for name in files if name.endswith(".py") and name not in _EXCLUDED)
        # Generated when Python was built, different on each platform.
        found += [Path(top, name).relative_to(root).as_posix() for name in kept if not name.startswith("_sysconfig")]
    return sorted(found)


def _is_validation(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 16
