"""The directories of a run's checkpoints, and what their names mean.

    step_00000100                  committed: its manifest was written last, and the name was given after that
    step_00000100.3.tmp            being written by incarnation 3
    step_00000100.3.replaced       was committed; is replaced by a newer one of the same step
    step_00000100.3.deleting       was committed; is being deleted

Only the first kind is ever read. A name changes in one atomic step, so a crash leaves one of these and nothing between.

In a committed directory, ranks' files lie in directories of 512 ranks each, because file systems become slow where
100,000 names lie together.

A directory is validated by names and the manifest's own hash; quickly, by the sizes of all files too; or by every byte.
When ranks load together, one looks at names, and each file's size and bytes are checked by one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moefold.checkpoint import files
from moefold.checkpoint.chunk_index import Located, check_index
from moefold.checkpoint.files import check_content, check_size, fsync_directory, naming
from moefold.checkpoint.manifest import MANIFEST, Manifest, data_name, read_manifest, read_table, table_name
from moefold.checkpoint.shard_file import ShardReader
from moefold.checkpoint.tensor_spec import Box, ChunkSpec, cover_fault, intersection, whole
from moefold.errors import CheckpointError, name_ranks

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


_RANK_FILE = re.compile(r"ranks?_.*")


def quick_check(directory: Path) -> Manifest:
    """The manifest of a directory in which everything is there, named right and as long as it should be."""
    manifest = check_names(directory)
    check_sizes(directory, manifest, range(manifest.world))
    return manifest


def check_names(directory: Path) -> Manifest:
    """The manifest of a directory in which every file is there; it lists directories, and looks at no file but this."""
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
    # By text: two paths for each of thousands of ranks would cost a second.
    expected: dict[str, set[str]] = {"": set()}
    for rank in range(manifest.world):
        for name in (data_name(rank, manifest.version), table_name(rank, manifest.version)):
            folder, _, file = name.rpartition("/")
            expected.setdefault(folder, set()).add(file)
    expected[""] |= {folder for folder in expected if folder}
    for folder, names in expected.items():
        _check_listed(directory / folder, names)
    return manifest


def _check_listed(folder: Path, names: set[str]) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder}: not a directory")
    with naming(folder):
        found = {name for name in os.listdir(folder) if _RANK_FILE.fullmatch(name)}
    for name in sorted(found - names):
        raise CheckpointError(f"{folder / name}: not in the manifest")
    for name in sorted(names - found):
        raise CheckpointError(f"{folder / name}: is missing")


def check_sizes(directory: Path, manifest: Manifest, ranks: Iterable[int]) -> None:
    """Of the two files of each of these ranks."""
    for rank in ranks:
        check_size(manifest.table_path(directory, rank), manifest.files[rank].table.bytes)
        check_size(manifest.data_path(directory, rank), manifest.files[rank].data.bytes)


def check_files(directory: Path, manifest: Manifest, ranks: Iterable[int]) -> None:
    """Hash the two files of each of these ranks."""
    for rank in ranks:
        check_content(manifest.table_path(directory, rank), manifest.files[rank].table)
        check_content(manifest.data_path(directory, rank), manifest.files[rank].data)


def verify(directory: Path) -> Manifest:
    """Everything, to the last bit: every file's hash, and that the chunks make up every tensor, each element once."""
    manifest = quick_check(directory)
    check_files(directory, manifest, range(manifest.world))
    check_structure(directory, manifest)
    return manifest


def check_structure(directory: Path, manifest: Manifest) -> None:
    """Headers match tables, the index matches them too, and the chunks of every tensor cover each element once."""
    index = check_index(directory, manifest, _tables(directory, manifest))
    for name, entry in manifest.tensors.items():
        box = whole(entry.shape)
        check_cover(directory, name, box, list(index.find(name, box)))


def _tables(directory: Path, manifest: Manifest) -> Iterator[list[ChunkSpec]]:
    for rank in range(manifest.world):
        chunks = read_table(directory, manifest, rank)
        ShardReader(manifest.data_path(directory, rank), manifest.files[rank].data.bytes).check_header(chunks)
        yield chunks


def check_cover(directory: Path, name: str, box: Box, chunks: Sequence[Located]) -> None:
    """Raise unless each element of the box is in one of the chunks, which all meet the box, and in no other."""
    fault = cover_fault(box, [part for chunk in chunks if (part := intersection(box, chunk.box)) is not None])
    if fault is None:
        return
    point, excess = fault
    at = tuple(slice(index, index + 1) for index in point)
    ranks = sorted({chunk.rank for chunk in chunks if not point or intersection(at, chunk.box) is not None})
    place = f"element {list(point)} of {name}" if point else name
    if excess < 0:
        raise CheckpointError(f"{directory}: lacks {place}: no rank has written it")
    raise CheckpointError(f"{directory}: two chunks of {name} overlap: {place} is in files of {name_ranks(ranks)}")
