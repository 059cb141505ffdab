"""The directories of a run's checkpoints, and what their names mean.

    step_00000100                  committed: its manifest was written last, and the name was given after that
    step_00000100.3.tmp            being written by incarnation 3
    step_00000100.3.replaced       was committed; is replaced by a newer one of the same step
    step_00000100.3.deleting       was committed; is being deleted

Only the first kind is ever read. A name changes in one atomic step, so a crash leaves one of these and nothing between.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from moefold.checkpoint import files
from moefold.checkpoint.files import fsync_directory, naming

_COMMITTED = re.compile(r"step_([0-9]{8,15})")
_TEMPORARY = re.compile(r"step_([0-9]{8,15})\.([0-9]{1,15})\.(tmp|replaced|deleting)")


def final_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def temp_path(root: Path, step: int, incarnation: int, kind: str) -> Path:
    return root / f"step_{step:08d}.{incarnation}.{kind}"


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def step_in(name: str) -> int | None:
    """The step that a committed directory's name claims."""
    found = _COMMITTED.fullmatch(name)
    return int(found[1]) if found and final_path(Path(), int(found[1])).name == name else None


def committed_steps(root: Path) -> list[int]:
    """Steps whose directories have a final name, oldest first; they may be invalid."""
    if not root.is_dir():
        return []
    with naming(root):
        return sorted(step for name in os.listdir(root) if (step := step_in(name)) is not None)


def clean_up(root: Path, incarnation: int, *, alone: bool) -> None:
    """Finish or remove what earlier incarnations left; called by one process, before it looks for a checkpoint.

    Peers of the same incarnation may be writing already; a process that is ``alone`` has none.
    """
    with naming(root):
        names = sorted(os.listdir(root))
    for name in names:
        found = _TEMPORARY.fullmatch(name)
        if found is None or int(found[2]) > incarnation:
            continue
        if found[3] == "tmp" and int(found[2]) == incarnation and not alone:
            continue
        final = final_path(root, int(found[1]))
        if found[3] == "replaced" and not final.exists():
            # The crash came between the two renames.
            files.rename(root / name, final)
            fsync_directory(root)
        else:
            files.remove_tree(root / name)
