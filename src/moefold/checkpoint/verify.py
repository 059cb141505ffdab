"""Validates a checkpoint directory: quickly by names, sizes and the manifest's own hash, or every byte.

The quick check costs the same for any size and is what `latest` uses. The full one reads everything once; when ranks
load together, each file is read by one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

from moefold.checkpoint.files import check_content, check_size, naming
from moefold.checkpoint.manifest import MANIFEST, Manifest, data_name, read_manifest, read_table, table_name
from moefold.checkpoint.shard_file import ShardReader
from moefold.checkpoint.step_dirs import is_temporary, step_in
from moefold.checkpoint.tensor_spec import ChunkSpec, intersection
from moefold.errors import CheckpointError

_RANK_FILE = re.compile(r"rank_.*")


def quick_check(directory: Path) -> Manifest:
    """The manifest of a directory in which everything is there, named right and as long as it should be."""
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory")
    if is_temporary(directory.name):
        raise CheckpointError(f"{directory}: was not committed, or is being deleted, as its name says")
    manifest = read_manifest(directory)
    step = step_in(directory.name)
    if directory.name.startswith("step_") and step != manifest.step:
        raise CheckpointError(
            f"{directory / MANIFEST}: is of step {manifest.step}, which is not what the directory says"
        )
    for rank, files in enumerate(manifest.files):
        check_size(directory / table_name(rank), files.table.bytes)
        check_size(directory / data_name(rank), files.data.bytes)
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
