"""Durable writes and guarded reads of files.

Writing: files of a run are readable by their owner only, exports as the umask says. They are hashed while they are
written, and fsynced before they are relied on.
Reading: names are never taken from a file; links are not followed; a file's length is checked before it is read. Every
failure is a CheckpointError that names the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from moefold.config.strict import STRICT
from moefold.errors import CheckpointError

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
# For what is made to be handed on: the umask decides.
SHARED_FILE_MODE, SHARED_DIRECTORY_MODE = 0o666, 0o777
_BLOCK = 1 << 23
UNKNOWN_FREE = -1


@dataclass(frozen=True)
class FileRecord:
    """Length and hash that a file must have."""

    __pydantic_config__: ClassVar = STRICT

    bytes: int
    sha256: str


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turns OSError into a CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        hint = "; choose another train.directory" if isinstance(error, NotADirectoryError | PermissionError) else ""
        raise CheckpointError(f"{path}: {error.strerror or error}{hint}") from error


def is_full(error: BaseException | None) -> bool:
    """Whether a disk or a quota had no room left; ``error`` may be what `naming` made of it."""
    error = error.__cause__ if isinstance(error, CheckpointError) else error
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def free_bytes(path: Path) -> int:
    """For a user without privileges; `UNKNOWN_FREE` where the file system does not say."""
    try:
        found = os.statvfs(path)
    except OSError:
        # Whatever is wrong there is the reason with which writing will fail.
        return UNKNOWN_FREE
    return found.f_bavail * found.f_frsize if found.f_blocks else UNKNOWN_FREE


def make_directory(path: Path, mode: int = DIRECTORY_MODE) -> None:
    """Parents that are made on the way have the mode of the umask."""
    with naming(path):
        path.mkdir(mode, parents=True, exist_ok=True)


def write_file(path: Path, pieces: Iterable[bytes | memoryview], mode: int = FILE_MODE) -> FileRecord:
    """Write, hash in the same pass, and flush to the disk."""
    digest, count = hashlib.sha256(), 0
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    part = rest[:_BLOCK]
                    digest.update(part)
                    _write_all(descriptor, part)
                    count += len(part)
                    rest = rest[len(part) :]
            fsync(descriptor)
        finally:
            os.close(descriptor)
    return FileRecord(count, digest.hexdigest())


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def fsync_directory(path: Path) -> None:
    """Makes names in a directory durable."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    with naming(old):
        os.rename(old, new)


def remove_tree(path: Path) -> None:
    with naming(path):
        shutil.rmtree(path)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file that is no link."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def check_size(path: Path, expected: int) -> None:
    """Without opening: is it a plain file of this length?"""
    with naming(path):
        found = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    if found.st_size != expected:
        raise CheckpointError(f"{path}: has {found.st_size:,} bytes, the manifest says {expected:,}")


def read_bounded(path: Path, limit: int) -> bytes:
    """A small file, whole."""
    with opened(path) as descriptor, naming(path):
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(f"{path}: has {size:,} bytes, more than the limit of {limit:,}")
        with open(descriptor, "rb", closefd=False) as file:
            # Not `limit`: a buffer of that size would be allocated first.
            return file.read(size)


def read_recorded(path: Path, record: FileRecord, limit: int) -> bytes:
    """A small file, whole, if it is what the record says."""
    if record.bytes > limit:
        raise CheckpointError(f"{path}: the manifest says {record.bytes:,} bytes, more than the limit of {limit:,}")
    check_size(path, record.bytes)
    content = read_bounded(path, limit)
    _compare(path, FileRecord(len(content), hashlib.sha256(content).hexdigest()), record)
    return content


def check_written(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Read a file back and compare it with what was written, which is cheaper than a hash.

    The page cache is dropped first, so that the disk is read.
    """
    memory = bytearray(_BLOCK)
    found = np.frombuffer(memory, np.uint8)
    with opened(path) as descriptor, naming(path):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            for piece in pieces:
                rest = np.frombuffer(piece, np.uint8)
                while len(rest):
                    count = file.readinto(memoryview(memory)[: len(rest)])
                    if not count or not np.array_equal(found[:count], rest[:count]):
                        raise CheckpointError(f"{path}: what was read back is not what was written")
                    rest = rest[count:]
            if file.read(1):
                raise CheckpointError(f"{path}: is longer than what was written")


def check_content(path: Path, record: FileRecord) -> None:
    """Read a file of any size and compare its hash."""
    check_size(path, record.bytes)
    digest, count, piece = hashlib.sha256(), 0, bytearray(_BLOCK)
    with opened(path) as descriptor, naming(path), open(descriptor, "rb", buffering=0, closefd=False) as file:
        while read := file.readinto(piece):
            digest.update(memoryview(piece)[:read])
            count += read
    _compare(path, FileRecord(count, digest.hexdigest()), record)


def _compare(path: Path, found: FileRecord, record: FileRecord) -> None:
    if found.bytes != record.bytes:
        raise CheckpointError(f"{path}: {found.bytes:,} bytes could be read, the manifest says {record.bytes:,}")
    if found.sha256 != record.sha256:
        raise CheckpointError(
            f"{path}: damaged, its sha256 is {found.sha256[:12]}..., the manifest says {record.sha256[:12]}..."
        )
