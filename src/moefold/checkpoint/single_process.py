"""Checkpoints written and read by a single process, tensor by tensor, for conversion and upcycling.

Whatever can be read by the box (`TensorSource`) can be written as a checkpoint of one rank, at step 0, and training can
start from it under any layout. It has no optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from moefold import __version__
from moefold.checkpoint.chunk_index import rows_of, write_index
from moefold.checkpoint.files import fsync_directory, make_directory, remove_tree, rename
from moefold.checkpoint.load import Checkpoint
from moefold.checkpoint.manifest import (
    MANIFEST,
    RankFiles,
    TensorEntry,
    data_name,
    ranks_directory,
    table_name,
    write_manifest,
    write_table,
)
from moefold.checkpoint.shard_file import shard_order, write_shard
from moefold.checkpoint.step_dirs import final_path, temp_path, verify
from moefold.checkpoint.tensor_spec import DTYPE_NAMES, ChunkSpec, TensorSource, whole
from moefold.config.loading import dump_run, parse_run
from moefold.config.run import RunConfig
from moefold.errors import CheckpointError, ConfigError

# Called with the number of bytes written since the last call.
Progress = Callable[[int], None]


def write_whole(
    root: Path, source: TensorSource, run: RunConfig, origin: Mapping[str, object], progress: Progress | None = None
) -> Path:
    """All tensors of ``source`` as step 0 under ``root``; ``origin`` records where they come from."""
    final = final_path(root, 0)
    if final.exists():
        raise CheckpointError(f"{final}: exists already; choose another name, or remove it")
    make_directory(root)
    temporary = temp_path(root, 0, 0, "tmp")
    if temporary.exists():
        remove_tree(temporary)
    make_directory(temporary)
    make_directory(temporary / ranks_directory(0))
    chunks = shard_order(_whole_chunk(source, name) for name in source.names())
    try:
        data = write_shard(temporary / data_name(0), chunks, _read_all(source, chunks, progress))
    except BaseException:
        remove_tree(temporary)
        raise
    table = write_table(temporary / table_name(0), 0, 0, chunks)
    tensors = {chunk.name: TensorEntry(DTYPE_NAMES[chunk.dtype], chunk.shape) for chunk in chunks}
    index = write_index(temporary, tensors, [rows_of(chunks)])
    fields = {
        "run": run.name,
        "incarnation": 0,
        "step": 0,
        "world": 1,
        "layout": dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "dp", "edp"), 1),
        "config": dump_run(run),
        "code": __version__,
        "tensors": {name: asdict(entry) for name, entry in tensors.items()},
        "files": [asdict(RankFiles(data, table))],
        "index": asdict(index),
        "state": {"origin": dict(origin)},
    }
    write_manifest(temporary / MANIFEST, fields)
    fsync_directory(temporary / ranks_directory(0))
    fsync_directory(temporary)
    rename(temporary, final)
    fsync_directory(root)
    return final


def _whole_chunk(source: TensorSource, name: str) -> ChunkSpec:
    shape = source.shape(name)
    return ChunkSpec(name, source.dtype(name), shape, whole(shape))


def _read_all(source: TensorSource, chunks: Sequence[ChunkSpec], progress: Progress | None) -> Iterator[Tensor]:
    for chunk in chunks:
        yield source.read(chunk.name)
        if progress is not None:
            progress(chunk.num_bytes)


def _read_config(directory: Path, text: str) -> RunConfig:
    """The run of a checkpoint; one that an older version wrote may have keys under their old names."""
    try:
        return parse_run(text)
    except ConfigError as error:
        raise CheckpointError(f"{directory}: its configuration cannot be read by this version:\n{error}") from None


class StoredWeights:
    """The model's tensors in a checkpoint of any layout, without the optimizer's; every bit is verified first."""

    def __init__(self, directory: Path) -> None:
        manifest = verify(directory)
        self.run: RunConfig = _read_config(directory, manifest.config)
        self.path = directory
        self._checkpoint = Checkpoint(directory)
        self.shape, self.dtype, self.read = self._checkpoint.shape, self._checkpoint.dtype, self._checkpoint.read

    def names(self) -> Sequence[str]:
        return [name for name in self._checkpoint.names() if name.startswith(("parameter/", "buffer/"))]
