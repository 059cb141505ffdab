"""Files that nobody else can have a say in: written without following links, executed only from private directories.

Writing. Somebody who may write into a directory can put a link there that points to a file of the user, such as a
shell's start file. So every file gets its content under a temporary name that did not exist, and is then renamed:
`rename` replaces a name and never what it points to. A name that is a link is refused, because it was put there by
somebody, and replacing it silently would be as surprising as following it. Files that grow are opened with O_NOFOLLOW.

Executing. A compiled library runs with all rights of the user. It is loaded only if the directory that it lies in, and
every directory above, can be changed by this user and root alone, and if the file itself is theirs. Directories such as
/tmp that everybody may write into, but where only owners may rename (the sticky bit), may be above.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from moefold.errors import MoefoldError

# Of files that are made to be handed on the umask decides; files of a run are their owner's.
SHARED_MODE, OWN_MODE = 0o666, 0o600
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class UntrustedPathError(MoefoldError):
    """Somebody else could have put this file or directory there, or could change it."""


def replace_file(path: Path, content: str | bytes, mode: int = SHARED_MODE) -> None:
    """Give the name ``path`` this content, whole or not at all. Raises OSError, also if the name is a link."""
    data = content.encode() if isinstance(content, str) else content
    folder = os.open(path.parent, _DIRECTORY)
    try:
        before = _status(path.name, folder)
        if before is not None and (stat.S_ISCHR(before.st_mode) or stat.S_ISFIFO(before.st_mode)):
            # /dev/null, or a pipe: it is written to, not replaced.
            _write(os.open(path.name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), data, durable=False)
            return
        temporary = f".{path.name[:200]}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            if before is not None and before.st_uid == os.geteuid():
                # A page that its owner has shared stays shared.
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & 0o777)
            _write(descriptor, data)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


def open_own(path: Path, flags: int, mode: int = OWN_MODE) -> int:
    """A descriptor of a regular file that is no link; ``flags`` as for `os.open`. Raises OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        raise _link_error(path.name) if error.errno == errno.ELOOP else error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def own_opener(path: str, flags: int) -> int:
    """For `open(path, mode, opener=own_opener)`, where files are for others to read."""
    return open_own(Path(path), flags, SHARED_MODE)


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise _link_error(name)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    return found


def _link_error(name: str) -> OSError:
    return OSError(errno.ELOOP, "is a symbolic link, through which nothing is written; remove it", name)


def _write(descriptor: int, data: bytes, durable: bool = True) -> None:
    """Closes the descriptor."""
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_directory(path: Path, use: str = "executed") -> Path:
    """The real path of a directory that only this user and root can change; made if it is not there, with mode 0700.

    ``use``: what is done with its files, for messages.
    """
    real = Path(os.path.realpath(path))
    folder = os.open(real.anchor, _DIRECTORY)
    try:
        here = Path(real.anchor)
        for name in real.parts[1:]:
            here /= name
            inner = _step_into(folder, name, here)
            os.close(folder)
            folder = inner
            status = os.fstat(folder)
            sticky = bool(status.st_mode & stat.S_ISVTX) and here != real
            if (who := who_else(status, sticky)) is not None:
                raise UntrustedPathError(f"{here}: {who}, so nothing under it is {use}; `chmod go-w` it")
    finally:
        os.close(folder)
    return real


def _step_into(folder: int, name: str, here: Path) -> int:
    try:
        try:
            return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            os.mkdir(name, 0o700, dir_fd=folder)
            return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except FileExistsError:
        # Another rank was faster.
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        raise UntrustedPathError(f"{here}: cannot be used: {error.strerror}") from error


def by_everybody(path: Path, status: os.stat_result) -> str | None:
    """Whether any user of the machine can change a file, by itself or by its directory; pipes and devices do not count.

    Configurations are data and may be shared in a group, or be somebody else's; this is for files that nobody answers
    for.
    """
    folder = os.stat(path.parent)
    if not stat.S_ISREG(status.st_mode):
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {stat.S_IMODE(status.st_mode):04o})"
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return f"lies in {path.parent}, which everybody can write (mode {stat.S_IMODE(folder.st_mode):04o})"
    return None


def who_else(status: os.stat_result, sticky: bool = False) -> str | None:
    """Who besides this user and root can change a file or directory; None if nobody can."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH and not sticky:
        return f"can be written by everybody (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWGRP and not sticky:
        return f"can be written by group {status.st_gid} (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
