"""What is tokenized: files of text and rows in many formats, cut into tasks that several processes read.

| input | a document is | who reads it |
|---|---|---|
| text | a file | a worker |
| .jsonl, .ndjson | a line | workers, by byte ranges: a line belongs to the range in which it begins |
| the same with .gz or .zst | a line | the main process unpacks it and hands blocks of lines to the workers |
| .parquet | a row | workers, by row groups |
| a folder written by `datasets`, or a dataset that it streams | a row | the main process hands rows on as JSON lines |

Where the input is cut depends on the input alone, so the output is the same for any number of workers, and the number
of finished tasks is all that a killed run must remember to go on. Every error names the file and the line or row.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moefold.data.byte_ranges import list_folder
from moefold.errors import BackendError, DataError
from moefold.ops.engines import load_engine

TASK_BYTES = 4 << 20
_TASK_FILES = 256
_LINES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".zst")
# Bytes of one document, unpacked.
MAX_UNPACKED = 256 << 20
PARQUET = ".parquet"
_PACKED_LINES = tuple(ending + packed for ending in _LINES for packed in _PACKED)
_ROWS = (*_LINES, *_PACKED_LINES, PARQUET)
# Suffixes of the files that are taken from a folder, if not hidden; a file given by its path may have any.
_TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".js", ".ts")
_UNREADABLE = {
    **dict.fromkeys((".bz2", ".xz", ".zip", ".tar", ".tgz"), "is packed; unpack it, or pack it as .gz or .zst"),
    ".arrow": "is a part of a dataset; give the folder that `datasets` wrote",
    ".json": "is one JSON value; write one object per line, as .jsonl",
    ".csv": "is a table of text; write it as .jsonl or .parquet",
}
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
# The columns of a parquet file that conversations and pairs have.
CHAT_COLUMNS = ("messages", "tools", "prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Chunk:
    """A part of a file that a worker reads (bytes of lines, row groups, or a whole text), or lines that come along.

    ``num_bytes`` are those of the file that it takes, which of a packed one are fewer than those of its lines.
    """

    path: str
    first: int
    after: int
    num_bytes: int
    lines: bytes | None = None

    @property
    def size(self) -> int:
        return self.num_bytes if self.lines is None else len(self.lines)


Task = tuple[Chunk, ...]


class Row(NamedTuple):
    """``where`` as an error says it, made only then: finding a line's number needs the lines before it."""

    where: Callable[[], str]
    value: object


@dataclass(frozen=True)
class Dataset:
    """A dataset read by the `datasets` package: a folder that it wrote, or one that it streams."""

    name: str
    split: str
    stream: bool


Input = str | Dataset


def input_files(inputs: Sequence[str], split: str = "train", stream: bool = False) -> tuple[list[Input], int]:
    """The given files and the files of given folders, and the number of skipped files in these folders."""
    found: list[Input] = []
    num_skipped = 0
    for path in inputs:
        if stream or _written_by_datasets(path):
            found.append(Dataset(path, split, stream))
            continue
        names = list_folder(path)
        if names is None:
            found.append(path)
            continue
        kept = [name for name in names if _is_input(name)]
        if not kept:
            endings = ", ".join((*_TEXTS, *_ROWS))
            raise DataError(f"{path}: none of its {len(names):,} files ends in {endings}; give the files themselves")
        num_skipped += len(names) - len(kept)
        found += [f"{path.rstrip('/')}/{name}" for name in kept]
    for each in found:
        if isinstance(each, str):
            _refuse_unreadable(each)
    return found, num_skipped


def is_rows(path: str) -> bool:
    """Whether a path names a file of rows, by its ending, or a folder that `datasets` wrote."""
    return path.endswith(_ROWS) or _written_by_datasets(path)


def _is_input(name: str) -> bool:
    packed_text = name.endswith(tuple(text + packed for text in _TEXTS for packed in _PACKED))
    return (name.endswith((*_TEXTS, *_ROWS)) or packed_text) and not f"/{name}".count("/.")


def _refuse_unreadable(path: str) -> None:
    for ending, why in _UNREADABLE.items():
        if path.endswith(ending):
            raise DataError(f"{path}: {why}")
    if not os.path.isfile(path):
        raise DataError(
            f"{path}: there is no such file or folder; give text, JSONL or parquet files, or folders of them"
        )


