"""The JSON of a checkpoint: one table per rank, and one manifest, written last, with the hashes of all other files.

The manifest holds its own hash and those of every rank's table and data file; a table lists the boxes in its data file.
Both are written in one canonical form and must have it when read, so that a change of any byte is detected. The
manifest lists every global tensor once, whatever the number of ranks, every rank's two files, and those of the index
(`chunk_index.py`).

One process reads and checks the manifest; the others get it from there, packed: its JSON without the files, and the
files as numbers, of which a rank looks at a few.

Version 1, of moefold 0.1, had all files in one directory and no index. It can still be read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from moefold.checkpoint.files import FileRecord, read_bounded, read_recorded, write_file
from moefold.checkpoint.tensor_spec import DTYPE_NAMES, DTYPES, ChunkSpec, TensorSpec, is_rank_record
from moefold.config.strict import STRICT
from moefold.errors import CheckpointError

FORMAT, TABLE_FORMAT, VERSION = "moefold-checkpoint", "moefold-rank-table", 2
_FLAT = 1
MANIFEST = "manifest.json"
# Of one directory; each has two files.
RANKS_PER_DIRECTORY = 512
# Generous: 10,000 ranks and 100,000 tensors take some 20 MB.
MAX_JSON_BYTES = 1 << 28
_MAX_DIM_SIZE = 1 << 48
_MAX_FILE_BYTES = 1 << 62
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_DIMS = 8
_MAX_NAME = 512

Parsed = TypeVar("Parsed")


def ranks_directory(rank: int) -> str:
    return f"ranks_{rank - rank % RANKS_PER_DIRECTORY:05d}"


def data_name(rank: int, version: int = VERSION) -> str:
    """Relative to the checkpoint's directory."""
    return f"{'' if version == _FLAT else ranks_directory(rank) + '/'}rank_{rank:05d}.safetensors"


def table_name(rank: int, version: int = VERSION) -> str:
    return f"{'' if version == _FLAT else ranks_directory(rank) + '/'}rank_{rank:05d}.json"


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

    def as_numbers(self) -> list[int]:
        """Of fixed length, so that ranks can send it as a tensor; a hash is four signed 64-bit numbers."""
        numbers: list[int] = []
        for record in (self.data, self.table):
            numbers += [record.bytes, *np.frombuffer(bytes.fromhex(record.sha256), _HASH_WORD).tolist()]
        return numbers

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> RankFiles:
        words = np.array(numbers, np.int64).astype(_HASH_WORD)
        return cls(*(FileRecord(int(numbers[at]), words[at + 1 : at + 5].tobytes().hex()) for at in (0, 5)))


_HASH_WORD = np.dtype(">i8")


