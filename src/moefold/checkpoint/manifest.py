"""The JSON of a checkpoint: one table per rank, and one manifest, written last, with the hashes of all other files.

The manifest holds its own hash and those of every rank's table and data file; a table lists the boxes in its data file.
Both are written in one canonical form and must have it when read, so that a change of any byte is detected. The
manifest lists every global tensor once, whatever the number of ranks, and every rank's two files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter, ValidationError

from moefold.checkpoint.files import FileRecord, read_bounded, read_recorded, write_file
from moefold.checkpoint.tensor_spec import DTYPE_NAMES, DTYPES, Box, ChunkSpec, TensorSpec, intersection, is_rank_record
from moefold.config.strict import STRICT
from moefold.errors import CheckpointError

FORMAT, TABLE_FORMAT, VERSION = "moefold-checkpoint", "moefold-rank-table", 1
MANIFEST = "manifest.json"
# Generous: 10,000 ranks and 100,000 tensors take some 20 MB.
MAX_JSON_BYTES = 1 << 28
_MAX_DIM_SIZE = 1 << 48
_MAX_DIMS = 16
_MAX_NAME = 512

Parsed = TypeVar("Parsed")


def data_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def table_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


@dataclass(frozen=True)
class TensorEntry:
    __pydantic_config__: ClassVar = STRICT

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ChunkEntry:
    __pydantic_config__: ClassVar = STRICT

    name: str
    dtype: str
    shape: tuple[int, ...]
    # First and last-plus-one index, per dim.
    box: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankTable:
    """Which chunks lie in a rank's data file, in the file's order."""

    __pydantic_config__: ClassVar = STRICT

    format: str
    version: int
    step: int
    rank: int
    chunks: tuple[ChunkEntry, ...]


@dataclass(frozen=True)
class RankFiles:
    __pydantic_config__: ClassVar = STRICT

    data: FileRecord
    table: FileRecord


@dataclass(frozen=True)
class Manifest:
    __pydantic_config__: ClassVar = STRICT

    format: str
    version: int
    # The run's id, and the number of the start that wrote this.
    run: str
    incarnation: int
    step: int
    world: int
    layout: dict[str, int]
    # The whole configuration, as YAML text, and the version of the code.
    config: str
    code: str
    tensors: dict[str, TensorEntry]
    files: tuple[RankFiles, ...]
    # The trainer's state.
    state: dict[str, Any]
    sha256: str

    def spec(self, name: str) -> TensorSpec:
        entry = self.tensors[name]
        return TensorSpec(DTYPES[entry.dtype], entry.shape)


def canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def as_plain(state: Mapping[str, object], what: str) -> dict[str, object]:
    """A copy that JSON represents exactly; raises where it cannot."""
    try:
        return dict(json.loads(canonical(state)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be written as JSON: {error}") from None


# ---- writing ----


def write_table(path: Path, step: int, rank: int, chunks: Sequence[ChunkSpec]) -> FileRecord:
    entries = tuple(
        ChunkEntry(c.name, DTYPE_NAMES[c.dtype], c.shape, tuple((part.start, part.stop) for part in c.box))
        for c in chunks
    )
    return write_file(path, [canonical(asdict(RankTable(TABLE_FORMAT, VERSION, step, rank, entries)))])


def write_manifest(path: Path, fields: Mapping[str, object]) -> None:
    """``fields`` are those of Manifest but format, version and sha256."""
    content = {"format": FORMAT, "version": VERSION, **fields}
    write_file(path, [canonical(content | {"sha256": hashlib.sha256(canonical(content)).hexdigest()})])


# ---- reading ----


def read_manifest(directory: Path) -> Manifest:
    """Checked, except for the files that it lists."""
    path = directory / MANIFEST
    content = read_bounded(path, MAX_JSON_BYTES)
    data = _canonical_object(path, content)
    claimed = data.pop("sha256", None)
    if claimed != hashlib.sha256(canonical(data)).hexdigest():
        raise CheckpointError(f"{path}: damaged, it does not have the hash it says")
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: is {data.get('format')!r} version {data.get('version')!r}, not {FORMAT} {VERSION}"
        )
    manifest = _parsed(path, content, _manifest_adapter)
    if manifest.world != len(manifest.files) or not manifest.files:
        raise CheckpointError(f"{path}: lists the files of {len(manifest.files)} ranks for a world of {manifest.world}")
    if manifest.step < 0 or manifest.incarnation < 0:
        raise CheckpointError(f"{path}: step {manifest.step} of incarnation {manifest.incarnation}")
    for name, entry in manifest.tensors.items():
        _check_tensor(path, name, entry.dtype, entry.shape)
    return manifest


def read_table(directory: Path, manifest: Manifest, rank: int) -> list[ChunkSpec]:
    """A rank's chunks, each checked against the tensor it is a part of."""
    path = directory / table_name(rank)
    content = read_recorded(path, manifest.files[rank].table, MAX_JSON_BYTES)
    _canonical_object(path, content)
    table = _parsed(path, content, _table_adapter)
    if (table.format, table.version, table.step, table.rank) != (TABLE_FORMAT, VERSION, manifest.step, rank):
        raise CheckpointError(f"{path}: is {table.format} {table.version} of rank {table.rank} at step {table.step}")
    chunks: list[ChunkSpec] = []
    boxes: dict[str, list[Box]] = {}
    for entry in table.chunks:
        _check_chunk(path, entry, manifest)
        box = tuple(slice(start, stop) for start, stop in entry.box)
        if any(intersection(box, other) is not None for other in boxes.get(entry.name, ())):
            raise CheckpointError(f"{path}: {entry.name} is listed twice")
        boxes.setdefault(entry.name, []).append(box)
        chunks.append(ChunkSpec(entry.name, DTYPES[entry.dtype], entry.shape, box))
    return chunks


def _check_chunk(path: Path, entry: ChunkEntry, manifest: Manifest) -> None:
    _check_tensor(path, entry.name, entry.dtype, entry.shape)
    if not is_rank_record(entry.name):
        listed = manifest.tensors.get(entry.name)
        if listed is None:
            raise CheckpointError(f"{path}: {entry.name} is not among the manifest's tensors")
        if listed != TensorEntry(entry.dtype, entry.shape):
            raise CheckpointError(f"{path}: {entry.name} is not of the dtype and shape that the manifest says")
    fits = len(entry.box) == len(entry.shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(entry.box, entry.shape, strict=True)
    )
    if not fits:
        raise CheckpointError(f"{path}: {entry.name} has a box {entry.box} outside of its shape {entry.shape}")


def _check_tensor(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if len(name) > _MAX_NAME or not name.isprintable() or not name:
        raise CheckpointError(f"{path}: {name[:40]!r} cannot be a tensor's name")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {dtype[:40]!r}")
    if len(shape) > _MAX_DIMS or not all(0 <= size < _MAX_DIM_SIZE for size in shape):
        raise CheckpointError(f"{path}: {name} has the impossible shape {list(shape)[:_MAX_DIMS]}")


def _canonical_object(path: Path, content: bytes) -> dict[str, object]:
    try:
        data = json.loads(content)
        is_canonical = canonical(data) == content
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict) or not is_canonical:
        raise CheckpointError(f"{path}: damaged, its bytes are not the form in which it is written")
    return data


def _parsed(path: Path, content: bytes, adapter: Callable[[], TypeAdapter[Parsed]]) -> Parsed:
    try:
        return adapter().validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))[:200]}: {first['msg']}") from None


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@cache
def _table_adapter() -> TypeAdapter[RankTable]:
    return TypeAdapter(RankTable)
