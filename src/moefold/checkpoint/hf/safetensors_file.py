"""One safetensors file: a header that is believed only after it was checked, and tensors read one slice at a time.

    8 bytes: length of the header | JSON: name -> dtype, shape, [first, last) byte | the bytes of all tensors

Everything in the header is a claim by a stranger. All of it is compared with the size of the file before a single
tensor is read: known formats, shapes that fill their bytes exactly, tensors that follow one another without gap or
overlap to the end of the file. So no claim makes us reserve more memory than the file has bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.hf.strict_json import open_plain, parse_object
from moefold.errors import ConversionError, Problem

MAX_HEADER = 64 << 20
_MOST_PROBLEMS = 20
_MOST_DIMS = 8
_LONGEST_NAME = 512

# Bytes per element of every format that the files may hold; those that can be weights of ours have a torch format.
WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2}
WIDTHS |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
FORMATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in FORMATS.items()}


@dataclass(frozen=True)
class Entry:
    """What the header says of one tensor; offsets count from the end of the header."""

    format: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(raw: bytes, data_bytes: int, where: str) -> dict[str, Entry]:
    """The tensors of a file whose header is ``raw`` and is followed by ``data_bytes`` bytes."""
    claims = parse_object(raw, where)
    claims.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for name, claim in claims.items():
        wrong = _wrong(name, claim)
        if wrong:
            problems.append(Problem(f"{where}: {name[:80]!r}", wrong))
            if len(problems) >= _MOST_PROBLEMS:
                break
        else:
            entries[name] = Entry(claim["dtype"], tuple(claim["shape"]), *claim["data_offsets"])
    problems = problems or _gaps(entries, data_bytes, where)
    if problems:
        raise ConversionError(*problems)
    return entries


def _wrong(name: str, claim: Any) -> str:
    """What is wrong with one entry, by itself; nothing if it can be believed."""
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()):
        return f"a name has 1 to {_LONGEST_NAME} printable characters"
    if not isinstance(claim, dict) or set(claim) != {"dtype", "shape", "data_offsets"}:
        return "an entry has dtype, shape and data_offsets, and nothing else"
    width, shape, offsets = WIDTHS.get(str(claim["dtype"])[:16]), claim["shape"], claim["data_offsets"]
    if width is None or not isinstance(claim["dtype"], str):
        return f"unknown dtype {str(claim['dtype'])[:40]!r}; known: {', '.join(WIDTHS)}"
    if not _whole_numbers(shape) or len(shape) > _MOST_DIMS:
        return f"shape must be up to {_MOST_DIMS} whole numbers of at least 0"
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "data_offsets must be two whole numbers, the first not beyond the second"
    if prod(shape) * width != offsets[1] - offsets[0]:
        return (
            f"shape {tuple(shape)} of {claim['dtype']} needs {prod(shape) * width} bytes, not {offsets[1] - offsets[0]}"
        )
    return ""


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _gaps(entries: dict[str, Entry], data_bytes: int, where: str) -> list[Problem]:
    """Tensors must follow one another: bytes that belong to two, or to none, mean that an offset lies."""
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != reached:
            what = "overlaps the tensor before it" if entry.start < reached else "leaves a gap before it"
            return [Problem(f"{where}: {name[:80]!r}", f"{what}: starts at byte {entry.start}, not {reached}")]
        reached = entry.stop
    if reached != data_bytes:
        return [Problem(where, f"its tensors take {reached} bytes, but {data_bytes} follow the header")]
    return []


class TensorFile:
    """A file that is open for reading and whose header has been checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_plain(path)
        try:
            self.entries, self._data = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[dict[str, Entry], int]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if size < 8 or length > size - 8 or length > MAX_HEADER:
            bound = min(max(size - 8, 0), MAX_HEADER)
            raise ConversionError(Problem(self.path.name, f"a header of {length} bytes; at most {bound} are possible"))
        raw = os.pread(self._descriptor, length, 8)
        return parse_header(raw, size - 8 - length, self.path.name), 8 + length

    def read(self, name: str, at: Sequence[int] = ()) -> Tensor:
        """The tensor, or the slice of it with these leading indices: only its bytes are read."""
        entry = self.entries[name]
        shape = entry.shape[len(at) :]
        size = prod(shape) * WIDTHS[entry.format]
        first = 0
        for index, extent in zip(at, entry.shape):
            first = first * extent + index
        return self._fetch(name, self._data + entry.start + first * size, size).view(FORMATS[entry.format]).view(shape)

    def raw(self, name: str, most: int = 1 << 23) -> Iterator[bytes]:
        """A tensor's bytes, in pieces."""
        entry = self.entries[name]
        for start in range(entry.start, entry.stop, most):
            yield os.pread(self._descriptor, min(most, entry.stop - start), self._data + start)

    def _fetch(self, name: str, start: int, size: int) -> Tensor:
        whole = torch.empty(size, dtype=torch.uint8)
        view, done = memoryview(whole.numpy()), 0  # type: ignore[arg-type]
        while done < size:
            got = os.preadv(self._descriptor, [view[done:]], start + done)
            if not got:
                raise ConversionError(Problem(f"{self.path.name}: {name!r}", f"ends after {done} of {size} bytes"))
            done += got
        return whole

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """How a file with these tensors, in this order, begins."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + nbytes(dtype, shape)
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return prod(shape) * dtype.itemsize


def as_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