class FileNumbers(Sequence[RankFiles]):
    """Every rank's files, as numbers; an entry is made when it is asked for."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, rank: int) -> RankFiles: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[RankFiles]: ...

    def __getitem__(self, rank: int | slice) -> RankFiles | Sequence[RankFiles]:
        if isinstance(rank, slice):
            return FileNumbers(self._numbers[rank])
        return RankFiles.from_numbers(self._numbers[rank].tolist())


@dataclass(frozen=True)
class IndexFiles:
    """Of `chunk_index.py`."""

    __pydantic_config__: ClassVar = STRICT

    pages: FileRecord
    rows: FileRecord


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
    files: Sequence[RankFiles]
    # The trainer's state.
    state: dict[str, Any]
    sha256: str
    # None in version 1.
    index: IndexFiles | None = None

    def spec(self, name: str) -> TensorSpec:
        entry = self.tensors[name]
        return TensorSpec(DTYPES[entry.dtype], entry.shape)

    def data_path(self, directory: Path, rank: int) -> Path:
        return directory / data_name(rank, self.version)

    def table_path(self, directory: Path, rank: int) -> Path:
        return directory / table_name(rank, self.version)


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


# ---- from the process that read it to the others ----


def packed(manifest: Manifest) -> bytes:
    """The numbers are those of `RankFiles.as_numbers`, of all ranks at once."""
    records = [record for files in manifest.files for record in (files.data, files.table)]
    words = np.frombuffer(bytes.fromhex("".join(record.sha256 for record in records)), _HASH_WORD).reshape(-1, 4)
    sizes = np.array([[record.bytes] for record in records], np.int64)
    content = vars(manifest) | {"files": [], "index": manifest.index and asdict(manifest.index)}
    content["tensors"] = {name: vars(entry) for name, entry in manifest.tensors.items()}
    text = canonical(content)
    return len(text).to_bytes(8, "little") + text + np.hstack([sizes, words]).astype("<i8").tobytes()


def unpacked(path: Path, content: bytes) -> Manifest:
    """What `packed` made of a manifest that was checked."""
    split = 8 + int.from_bytes(content[:8], "little")
    manifest = _parsed(path, content[8:split], _manifest_adapter)
    files = np.frombuffer(content[split:], "<i8").astype(np.int64).reshape(manifest.world, -1)
    return replace(manifest, files=FileNumbers(files))


# ---- reading ----


def read_manifest(directory: Path) -> Manifest:
    """Checked, except for the files that it lists."""
    path = directory / MANIFEST
    content = read_bounded(path, MAX_JSON_BYTES)
    data = _canonical_object(path, content)
    claimed = data.pop("sha256", None)
    if claimed != hashlib.sha256(canonical(data)).hexdigest():
        raise CheckpointError(f"{path}: damaged, it does not have the hash it says")
    if data.get("format") != FORMAT or data.get("version") not in (_FLAT, VERSION):
        raise CheckpointError(
            f"{path}: is {data.get('format')!r} version {data.get('version')!r}, not {FORMAT} {VERSION}"
        )
    manifest = _parsed(path, content, _manifest_adapter)
    if (manifest.index is None) != (manifest.version == _FLAT):
        raise CheckpointError(
            f"{path}: version {manifest.version} {'without' if manifest.index is None else 'with'} index"
        )
    if manifest.world != len(manifest.files) or not manifest.files:
        raise CheckpointError(f"{path}: lists the files of {len(manifest.files)} ranks for a world of {manifest.world}")
    if manifest.step < 0 or manifest.incarnation < 0:
        raise CheckpointError(f"{path}: step {manifest.step} of incarnation {manifest.incarnation}")
    _check_records(path, manifest)
    for name, entry in manifest.tensors.items():
        _check_tensor(path, name, entry.dtype, entry.shape)
    return manifest


def _check_records(path: Path, manifest: Manifest) -> None:
    records = [record for files in manifest.files for record in (files.data, files.table)]
    if manifest.index is not None:
        records += [manifest.index.pages, manifest.index.rows]
    for record in records:
        if not 0 <= record.bytes < _MAX_FILE_BYTES or not _SHA256.fullmatch(record.sha256):
            raise CheckpointError(f"{path}: lists a file of {record.bytes} bytes with sha256 {record.sha256[:64]!r}")


def read_table(directory: Path, manifest: Manifest, rank: int) -> list[ChunkSpec]:
    """A rank's chunks, each checked against the tensor it is a part of."""
    path = manifest.table_path(directory, rank)
    content = read_recorded(path, manifest.files[rank].table, MAX_JSON_BYTES)
    _canonical_object(path, content)
    table = _parsed(path, content, _table_adapter)
    if (table.format, table.version, table.step, table.rank) != (TABLE_FORMAT, manifest.version, manifest.step, rank):
        raise CheckpointError(f"{path}: is {table.format} {table.version} of rank {table.rank} at step {table.step}")
    chunks: list[ChunkSpec] = []
    seen: set[tuple[str, tuple[tuple[int, int], ...]]] = set()
    for entry in table.chunks:
        _check_chunk(path, entry, manifest)
        box = tuple(slice(start, stop) for start, stop in entry.box)
        if (entry.name, entry.box) in seen:
            raise CheckpointError(f"{path}: {entry.name} is listed twice")
        seen.add((entry.name, entry.box))
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


def build_validators() -> None:
    """Build what reading a manifest needs; once per process, and processes that are forked from it have it already."""
    _manifest_adapter()
    _table_adapter()


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@cache
def _table_adapter() -> TypeAdapter[RankTable]:
    return TypeAdapter(RankTable)
