"""Writers of token files: any number of documents, with the memory for one.

A file gets its final name when it is complete and on disk. Tokens are written to a temporary file, document lengths to
another; at the end the index is made from the lengths, a run at a time. Of a Megatron pair, the `.bin` gets its name
before the `.idx`, so a pair with an index is complete. An interrupted writer leaves only files that end in `.tmp`.

With a `resume_key`, these can be continued: `mark` stores how much was written after so many tasks, once it is on disk,
and the next writer with the same key cuts the files to these lengths. Another key starts anew. A lock keeps a second
process from writing the same files.

What is written is hashed on the way, and `PREFIX.hashes.json` gets its name with the tokens (`block_hashes.py`).

A pair may have a loss mask (`token_files.py`), which is written and published with it. A mask that was left by the pair
that is overwritten is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from moefold.data.block_hashes import HASHES, BlockHasher, BlockHashes, hashes_text
from moefold.data.megatron_index import HEADER, MAGIC, MAX_SEQUENCE_LENGTH, type_code
from moefold.data.token_files import LOSS_MASK, ORIGIN
from moefold.errors import DataError
from moefold.private_files import own_opener, replace_file

_RUN = 1 << 20


class TokenWriter:
    """A context manager: leaving it without an error gives the file its final name, with an error removes it.

    ``num_marked``: tasks whose documents an interrupted writer has written.
    """

    def __init__(
        self, target: str, dtype: str | np.dtype, overwrite: bool = False, resume_key: str | None = None
    ) -> None:
        self._resume_key = resume_key
        # The text of PREFIX.origin.json, which says what the tokens are; set before the end (`token_origin.py`).
        self.origin: str | None = None
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = self.num_tokens = self.num_marked = 0
        self.targets = self._target_paths(target)
        for path in [*self.targets, *self._companions()]:
            if path.exists() and not overwrite:
                raise DataError(f"{path}: exists already; choose another --out, or replace it with --overwrite")
        try:
            self.targets[0].parent.mkdir(parents=True, exist_ok=True)
            self._tokens = self._open_temporary(self.targets[0])
            self._hashed: dict[str, list[str]] = {}
            if resume_key is not None:
                self._lock()
                self._read_mark(resume_key)
            self._cut(self._tokens, self.num_tokens * self.dtype.itemsize)
            self._hasher = self._continued_hasher(self._tokens, "tokens")
        except OSError as error:
            raise DataError(f"{self.targets[0]}: cannot be written: {error.strerror}") from error

    def mark(self, num_tasks: int) -> None:
        """What was written so far, by so many tasks, need not be written again."""
        if self._resume_key is None:
            return
        for file in self._files():
            _flush_to_disk(file)
        hashed = {name: hasher.done for name, hasher in self._hashers().items()}
        mark = [self._resume_key, num_tasks, self.num_documents, self.num_tokens, hashed]
        replace_file(self._mark_path, json.dumps(mark))
        self.num_marked = num_tasks

    @property
    def _mark_path(self) -> Path:
        return self.targets[0].with_name(self.targets[0].name + ".mark.tmp")

    def _read_mark(self, key: str) -> None:
        try:
            found = json.loads(self._mark_path.read_text())
        except (OSError, ValueError):
            return
        if isinstance(found, list) and len(found) == 5 and found[0] == key:
            _, self.num_marked, self.num_documents, self.num_tokens, self._hashed = found

    def _continued_hasher(self, file: IO[bytes], name: str) -> BlockHasher:
        """Goes on after the blocks of the mark; what was written after them is read again."""
        hasher = BlockHasher(self._hashed.get(name, ()))
        file.seek(hasher.bytes)
        while piece := file.read(_RUN):
            hasher.update(piece)
        return hasher

    def _hashers(self) -> dict[str, BlockHasher]:
        return {"tokens": self._hasher}

    def _hashes(self) -> dict[str, BlockHashes]:
        """By ending, of every target."""
        return {self.targets[0].suffix: self._hasher.hashes()}

    def _lock(self) -> None:
        try:
            fcntl.flock(self._tokens, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{self.targets[0]}: another process is writing it") from error

    def _temporary(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.tmp" if self._resume_key is not None else f"{path.name}.{os.getpid()}.tmp")

    def _open_temporary(self, path: Path) -> IO[bytes]:
        """Opened for appending, which keeps what is there; closed on leaving the context."""
        return open(self._temporary(path), "a+b", opener=own_opener)

    def _cut(self, file: IO[bytes], size: int) -> None:
        if os.fstat(file.fileno()).st_size < size:
            raise DataError(f"{file.name}: is shorter than when it was written; remove {self._mark_path} to start anew")
        file.truncate(size)

    def _files(self) -> list[IO[bytes]]:
        """Open temporary files."""
        return [self._tokens]

    def _target_paths(self, target: str) -> list[Path]:
        raise NotImplementedError

    def _companions(self) -> list[Path]:
        """Files that belong to the targets and are not written this time; removed when the targets are replaced."""
        return []

    def add(self, tokens: np.ndarray, loss_mask: np.ndarray | None = None) -> None:
        """One document."""
        self.add_many(tokens, [len(tokens)], loss_mask)

    def add_many(
        self, tokens: np.ndarray, sizes: Sequence[int] | np.ndarray, loss_mask: np.ndarray | None = None
    ) -> None:
        """Several documents, concatenated in `tokens`; the mask has an entry per token, if the writer writes one."""
        lengths = np.asarray(sizes, np.int64)
        if lengths.sum() != len(tokens) or (len(lengths) and lengths.min() < 0):
            raise DataError(f"{self.targets[0]}: sizes sum to {lengths.sum():,}, there are {len(tokens):,} tokens")
        if len(lengths) and lengths.max() > MAX_SEQUENCE_LENGTH:
            raise DataError(
                f"{self.targets[0]}: a document of {lengths.max():,} tokens; at most {MAX_SEQUENCE_LENGTH:,}"
            )
        limits = np.iinfo(self.dtype)
        if len(tokens) and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            raise DataError(
                f"{self.targets[0]}: tokens from {tokens.min()} to {tokens.max()} do not fit {self.dtype.name}"
            )
        try:
            data = tokens.astype(self.dtype, copy=False).tobytes()
            self._tokens.write(data)
            self._hasher.update(data)
            self._record_sizes(lengths)
            self._record_loss_mask(loss_mask, len(tokens))
        except OSError as error:
            raise DataError(f"{self.targets[0]}: cannot be written: {error.strerror}") from error
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def _record_sizes(self, lengths: np.ndarray) -> None:
        """Store the lengths of documents, if the format has an index."""

    def _record_loss_mask(self, loss_mask: np.ndarray | None, num_tokens: int) -> None:
        """Store which tokens count, if the file has a mask."""
        if loss_mask is not None:
            raise DataError(f"{self.targets[0]}: this file has no loss mask; write a .bin/.idx pair with one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Ctrl-C is not an error of the input: what was written can be continued.
        keep = kind is not None and not issubclass(kind, Exception) and self._resume_key is not None and self.num_marked
        try:
            if kind is None:
                self._finish()
        except OSError as failed:
            raise DataError(f"{self.targets[0]}: cannot be finished: {failed.strerror}") from failed
        finally:
            for file in self._files():
                file.close()
            if not keep:
                for path in self._temporary_paths():
                    path.unlink(missing_ok=True)

    def _finish(self) -> None:
        for file in self._files():
            _flush_to_disk(file)
        for path in (self._origin_path, self._hashes_path, *self._companions()):
            path.unlink(missing_ok=True)
        texts = {self._hashes_path: hashes_text(self._hashes())}
        if self.origin is not None:
            texts[self._origin_path] = self.origin
        for path, text in texts.items():
            replace_file(self._temporary(path), text)
        _publish([(self._temporary(path), path) for path in [*texts, *self.targets]])

    @property
    def _origin_path(self) -> Path:
        return self.targets[0].with_suffix(ORIGIN)

    @property
    def _hashes_path(self) -> Path:
        return self.targets[0].with_suffix(HASHES)

    def _temporary_paths(self) -> list[Path]:
        return [*map(self._temporary, [*self.targets, self._origin_path, self._hashes_path]), self._mark_path]


class ArrayWriter(TokenWriter):
    """A raw array, as OLMo reads it."""

    def _target_paths(self, target: str) -> list[Path]:
        return [Path(target.removesuffix(".npy") + ".npy")]


class MegatronWriter(TokenWriter):
    """A `.bin`/`.idx` pair, with a `.loss_mask.bin` if asked for; every document is one sequence."""

    def __init__(
        self,
        target: str,
        dtype: str | np.dtype,
        overwrite: bool = False,
        resume_key: str | None = None,
        with_loss_mask: bool = False,
    ) -> None:
        self._code = type_code(np.dtype(dtype))
        self._with_loss_mask = with_loss_mask
        super().__init__(target, dtype, overwrite, resume_key)
        self._sizes_path = self.targets[0].with_name(self.targets[0].name + ".sizes")
        self._sizes = self._open_temporary(self._sizes_path)
        self._cut(self._sizes, 4 * self.num_documents)
        self._mask = self._open_temporary(self.targets[1]) if with_loss_mask else None
        if self._mask is not None:
            self._cut(self._mask, self.num_tokens)
            self._mask_hasher = self._continued_hasher(self._mask, "mask")

    def _target_paths(self, target: str) -> list[Path]:
        prefix = target.removesuffix(".bin").removesuffix(".idx")
        self._mask_path = Path(prefix + LOSS_MASK)
        return [Path(prefix + ".bin"), *([self._mask_path] if self._with_loss_mask else []), Path(prefix + ".idx")]

    def _companions(self) -> list[Path]:
        return [] if self._with_loss_mask else [self._mask_path]

    def _record_sizes(self, lengths: np.ndarray) -> None:
        self._sizes.write(lengths.astype("<i4").tobytes())

    def _record_loss_mask(self, loss_mask: np.ndarray | None, num_tokens: int) -> None:
        if self._mask is None:
            return super()._record_loss_mask(loss_mask, num_tokens)
        mask = np.ones(num_tokens, bool) if loss_mask is None else np.asarray(loss_mask)
        if len(mask) != num_tokens or not np.isin(mask, (0, 1)).all():
            raise DataError(
                f"{self._mask_path}: a loss mask of {len(mask):,} entries for {num_tokens:,} tokens; use a 0 or 1 each"
            )
        data = mask.astype(np.uint8).tobytes()
        self._mask.write(data)
        self._mask_hasher.update(data)

    def _hashers(self) -> dict[str, BlockHasher]:
        return super()._hashers() | ({} if self._mask is None else {"mask": self._mask_hasher})

    def _hashes(self) -> dict[str, BlockHashes]:
        found = super()._hashes() | {".idx": self._index_hasher.hashes()}
        return found | ({} if self._mask is None else {LOSS_MASK: self._mask_hasher.hashes()})

    def _finish(self) -> None:
        self._sizes.flush()
        self._index_hasher = BlockHasher()
        with open(self._temporary(self.targets[-1]), "wb", opener=own_opener) as index:
            for piece in index_pieces(self._sizes, self.num_documents, self._code, self.dtype.itemsize):
                index.write(piece)
                self._index_hasher.update(piece)
            _flush_to_disk(index)
        super()._finish()

    def _files(self) -> list[IO[bytes]]:
        return [*super()._files(), self._sizes, *([] if self._mask is None else [self._mask])]

    def _temporary_paths(self) -> list[Path]:
        return [*super()._temporary_paths(), self._temporary(self._sizes_path)]


def index_pieces(sizes: IO[bytes], count: int, code: int, item: int) -> Iterator[bytes]:
    """An index of `count` documents from a file of their lengths (int32), in three passes with little memory."""
    yield HEADER.pack(MAGIC, 1, code, count, count + 1)
    for run in _size_runs(sizes, count):
        yield run.tobytes()
    byte = 0
    for run in _size_runs(sizes, count):
        ends = byte + np.cumsum(run.astype(np.int64) * item)
        yield np.concatenate([[byte], ends[:-1]]).astype("<i8").tobytes()
        byte = int(ends[-1])
    for first in range(0, count + 1, _RUN):
        yield np.arange(first, min(first + _RUN, count + 1), dtype="<i8").tobytes()


def _size_runs(sizes: IO[bytes], count: int) -> Iterator[np.ndarray]:
    sizes.seek(0)
    for first in range(0, count, _RUN):
        yield np.frombuffer(sizes.read(4 * min(_RUN, count - first)), "<i4")


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(renamed: Sequence[tuple[Path, Path]]) -> None:
    """Give every file its name. An old index is removed first, as it would not match the new tokens."""
    renamed[-1][1].unlink(missing_ok=True)
    for temporary, path in renamed:
        os.replace(temporary, path)
    folder = os.open(renamed[0][1].parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
