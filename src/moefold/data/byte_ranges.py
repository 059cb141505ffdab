"""Byte ranges of a local file or of any URL that fsspec supports.

Tokens are read with `pread` and not through a mapping. The page cache serves both at the same speed, but a mapped file
that shrinks, or a file system that fails, kills the process with SIGBUS, while a failed read is an error that can name
the file. Only an index, which is searched, is mapped.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from moefold.errors import DataError

Result = TypeVar("Result")
# Bytes hashed at each of a few offsets of a file; enough to detect that it was replaced.
_SAMPLE_BYTES = 4096


class ByteFile(Protocol):
    """A file of known size."""

    name: str
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, or a DataError."""

    def read_all(self) -> np.ndarray:
        """All bytes as uint8: mapped if the file is local, else fetched."""


class FileSystem(Protocol):
    """The methods of an fsspec file system that are used here."""

    def size(self, path: str) -> int | None: ...

    def cat_file(self, path: str, start: int, end: int) -> bytes: ...

    def exists(self, path: str) -> bool: ...

    def isdir(self, path: str) -> bool: ...

    def find(self, path: str) -> Iterable[str]: ...


class LocalFile:
    """A regular file, open for reading as long as this object lives."""

    def __init__(self, path: str) -> None:
        self.name, self._fd = path, -1
        try:
            # Non-blocking: opening a pipe would otherwise wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be opened: {_reason(error)}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: is not a regular file")
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        _check_range(self, offset, length)
        parts: list[bytes] = []
        while length:
            try:
                part = os.pread(self._fd, min(length, 1 << 30), offset)
            except OSError as error:
                raise DataError(f"{self.name}: reading {length:,} bytes at {offset:,}: {_reason(error)}") from error
            if not part:
                raise DataError(f"{self.name}: ends at byte {offset:,}; it had {self.size:,} bytes when it was opened")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_all(self) -> np.ndarray:
        if not self.size:
            return np.empty(0, np.uint8)
        try:
            return np.frombuffer(mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.name}: cannot be mapped: {_reason(error)}") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class RemoteFile:
    """A file behind a URL; every read is one range request."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._files, self._path = _file_system(url)
        self.size = _size(self._call(self._files.size, self._path), url)

    def read(self, offset: int, length: int) -> bytes:
        _check_range(self, offset, length)
        if not length:
            return b""
        found = bytes(self._call(self._files.cat_file, self._path, offset, offset + length))
        if len(found) != length:
            raise DataError(f"{self.name}: received {len(found):,} of {length:,} bytes at {offset:,}")
        return found

    def read_all(self) -> np.ndarray:
        return np.frombuffer(self.read(0, self.size), np.uint8)

    def _call(self, function: Callable[..., Result], *args: object) -> Result:
        # Each file system has its own exceptions.
        try:
            return function(*args)
        except Exception as error:
            raise DataError(f"{self.name}: cannot be read: {_reason(error)}") from error


def is_url(path: str) -> bool:
    return "://" in path or "::" in path


def open_byte_file(path: str) -> ByteFile:
    return RemoteFile(path) if is_url(path) else LocalFile(path)


def exists(path: str) -> bool:
    if not is_url(path):
        return os.path.exists(path)
    files, inside = _file_system(path)
    return bool(_listing(path, files.exists, inside))


def read_json(name: str, most: int, what: str, fix: str) -> object:
    """The content of a small file that lies beside token files, of at most so many bytes; None if there is none."""
    if not exists(name):
        return None
    file = open_byte_file(name)
    if file.size > most:
        raise DataError(f"{name}: {file.size:,} bytes are too many for {what} of a token file")
    try:
        found: object = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: is not JSON: {error}; {fix}") from error
    return {} if found is None else found


def list_folder(path: str) -> list[str] | None:
    """Relative names of all files under a folder, sorted, or None if there is no such folder."""
    if is_url(path):
        files, inside = _file_system(path)
        if not _listing(path, files.isdir, inside):
            return None
        root = inside.rstrip("/") + "/"
        return sorted(str(name).removeprefix(root) for name in _listing(path, files.find, inside))
    if not os.path.isdir(path):
        return None
    walk = os.walk(path, followlinks=True)
    return sorted(Path(top, name).relative_to(path).as_posix() for top, _, names in walk for name in names)


def sampled_digest(source: ByteFile, samples: int = 4) -> str:
    """sha256 of the size and of a few evenly spaced samples, from the first byte to the last."""
    digest = hashlib.sha256(str(source.size).encode())
    length = min(_SAMPLE_BYTES, source.size)
    for number in range(samples):
        digest.update(source.read((source.size - length) * number // max(1, samples - 1), length))
    return digest.hexdigest()


def _check_range(source: ByteFile, offset: int, length: int) -> None:
    if offset < 0 or length < 0 or offset + length > source.size:
        raise DataError(f"{source.name}: has {source.size:,} bytes, not {length:,} at {offset:,}")


def _file_system(url: str) -> tuple[FileSystem, str]:
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{url}: URLs need fsspec; pip install fsspec, or use a local path") from error
    try:
        files, path = fsspec.core.url_to_fs(url)
    except Exception as error:
        raise DataError(f"{url}: {_reason(error)}") from error
    return files, str(path)


def _listing(path: str, function: Callable[[str], Result], inside: str) -> Result:
    try:
        return function(inside)
    except Exception as error:
        raise DataError(f"{path}: cannot be listed: {_reason(error)}") from error


def _size(found: int | None, url: str) -> int:
    if not isinstance(found, int):
        raise DataError(f"{url}: the server does not report its size")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return words or type(error).__name__
