"""Writers of token files: any number of documents, with the memory for one.

A file gets its final name when it is complete and on disk. Tokens are written to a temporary file, document lengths to
another; at the end the index is made from the lengths, a run at a time. Of a Megatron pair, the `.bin` gets its name
before the `.idx`, so a pair with an index is complete. An interrupted writer leaves only files that end in `.tmp`.

A pair may have a loss mask (`token_files.py`), which is written and published with it. A mask that was left by the pair
that is overwritten is removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from moefold.data.megatron_index import HEADER, MAGIC, MAX_SEQUENCE_LENGTH, type_code
from moefold.data.token_files import LOSS_MASK
from moefold.errors import DataError

_RUN = 1 << 20


class TokenWriter:
    """A context manager: leaving it without an error gives the file its final name, with an error removes it."""

    def __init__(self, target: str, dtype: str | np.dtype, overwrite: bool = False) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = self.num_tokens = 0
        self.targets = self._target_paths(target)
        for path in [*self.targets, *self._companions()]:
            if path.exists() and not overwrite:
                raise DataError(f"{path}: exists already; choose another name, or allow it to be overwritten")
        try:
            self.targets[0].parent.mkdir(parents=True, exist_ok=True)
            self._tokens = open(_temporary(self.targets[0]), "wb")  # noqa: SIM115 - closed on leaving the context
        except OSError as error:
            raise DataError(f"{self.targets[0]}: cannot be written: {error.strerror}") from error

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
            self._tokens.write(tokens.astype(self.dtype, copy=False).tobytes())
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
        try:
            if kind is None:
                self._finish()
        except OSError as failed:
            raise DataError(f"{self.targets[0]}: cannot be finished: {failed.strerror}") from failed
        finally:
            self._remove_temporary()

    def _finish(self) -> None:
        _flush_to_disk(self._tokens)
        _publish(self.targets, self._companions())

    def _remove_temporary(self) -> None:
        self._tokens.close()
        for path in self.targets:
            _temporary(path).unlink(missing_ok=True)


class ArrayWriter(TokenWriter):
    """A raw array, as OLMo reads it."""

    def _target_paths(self, target: str) -> list[Path]:
        return [Path(target.removesuffix(".npy") + ".npy")]


class MegatronWriter(TokenWriter):
    """A `.bin`/`.idx` pair, with a `.loss_mask.bin` if asked for; every document is one sequence."""

    def __init__(
        self, target: str, dtype: str | np.dtype, overwrite: bool = False, with_loss_mask: bool = False
    ) -> None:
        self._code = type_code(np.dtype(dtype))
        self._with_loss_mask = with_loss_mask
        self._mask: BinaryIO | None = None
        super().__init__(target, dtype, overwrite)
        self._sizes_path = _temporary(self.targets[0].with_name(self.targets[0].name + ".sizes"))
        self._sizes = open(self._sizes_path, "w+b")  # noqa: SIM115 - closed on leaving the context
        if with_loss_mask:
            self._mask = open(_temporary(self.targets[1]), "wb")  # noqa: SIM115 - closed on leaving the context

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
        self._mask.write(mask.astype(np.uint8).tobytes())

    def _finish(self) -> None:
        self._sizes.flush()
        if self._mask is not None:
            _flush_to_disk(self._mask)
        with open(_temporary(self.targets[-1]), "wb") as index:
            write_index(index, self._sizes, self.num_documents, self._code, self.dtype.itemsize)
            _flush_to_disk(index)
        super()._finish()

    def _remove_temporary(self) -> None:
        if self._mask is not None:
            self._mask.close()
        self._sizes.close()
        self._sizes_path.unlink(missing_ok=True)
        super()._remove_temporary()


def write_index(index: BinaryIO, sizes: BinaryIO, count: int, code: int, item: int) -> None:
    """An index of `count` documents from a file of their lengths (int32), in three passes with little memory."""
    index.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
    for run in _size_runs(sizes, count):
        index.write(run.tobytes())
    byte = 0
    for run in _size_runs(sizes, count):
        ends = byte + np.cumsum(run.astype(np.int64) * item)
        index.write(np.concatenate([[byte], ends[:-1]]).astype("<i8").tobytes())
        byte = int(ends[-1])
    for first in range(0, count + 1, _RUN):
        index.write(np.arange(first, min(first + _RUN, count + 1), dtype="<i8").tobytes())


def open_writer(target: str, kind: str, dtype: str | np.dtype, overwrite: bool = False) -> TokenWriter:
    """`kind` is `bin` (a Megatron pair) or `npy` (a raw array)."""
    return MegatronWriter(target, dtype, overwrite) if kind == "bin" else ArrayWriter(target, dtype, overwrite)


def _size_runs(sizes: BinaryIO, count: int) -> Iterator[np.ndarray]:
    sizes.seek(0)
    for first in range(0, count, _RUN):
        yield np.frombuffer(sizes.read(4 * min(_RUN, count - first)), "<i4")


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(targets: Sequence[Path], companions: Sequence[Path]) -> None:
    """Give every file its name. An old index is removed first, as it would not match the new tokens."""
    for path in (targets[-1], *companions):
        path.unlink(missing_ok=True)
    for path in targets:
        os.replace(_temporary(path), path)
    folder = os.open(targets[0].parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
