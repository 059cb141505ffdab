"""One writer per run: a lock that names its holder, and an incarnation number.

A second start on the same directory is refused while the first is alive, with the holder's name. A lock alone is not
enough: a process can be suspended, be replaced, and resume in the middle of writing. So each start takes the next
incarnation number. Temporary names contain it, and a checkpoint gets its final name only while the number in the run's
directory is still the writer's own. Taking a number and giving a final name are mutually exclusive, so the old writer
either committed before, or never commits again.

A run must also start where its disk is full, since a start is what removes half-written checkpoints: the number is then
written over the one before, for which there is room. Only the first start in a directory needs some.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from moefold.checkpoint.files import (
    FILE_MODE,
    free_bytes,
    fsync,
    fsync_directory,
    is_full,
    make_directory,
    naming,
    read_bounded,
    write_file,
)
from moefold.errors import CheckpointError, FencedError, RunBusyError

LOCK, GATE, NUMBER = "run.lock", "commit.lock", "incarnation.json"
_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 4096
# Three files of at most one block each.
_FIRST_START_BYTES = 3 * 4096


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock; ``born`` distinguishes processes that had the same pid."""

    host: str
    pid: int
    born: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@dataclass(frozen=True)
class Incarnation:
    """The run's id, made at its first start, and the number of starts so far."""

    run: str
    number: int


def take_incarnation(run_dir: Path, elsewhere: Incarnation | None = None) -> int:
    """Become the run's only writer, for as long as this process lives, and take the next number.

    ``elsewhere``: the last start of this run that is known from another place (`upload_log.py`).
    """
    try:
        return _next_number(run_dir, elsewhere)
    except CheckpointError as error:
        if not is_full(error):
            raise
        raise CheckpointError(
            f"{error}: a start needs {_FIRST_START_BYTES:,} bytes, and the disk of {run_dir} has "
            f"{max(0, free_bytes(run_dir)):,} free; remove files there, or choose another train.directory"
        ) from error


def _next_number(run_dir: Path, elsewhere: Incarnation | None) -> int:
    make_directory(run_dir)
    refuse_open_directory(run_dir)
    hold_run(run_dir)
    with commit_gate(run_dir):
        before = read_incarnation(run_dir) or elsewhere
        # Of another run: `UploadLog.start` refuses it.
        later = elsewhere if before and elsewhere and elsewhere.run == before.run else None
        number = max(before.number if before else 0, later.number if later else 0) + 1
        taken = Incarnation(before.run if before else secrets.token_hex(8), number)
        replace_small(run_dir / NUMBER, json.dumps(asdict(taken)).encode())
    return number


def refuse_open_directory(run_dir: Path) -> None:
    """Whoever can write there can give the run another checkpoint to resume from; sharing with a group is a choice."""
    mode = stat.S_IMODE(os.stat(run_dir).st_mode)
    if mode & stat.S_IWOTH:
        raise CheckpointError(
            f"{run_dir}: can be written by everybody (mode {mode:04o}), so that anybody can replace its checkpoints; "
            f"`chmod o-w {run_dir}`, after a look at what is in it"
        )


def hold_run(run_dir: Path) -> int:
    """Take the run's lock, or raise with the holder's name; returns the descriptor, closing it releases the lock.

    Reentrant for the same process, which may execute a run twice, one after the other.
    """
    path = run_dir / LOCK
    descriptor = _open_lock(path)
    if _try_lock(descriptor):
        _write_holder(descriptor)
        return descriptor
    holder = _read_holder(descriptor)
    os.close(descriptor)
    own = _this_process()
    if holder is not None and (holder.host, holder.pid, holder.born) == (own.host, own.pid, own.born):
        return -1
    raise RunBusyError(
        f"{run_dir} is in use by {holder or 'a process that has not said its name'}; "
        f"wait for it to end or stop it, or give this run another name"
    )


@contextmanager
def commit_gate(run_dir: Path) -> Iterator[None]:
    """Only one process at a time takes a number or gives a final name."""
    descriptor = _open_lock(run_dir / GATE)
    try:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                holder = _read_holder(descriptor)
                raise RunBusyError(f"{run_dir / GATE} has been held for too long by {holder or 'an unknown process'}")
            time.sleep(0.005)
        _write_holder(descriptor)
        yield
    finally:
        os.close(descriptor)


def check_incarnation(run_dir: Path, own: int) -> None:
    """Raise unless this start is still the run's last; called inside the gate."""
    now = read_incarnation(run_dir)
    if now is None or now.number != own:
        raise FencedError(
            f"{run_dir}: incarnation {own} may not write any more: "
            + (f"the run has been started again as incarnation {now.number}" if now else f"{NUMBER} is gone")
        )


@contextmanager
def may_write(run_dir: Path, own: int) -> Iterator[None]:
    """Excludes later starts inside the with block; number 0 is a single writer outside of any run, and always may."""
    if not own:
        yield
        return
    with commit_gate(run_dir):
        check_incarnation(run_dir, own)
        yield


def read_incarnation(run_dir: Path) -> Incarnation | None:
    path = run_dir / NUMBER
    if not path.exists():
        return None
    try:
        data = json.loads(read_bounded(path, _MAX_BYTES))
        run, number = data["run"], data["number"]
        if isinstance(run, str) and isinstance(number, int) and number > 0:
            return Incarnation(run, number)
    except (ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(f"{path}: not a run's id and number; restore it, or continue in a new directory")


def replace_small(path: Path, content: bytes) -> None:
    """Less than a block, whole or not at all, also on a full disk if the file exists; called inside the gate."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write_file(temporary, [content])
        with naming(temporary):
            os.replace(temporary, path)
        fsync_directory(path.parent)
    except CheckpointError as error:
        with suppress(OSError):
            os.unlink(temporary)
        if not is_full(error) or not path.exists():
            raise
        _write_over(path, content)


def _write_over(path: Path, content: bytes) -> None:
    """Into the block that the file has already, where a new one cannot be had.

    Less than a sector, which disks write whole or not at all. The number before is no longer, so nothing of it stays.
    """
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, content.ljust(os.fstat(descriptor).st_size), 0)
            fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_lock(path: Path) -> int:
    with naming(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        raise CheckpointError(f"this file system cannot lock files: {error.strerror}") from error
    return True


def _write_holder(descriptor: int) -> None:
    """The lock holds without it, so a full disk is no reason to stop; but the holder before must not be named."""
    try:
        os.pwrite(descriptor, json.dumps(asdict(_this_process())).encode().ljust(_MAX_BYTES // 4), 0)
    except OSError as error:
        if not is_full(error):
            raise
        with suppress(OSError):
            os.ftruncate(descriptor, 0)


def _read_holder(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, _MAX_BYTES, 0)))
    except (ValueError, TypeError):
        return None


def _this_process() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), _born(), datetime.now(UTC).isoformat(timespec="seconds"))


def _born() -> str:
    """When this process started, in the kernel's count since boot; empty where there is no such file."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""