def _written_by_datasets(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def input_identity(inputs: Sequence[Input]) -> list[list[object]]:
    """What a run that goes on after a kill must find unchanged: names, sizes and times of change."""
    found: list[list[object]] = []
    for each in inputs:
        name = each if isinstance(each, str) else each.name
        status = os.stat(name) if os.path.exists(name) else None
        found.append([name, *([status.st_size, status.st_mtime_ns] if status else [repr(each)])])
    return found


def input_bytes(inputs: Sequence[Input]) -> int | None:
    """Bytes of all files, for progress; None if a dataset is among them."""
    return None if any(isinstance(each, Dataset) for each in inputs) else sum(os.path.getsize(str(i)) for i in inputs)


def split_tasks(inputs: Iterable[Input], task_bytes: int | None = None) -> Iterator[Task]:
    """Tasks in the order of the input."""
    limit = task_bytes or TASK_BYTES
    waiting: list[Chunk] = []
    for each in inputs:
        for chunk in _chunks(each, limit):
            held = sum(waited.size for waited in waiting)
            if waiting and (held + chunk.size > limit or len(waiting) == _TASK_FILES):
                yield tuple(waiting)
                waiting = []
            waiting.append(chunk)
    if waiting:
        yield tuple(waiting)


def _chunks(each: Input, limit: int) -> Iterator[Chunk]:
    if isinstance(each, Dataset):
        yield from _blocks(_dataset_lines(each), each.name, limit, lambda: 0)
    elif each.endswith(_PACKED_LINES):
        try:
            with open(each, "rb") as raw:
                yield from _blocks(_unpacked_lines(raw, each), each, limit, raw.tell)
        except OSError as error:
            raise DataError(f"{each}: cannot be read: {error.strerror}") from error
    elif each.endswith(PARQUET):
        groups = _parquet(each).metadata
        for group in range(groups.num_row_groups):
            yield Chunk(each, group, group + 1, groups.row_group(group).total_byte_size)
    else:
        size = os.path.getsize(each)
        step = limit if each.endswith(_LINES) else max(1, size)
        for first in range(0, size, step):
            yield Chunk(each, first, min(first + step, size), min(step, size - first))


def _blocks(lines: Iterator[bytes], name: str, limit: int, position: Callable[[], int]) -> Iterator[Chunk]:
    """Lines in blocks of about `limit` bytes; `position` in the file after each."""
    first = number = held = before = 0
    block: list[bytes] = []
    for line in chain(lines, [b""]):
        block.append(line)
        held, number = held + len(line), number + 1
        if held >= limit or (not line and held):
            after = position()
            yield Chunk(name, first, number, after - before, b"".join(block))
            first, block, held, before = number, [], 0, after


def _unpacked_lines(raw: BinaryIO, path: str) -> Iterator[bytes]:
    number = 0
    try:
        unpacked = _unpacked(raw, path)
        while line := unpacked.readline(MAX_UNPACKED + 1):
            number += 1
            _check_unpacked(line, f"{path}: line {number:,}")
            yield line if line.endswith(b"\n") else line + b"\n"
    except (OSError, EOFError, zlib.error, load_error(path)) as error:
        raise DataError(f"{path}: cannot be unpacked after line {number:,}: {error}") from error


def _check_unpacked(document: bytes, where: str) -> None:
    """A small file can unpack to any size; what is not packed is as large as its file."""
    if len(document) > MAX_UNPACKED:
        raise DataError(f"{where}: unpacks to more than {MAX_UNPACKED:,} bytes for one document; unpack it yourself")


def load_error(path: str) -> type[Exception]:
    """What a damaged file raises."""
    return _library("zstandard", path).ZstdError if path.endswith(".zst") else gzip.BadGzipFile


def _unpacked(raw: BinaryIO, path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw, mode="rb"))
    if path.endswith(".zst"):
        reader = _library("zstandard", path).ZstdDecompressor()
        return io.BufferedReader(reader.stream_reader(raw, read_across_frames=True, closefd=False))
    return raw


def _dataset_lines(dataset: Dataset) -> Iterator[bytes]:
    library = _library("datasets", dataset.name)
    try:
        if dataset.stream:
            rows = library.load_dataset(dataset.name, split=dataset.split, streaming=True)
        else:
            rows = library.load_from_disk(dataset.name)
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"{dataset.name}: `datasets` cannot open it: {error}") from error
    if isinstance(rows, dict):
        if dataset.split not in rows:
            raise DataError(f"{dataset.name}: has no split {dataset.split!r}; use --split with {', '.join(rows)}")
        rows = rows[dataset.split]
    for number, row in enumerate(rows, 1):
        try:
            yield json.dumps(row).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise DataError(f"{dataset.name}: row {number:,}: is more than text and numbers: {error}") from error


