"""The newest start of a run over several hosts, in its directory: of two sides that lost each other, one goes on.

Every host sees this directory, whatever became of the network between them. A side that decided on a start
(`comm/membership.py`) runs it only if it could record it here, and it can only if nobody has recorded another one since
it last read, and if no process holds the run's lock, which rank 0 of a start holds for as long as it lives. The other
side finds the record changed, or the lock held, and waits. The incarnation (`run_lock.py`) is taken by the recorded
start and keeps writers of the one before from committing anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from moefold.checkpoint.files import make_directory, read_bounded
from moefold.checkpoint.run_lock import commit_gate, hold_run, refuse_open_directory, replace_small
from moefold.comm.membership import HostStart
from moefold.errors import CheckpointError, RunBusyError

RECORD = "hosts.json"
_MAX_BYTES = 1 << 20


def read_record(run_dir: Path) -> HostStart | None:
    path = run_dir / RECORD
    if not path.exists():
        return None
    try:
        return HostStart.from_json(read_bounded(path, _MAX_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; remove it while no host runs") from None


def record_start(run_dir: Path, seen: HostStart | None, start: HostStart) -> None:
    """Record ``start`` as the one after ``seen``, or raise a `RunBusyError` that says who else has gone on."""
    make_directory(run_dir)
    refuse_open_directory(run_dir)
    with commit_gate(run_dir):
        newest = read_record(run_dir)
        if newest is not None and newest != seen:
            raise RunBusyError(
                f"start {newest.number} of {run_dir} has been decided by host {newest.store}, for hosts "
                f"{list(newest.hosts)}; this side does not go on"
            )
        lock = hold_run(run_dir)
        try:
            replace_small(run_dir / RECORD, start.to_json().encode())
        finally:
            if lock >= 0:
                os.close(lock)
