"""The second place of checkpoints: another directory, or storage that fsspec reaches, such as S3.

What an upload needs of a place, and no more: whole objects under names with slashes, a list of the names in a folder,
and one operation that makes an object only if its name is free. The last one is what keeps two writers apart. In a
directory it is a hard link of a finished file, on S3 a put with `If-None-Match: *`; both are atomic, so that nobody
reads half an object.

Logins and addresses of servers are the storage library's affair: it reads them from the environment, or from files of
its own (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ~/.aws). They are never in a configuration.

Whatever goes wrong is an OSError: a storage library has exceptions of its own for every layer below it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from moefold.checkpoint import files
from moefold.checkpoint.files import FileRecord
from moefold.errors import CheckpointError, MissingPackageError

_BLOCK = 1 << 23


class ObjectStore(Protocol):
    """Objects by name; names of folders have no slash at their end. Every method may raise OSError."""

    def put(self, name: str, source: Path) -> None:
        """A copy of a local file; it replaces an object of this name."""

    def create(self, name: str, content: bytes) -> bool:
        """Make a small object, unless the name is taken; False if it is."""

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content, read from the storage; FileNotFoundError if there is no such object."""

    def names(self, folder: str) -> list[str]:
        """Objects and folders directly in a folder, sorted; none if there is no such folder."""

    def remove(self, name: str) -> None:
        """An object, or a folder and all that is in it; nothing if it is not there."""


def open_store(url: str, below: str) -> ObjectStore:
    """The folder ``below`` of a place: file:///DIRECTORY, or a URL of fsspec."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return DirectoryStore(Path(unquote(parts.path)) / below)
    return FsspecStore(url, below)


def require_store(url: str) -> None:
    """Raise if the package that reaches it is missing; nothing is connected to."""
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return
    try:
        import fsspec  # type: ignore[import-untyped]

        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        package = {"s3": 'pip install "moefold[s3]"'}.get(scheme, "pip install fsspec, and its package for this kind")
        raise MissingPackageError(f"train.saving.upload: {scheme}:// needs a package: {package}") from error


def read_object(store: ObjectStore, name: str, limit: int) -> bytes:
    """A small object, whole."""
    content = b""
    for piece in store.pieces(name):
        content += piece
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"{name}: is longer than {limit:,} bytes")
    return content


def check_object(store: ObjectStore, name: str, record: FileRecord) -> None:
    """Read it back and compare its length and hash."""
    digest, count = hashlib.sha256(), 0
    for piece in store.pieces(name):
        digest.update(piece)
        count += len(piece)
    if (count, digest.hexdigest()) != (record.bytes, record.sha256):
        raise OSError(errno.EIO, f"{name}: what was read back is not what the manifest says ({count:,} bytes)")


class DirectoryStore:
    """A directory, perhaps of another disk or machine; what it has taken is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, name: str, source: Path) -> None:
        with files.opened(source) as descriptor, open(descriptor, "rb", closefd=False) as file:
            temporary = self._write(name, iter(lambda: file.read(_BLOCK), b""))
        os.rename(temporary, self.root / name)
        files.fsync_directory(temporary.parent)

    def create(self, name: str, content: bytes) -> bool:
        temporary = self._write(name, iter([content]))
        try:
            os.link(temporary, self.root / name)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        files.fsync_directory(temporary.parent)
        return True

    def pieces(self, name: str) -> Iterator[bytes]:
        if not os.path.lexists(self.root / name):
            raise FileNotFoundError(errno.ENOENT, f"{self.root / name}: there is no such file")
        with _as_os_errors(), files.opened(self.root / name) as descriptor:
            # From the disk, not from what was written a moment ago.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                while piece := file.read(_BLOCK):
                    yield piece

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / folder) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        path = self.root / name
        with suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else os.unlink(path)

    def _write(self, name: str, pieces: Iterator[bytes]) -> Path:
        """A finished file beside the name; `names` does not list it."""
        path = self.root / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with _as_os_errors():
            files.make_directory(path.parent)
            files.write_file(temporary, pieces)
        return temporary


class FsspecStore:
    """Storage that a library of fsspec reaches. Nothing is cached: others write too."""

    def __init__(self, url: str, below: str) -> None:
        require_store(url)
        import fsspec

        scheme = urlsplit(url).scheme
        self._files = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
        self.root = f"{str(self._files._strip_protocol(url)).rstrip('/')}/{below}"

    def put(self, name: str, source: Path) -> None:
        with _as_os_errors():
            self._files.put_file(str(source), self._path(name))

    def create(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        try:
            with _as_os_errors():
                self._files.pipe_file(path, content, mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or _is_taken(error):
                return False
            raise
        return True

    def pieces(self, name: str) -> Iterator[bytes]:
        path = self._path(name)
        with _as_os_errors(), self._files.open(path, "rb", block_size=_BLOCK) as file:
            while piece := file.read(_BLOCK):
                yield piece

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        try:
            with _as_os_errors():
                found = self._files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(each).rstrip("/").rpartition("/")[2] for each in found if str(each).strip("/") != path})

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), _as_os_errors():
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"


def _is_taken(error: BaseException | None) -> bool:
    """Whether an error of a storage library, or its cause, is the answer 412 or 409 to a conditional put."""
    while error is not None:
        answer = getattr(error, "response", None)
        code = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
        if code in (409, 412):
            return True
        error = error.__cause__
    return False


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, GeneratorExit):
        raise
    except CheckpointError as error:
        raise error.__cause__ if isinstance(error.__cause__, OSError) else OSError(errno.EIO, str(error)) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