def _parquet(path: str):  # type: ignore[no-untyped-def]
    try:
        return _library("pyarrow.parquet", path).ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is not a parquet file: {error}") from error


def _library(name: str, path: str):  # type: ignore[no-untyped-def]
    try:
        return load_engine(name)
    except BackendError as error:
        raise DataError(f"{path}: needs {error}") from error


def rows_of(chunk: Chunk, columns: Sequence[str]) -> Iterator[Row]:
    """A text file's row is its bytes; the others' are JSON objects."""
    path = chunk.path
    try:
        if chunk.lines is not None:
            for number, line in enumerate(chunk.lines.split(b"\n"), chunk.first + 1):
                yield from _parsed(line, partial(_place, path, "line", number))
        elif path.endswith(PARQUET):
            yield from _parquet_rows(chunk, columns)
        elif path.endswith(_LINES):
            yield from _lines_of_range(chunk)
        else:
            with open(path, "rb") as raw:
                text = _unpacked(raw, path).read(MAX_UNPACKED + 1 if path.endswith(_PACKED) else -1)
                _check_unpacked(text if path.endswith(_PACKED) else b"", path)
                yield Row(lambda: path, _utf8(text, path))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _lines_of_range(chunk: Chunk) -> Iterator[Row]:
    with open(chunk.path, "rb") as file:
        # A line that begins in the previous range belongs to that range.
        if chunk.first:
            file.seek(chunk.first - 1)
            file.readline()
        while (at := file.tell()) < chunk.after and (line := file.readline()):
            yield from _parsed(line, partial(_line_at, chunk.path, at))


def _line_at(path: str, byte: int) -> str:
    with open(path, "rb") as file:
        number = 1
        while byte > 0 and (part := file.read(min(byte, 1 << 20))):
            number, byte = number + part.count(b"\n"), byte - len(part)
    return _place(path, "line", number)


def _place(path: str, what: str, number: int) -> str:
    return f"{path}: {what} {number:,}"


def _parquet_rows(chunk: Chunk, columns: Sequence[str]) -> Iterator[Row]:
    file = _parquet(chunk.path)
    known = file.schema_arrow.names
    kept = [name for name in columns if name in known]
    if not kept:
        raise DataError(f"{chunk.path}: has no column {' or '.join(map(repr, columns))}; it has {', '.join(known)}")
    first = sum(file.metadata.row_group(group).num_rows for group in range(chunk.first))
    for number, row in enumerate(file.read_row_group(chunk.first, columns=kept).to_pylist(), first + 1):
        yield Row(partial(_place, chunk.path, "row", number), row)


def _parsed(line: bytes, where: Callable[[], str]) -> Iterator[Row]:
    if not line.strip():
        return
    try:
        found = json.loads(_utf8(line, where))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where()}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{where()}: is a {type(found).__name__}, not an object with keys")
    yield Row(where, found)


def _utf8(text: bytes, where: str | Callable[[], str]) -> bytes:
    """The same bytes without a byte order mark, if they are UTF-8."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        place = where if isinstance(where, str) else where()
        number = text.count(b"\n", 0, error.start) + 1
        line = f", line {number:,}," if isinstance(where, str) else ""
        kind = _MARKS.get(text[:2]) or "Latin-1 or Windows-1252"
        raise DataError(
            f"{place}: is not UTF-8: byte {error.start:,}{line} is 0x{text[error.start]:02x}; if it is {kind} text, "
            f"convert it: iconv -f {'UTF-16' if kind == 'UTF-16' else 'CP1252'} -t UTF-8"
        ) from error
    return text


def value_of(row: Row, key: str) -> object:
    """A row's value under a key; the error names the keys that there are."""
    assert isinstance(row.value, dict)
    if key not in row.value:
        raise DataError(f"{row.where()}: has no key {key!r}; it has {', '.join(map(repr, islice(row.value, 8)))}")
    return row.value[key]


def text_of(value: object, row: Row, key: str) -> bytes:
    if not isinstance(value, str):
        raise DataError(f"{row.where()}: {key!r} is a {type(value).__name__}, not text")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{row.where()}: {key!r} has a lone surrogate at {error.start:,}") from error
