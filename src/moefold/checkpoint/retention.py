"""Which checkpoints stay, and how the others go.

An old one goes only after a newer one was committed, and that only after every rank read back what it had written. The
newest ``keep`` that verify stay, and those at multiples of ``keep_every`` stay for good. What does not verify is not
counted, so a damaged one never costs a good one its place.
"""

from __future__ import annotations

from pathlib import Path

from moefold.checkpoint import files
from moefold.checkpoint.files import fsync_directory
from moefold.checkpoint.run_lock import may_write
from moefold.checkpoint.step_dirs import committed_steps, final_path, passing_path
from moefold.checkpoint.verify import quick_check
from moefold.errors import CheckpointError


def retire(root: Path, run_dir: Path, incarnation: int, keep: int, keep_every: int) -> list[int]:
    """Delete what need not stay; returns the steps that went."""
    gone = [step for step in outdated(root, keep) if not (keep_every and step % keep_every == 0)]
    for step in gone:
        delete_checkpoint(root, step, run_dir, incarnation)
    return gone


def outdated(root: Path, keep: int) -> list[int]:
    """Steps that are older than the newest ``keep`` that verify, oldest first."""
    kept, steps = 0, committed_steps(root)
    for index in range(len(steps) - 1, -1, -1):
        if kept >= max(keep, 1):
            return steps[: index + 1]
        kept += _is_sound(final_path(root, steps[index]))
    return []


def delete_checkpoint(root: Path, step: int, run_dir: Path, incarnation: int) -> None:
    """Take the name away first: a crash in the middle leaves nothing that looks like a checkpoint."""
    doomed = passing_path(root, step, incarnation, "deleting")
    with may_write(run_dir, incarnation):
        files.rename(final_path(root, step), doomed)
    fsync_directory(root)
    files.remove_tree(doomed)


def _is_sound(directory: Path) -> bool:
    try:
        quick_check(directory)
    except CheckpointError:
        return False
    return True
