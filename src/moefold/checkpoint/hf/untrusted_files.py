"""JSON and safetensors files of unknown origin, checked before they are used.

JSON is bounded in size, UTF-8 only, without repeated keys and without NaN. A safetensors file is

    8 bytes: length of the header | JSON: name -> dtype, shape, [first, last) byte | the bytes of all tensors

All of its header is compared with the size of the file before a tensor is read: known dtypes, shapes that fill their
bytes exactly, tensors that follow one another without gap or overlap to the end of the file. So no header can make us
allocate more memory than the file has bytes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn, TypeGuard

import torch
from torch import Tensor

from moefold.errors import ConversionError, Problem

MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER = 64 << 20
_MAX_PROBLEMS = 20
_MAX_DIMS = 8
_MAX_NAME = 512

# Bytes per element of every dtype of safetensors; those that weights may have are in WEIGHT_DTYPES.
ITEM_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2}
ITEM_SIZES |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Of quantized weights: their codes, and scales that are bytes.
CODE_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
DTYPE_KEYS = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}


def parse_object(raw: bytes, where: str) -> dict[str, object]:
    """The one JSON object in ``raw``."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_reject_repeated_keys, parse_constant=_reject_constant
        )
    except RecursionError:
        raise ConversionError(Problem(where, "nested too deeply")) from None
    except ValueError as error:
        raise ConversionError(Problem(where, f"not JSON: {str(error)[:200]}")) from None
    if not isinstance(value, dict):
        raise ConversionError(Problem(where, f"a JSON object is expected, not a {type(value).__name__}"))
    return value


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """The JSON object in a small, regular file."""
    with os.fdopen(open_regular(path), "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ConversionError(Problem(path.name, f"larger than {limit:,} bytes", "it is not the expected file"))
    return parse_object(raw, path.name)


def open_regular(path: Path) -> int:
    """A descriptor for reading; links, pipes and folders are refused, so a name cannot point outside its directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if path.is_symlink():
            fix = "copy the files themselves (`hf download --local-dir`)"
            raise ConversionError(Problem(path.name, "is a symbolic link", fix)) from None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConversionError(Problem(path.name, f"cannot be read: {reason}")) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConversionError(Problem(path.name, "is not a regular file"))
    return descriptor


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)[:60]!r} is repeated")
    return found


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor's entry in the header; offsets are relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(raw: bytes, data_bytes: int, where: str) -> dict[str, HeaderEntry]:
    """The tensors of a file whose header is ``raw`` and is followed by ``data_bytes`` bytes."""
    claims = parse_object(raw, where)
    claims.pop("__metadata__", None)
    entries: dict[str, HeaderEntry] = {}
    problems: list[Problem] = []
    for name, claim in claims.items():
        entry = _parse_entry(name, claim)
        if isinstance(entry, HeaderEntry):
            entries[name] = entry
        else:
            problems.append(Problem(f"{where}: {name[:80]!r}", entry))
            if len(problems) >= _MAX_PROBLEMS:
                break
    problems = problems or _layout_problems(entries, data_bytes, where)
    if problems:
        raise ConversionError(*problems)
    return entries


def _parse_entry(name: str, claim: object) -> HeaderEntry | str:
    """One entry by itself, or what is wrong with it."""
    if not (0 < len(name) <= _MAX_NAME and name.isprintable()):
        return f"a name has 1 to {_MAX_NAME} printable characters"
    if not isinstance(claim, dict) or set(claim) != {"dtype", "shape", "data_offsets"}:
        return "an entry has dtype, shape and data_offsets, and nothing else"
    dtype, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        return f"unknown dtype {str(dtype)[:40]!r}; known: {', '.join(ITEM_SIZES)}"
    if not _are_integers(shape) or len(shape) > _MAX_DIMS:
        return f"shape must be up to {_MAX_DIMS} integers of at least 0"
    if not _are_integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "data_offsets must be two integers, the first not larger than the second"
    needed, given = prod(shape) * ITEM_SIZES[dtype], offsets[1] - offsets[0]
    if needed != given:
        return f"shape {tuple(shape)} of {dtype} needs {needed} bytes, not {given}"
    return HeaderEntry(dtype, tuple(shape), *offsets)


def _are_integers(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _layout_problems(entries: dict[str, HeaderEntry], data_bytes: int, where: str) -> list[Problem]:
    """Tensors must follow one another, without bytes that belong to two of them or to none."""
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != reached:
            what = "overlaps the tensor before it" if entry.start < reached else "leaves a gap before it"
            return [Problem(f"{where}: {name[:80]!r}", f"{what}: starts at byte {entry.start}, not {reached}")]
        reached = entry.stop
    if reached != data_bytes:
        return [Problem(where, f"its tensors have {reached} bytes, but {data_bytes} follow the header")]
    return []


class SafetensorsFile:
    """An open safetensors file, whose header was checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        try:
            self.entries, self._data = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[dict[str, HeaderEntry], int]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or length > size - 8 or length > MAX_HEADER:
            bound = min(max(size - 8, 0), MAX_HEADER)
            raise ConversionError(Problem(self.path.name, f"a header of {length} bytes; at most {bound} are possible"))
        raw = os.pread(self._descriptor, length, 8)
        return parse_header(raw, size - 8 - length, self.path.name), 8 + length

    def read(self, name: str, at: Sequence[int] = ()) -> Tensor:
        """The tensor, or its slice with these leading indices; only the bytes of the slice are read."""
        entry = self.entries[name]
        shape = entry.shape[len(at) :]
        size = prod(shape) * ITEM_SIZES[entry.dtype]
        first = 0
        for index, extent in zip(at, entry.shape):
            first = first * extent + index
        return (
            self._read_bytes(name, self._data + entry.start + first * size, size)
            .view((WEIGHT_DTYPES | CODE_DTYPES)[entry.dtype])
            .view(shape)
        )

    def raw(self, name: str, block: int = 1 << 23) -> Iterator[bytes]:
        """A tensor's bytes, in blocks."""
        entry = self.entries[name]
        for start in range(entry.start, entry.stop, block):
            yield os.pread(self._descriptor, min(block, entry.stop - start), self._data + start)

    def _read_bytes(self, name: str, start: int, size: int) -> Tensor:
        out = torch.empty(size, dtype=torch.uint8)
        view, done = memoryview(out.numpy()), 0  # type: ignore[arg-type]
        while done < size:
            got = os.preadv(self._descriptor, [view[done:]], start + done)
            if not got:
                raise ConversionError(Problem(f"{self.path.name}: {name!r}", f"ends after {done} of {size} bytes"))
            done += got
        return out

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The header of a file with these tensors, in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + nbytes(dtype, shape)
        entries[name] = {"dtype": DTYPE_KEYS[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return prod(shape) * dtype.itemsize


def as_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
