"""Commit a checkpoint, and delete outdated ones: both change final names, which only the run's last start may.

An old one is deleted only after a newer one was committed, and that only after every rank read back what it wrote. The
newest `keep` valid ones are kept, and those at multiples of `keep_every` for good. Invalid ones are not counted, so
that a damaged checkpoint never displaces a valid one.
"""

from __future__ import annotations

from pathlib import Path

from moefold.checkpoint import files
from moefold.checkpoint.files import fsync_directory
from moefold.checkpoint.run_lock import may_write
from moefold.checkpoint.step_dirs import check_names, committed_steps, final_path, temp_path
from moefold.errors import CheckpointError


def commit(root: Path, step: int, run_dir: Path, incarnation: int) -> None:
    """Give the finished directory its final name, unless a later start has taken over."""
    final = final_path(root, step)
    temporary = temp_path(root, step, incarnation, "tmp")
    replaced = temp_path(root, step, incarnation, "replaced")
    for folder in sorted(temporary.glob("ranks_*")):
        fsync_directory(folder)
    fsync_directory(temporary)
    with may_write(run_dir, incarnation):
        again = final.exists()
        if again:
            # The run resumed from an older step and reached this one again. Until the new one has its name, `clean_up`
            # would restore this one.
            files.rename(final, replaced)
        files.rename(temporary, final)
    fsync_directory(root)
    if again:
        files.remove_tree(replaced)


def delete_outdated(root: Path, run_dir: Path, incarnation: int, keep: int, keep_every: int) -> list[int]:
    """Returns the steps that were deleted."""
    deleted = [step for step in outdated(root, keep) if not (keep_every and step % keep_every == 0)]
    for step in deleted:
        delete_checkpoint(root, step, run_dir, incarnation)
    return deleted


def outdated(root: Path, keep: int) -> list[int]:
    """Steps that are older than the newest ``keep`` that verify, oldest first."""
    kept, steps = 0, committed_steps(root)
    for index in range(len(steps) - 1, -1, -1):
        if kept >= max(keep, 1):
            return steps[: index + 1]
        kept += _is_valid(final_path(root, steps[index]))
    return []


def delete_checkpoint(root: Path, step: int, run_dir: Path, incarnation: int) -> None:
    """Renames first, so that a crash leaves nothing that looks like a checkpoint."""
    temporary = temp_path(root, step, incarnation, "deleting")
    with may_write(run_dir, incarnation):
        files.rename(final_path(root, step), temporary)
    fsync_directory(root)
    files.remove_tree(temporary)


def _is_valid(directory: Path) -> bool:
    try:
        # The sizes were checked when it was committed; thousands of files are not looked at again at every save.
        check_names(directory)
    except CheckpointError:
        return False
    return True
