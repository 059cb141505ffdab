"""The directories of a run's checkpoints, and what their names mean.

    step_00000100                  committed: its manifest was written last, and the name was given after that
    step_00000100.3.tmp            being written by incarnation 3
    step_00000100.3.replaced       was committed; is replaced by a newer one of the same step
    step_00000100.3.deleting       was committed; is being deleted

Only the first kind is ever read. A name changes in one atomic step, so a crash leaves one of these and nothing between.

A directory is validated quickly, by names, sizes and the manifest's own hash, or by every byte. The quick check costs
the same for any size and is what `latest` uses. The full one reads everything once; when ranks load together, each file
is read by one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

from moefold.checkpoint import files
from moefold.checkpoint.files import check_content, check_size, fsync_directory, naming
from moefold.checkpoint.manifest import MANIFEST, Manifest, data_name, read_manifest, read_table, table_name
from moefold.checkpoint.shard_file import ShardReader
from moefold.checkpoint.tensor_spec import ChunkSpec, intersection
from moefold.errors import CheckpointError

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


_RANK_FILE = re.compile(r"rank_.*")


def quick_check(directory: Path) -> Manifest:
    """The manifest of a directory in which everything is there, named right and as long as it should be."""
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; give runs/NAME, or one of its checkpoints/step_...")
    if is_temporary(directory.name):
        raise CheckpointError(f"{directory}: was not committed, or is being deleted, as its name says")
    manifest = read_manifest(directory)
    step = step_in(directory.name)
    if directory.name.startswith("step_") and step != manifest.step:
        raise CheckpointError(
            f"{directory / MANIFEST}: is of step {manifest.step}, which is not what the directory says"
        )
    for rank, entry in enumerate(manifest.files):
        check_size(directory / table_name(rank), entry.table.bytes)
        check_size(directory / data_name(rank), entry.data.bytes)
    expected = {name(rank) for rank in range(manifest.world) for name in (data_name, table_name)}
    with naming(directory):
        for name in os.listdir(directory):
            if _RANK_FILE.fullmatch(name) and name not in expected:
                raise CheckpointError(f"{directory / name}: not in the manifest")
    return manifest


def check_files(directory: Path, manifest: Manifest, ranks: Iterable[int]) -> None:
    """Hash the two files of each of these ranks."""
    for rank in ranks:
        check_content(directory / table_name(rank), manifest.files[rank].table)
        check_content(directory / data_name(rank), manifest.files[rank].data)


def verify(directory: Path) -> Manifest:
    """Everything, to the last bit: every file's hash, and that the chunks make up every tensor, each element once."""
    manifest = quick_check(directory)
    check_files(directory, manifest, range(manifest.world))
    check_structure(directory, manifest)
    return manifest


def check_structure(directory: Path, manifest: Manifest) -> None:
    """Headers match tables, and the chunks of every tensor cover each element once."""
    found: dict[str, list[ChunkSpec]] = {}
    for rank in range(manifest.world):
        chunks = read_table(directory, manifest, rank)
        ShardReader(directory / data_name(rank), chunks)
        for chunk in chunks:
            found.setdefault(chunk.name, []).append(chunk)
    for name, entry in manifest.tensors.items():
        _check_covered(directory, name, prod(entry.shape), found.get(name, []))


def _check_covered(directory: Path, name: str, elements: int, chunks: Sequence[ChunkSpec]) -> None:
    covered = sum(chunk.num_elements for chunk in chunks)
    if covered != elements:
        raise CheckpointError(f"{directory}: {name} has {elements:,} elements, its chunks have {covered:,}")
    for i, chunk in enumerate(chunks):
        for other in chunks[:i]:
            if intersection(chunk.box, other.box) is not None:
                raise CheckpointError(f"{directory}: two chunks of {name} overlap")
