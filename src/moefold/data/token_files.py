"""Readers of token files: documents by number, and windows of the stream that the documents form.

Three formats: a Megatron pair `.bin` + `.idx`; an OLMo `.npy`, which is an array of tokens with or without numpy's
header (OLMo's own have none: the dtype is then the smaller of uint16 and uint32 that holds the vocabulary, unless it is
given); and tokens in memory. Only a Megatron pair stores where documents begin. In an `.npy`, a document begins after
each end-of-document token if that is given; otherwise the file is one document.

Beside a Megatron pair may lie `PREFIX.loss_mask.bin`, one byte per token: 1 for a token that counts in the loss when it
is a label, 0 for one that is only read. Without it every token counts.
"""

from __future__ import annotations

import re
from functools import cached_property
from hashlib import sha256
from typing import Protocol

import numpy as np

from moefold.data.block_hashes import FilePart
from moefold.data.byte_ranges import ByteFile, exists, is_url, open_byte_file, sampled_digest
from moefold.data.megatron_index import open_index
from moefold.errors import DamagedDataError, DataError

LOSS_MASK = ".loss_mask.bin"
ORIGIN = ".origin.json"
_NPY_MAGIC = b"\x93NUMPY"
_NPY_DESCRIPTION = re.compile(
    rb"\{'descr': '([<>|][a-zA-Z]\d{0,4})', 'fortran_order': (?:True|False), 'shape': \(([-\d, ]{0,99})\),? *\} *\n"
)
_ONE_DIM = re.compile(r"\d{1,18},")
# numpy's own limit for the description.
_MAX_NPY_HEADER = 10_000 + 12
_SCAN = 1 << 22
# If each of this many leading tokens is followed by a zero, the file has items of twice the size.
_DTYPE_CHECK_TOKENS = 256


class TokenFile(Protocol):
    """A reader; positions are in tokens of the file's stream."""

    name: str
    # Whether the file stores where its documents are; if not, it must be read once to find them.
    has_index: bool
    # Whether some of its tokens may not count in the loss.
    has_loss_mask: bool
    # The files that are read, whose blocks have hashes; none for tokens in memory.
    parts: tuple[FilePart, ...]

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_documents(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hash of the size, the index and a few samples; changes when the file is replaced."""

    def window(self, start: int, length: int) -> np.ndarray: ...

    def loss_mask(self, start: int, length: int) -> np.ndarray:
        """bool[length]: True where the token counts in the loss."""

    def document(self, number: int) -> np.ndarray: ...

    def document_at(self, token: int) -> int: ...

    def document_span(self, number: int) -> tuple[int, int]: ...

    def document_bounds(self, first: int, after: int) -> np.ndarray:
        """Where documents `first` to `after` - 1 begin, and where the last of them ends."""

    def document_starts_in(self, start: int, length: int) -> np.ndarray: ...


class MegatronFile:
    """PREFIX.bin and PREFIX.idx, and PREFIX.loss_mask.bin if there is one."""

    has_index = True

    def __init__(self, prefix: str) -> None:
        self.name = prefix
        index, self._tokens = open_byte_file(prefix + ".idx"), open_byte_file(prefix + ".bin")
        self.index = open_index(index, self._tokens.size)
        self._loss_mask = self._open_loss_mask(prefix + LOSS_MASK)
        self.has_loss_mask = self._loss_mask is not None
        samples = 2 if is_url(prefix) else 4
        files = [index, self._tokens, *([] if self._loss_mask is None else [self._loss_mask])]
        endings = ((".idx", 0), (".bin", self.index.dtype.itemsize), (LOSS_MASK, 1))
        self.parts = tuple(
            FilePart(ending, file.name, file.size, 0, item) for (ending, item), file in zip(endings, files)
        )
        self.digest = sha256("".join(sampled_digest(file, samples) for file in files).encode()).hexdigest()

    @property
    def num_tokens(self) -> int:
        return self.index.num_tokens

    @property
    def num_documents(self) -> int:
        return self.index.num_documents

    def window(self, start: int, length: int) -> np.ndarray:
        return _read(self._tokens, self.index.dtype, 0, start, length)

    def loss_mask(self, start: int, length: int) -> np.ndarray:
        if self._loss_mask is None:
            return np.ones(length, bool)
        found = _read(self._loss_mask, np.dtype(np.uint8), 0, start, length)
        if length and found.max() > 1:
            at = int(np.argmax(found > 1))
            raise DamagedDataError(
                f"{self._loss_mask.name}: token {start + at:,} has {found[at]}; a loss mask holds 0 or 1"
            )
        return found.astype(bool)

    def _open_loss_mask(self, path: str) -> ByteFile | None:
        if not exists(path):
            return None
        mask = open_byte_file(path)
        if mask.size != self.num_tokens:
            raise DataError(
                f"{path}: a loss mask of {mask.size:,} bytes, but {self.name}.bin has {self.num_tokens:,} tokens; a "
                "mask has one byte per token, so this one belongs to other tokens or was not completely copied"
            )
        return mask

    def document(self, number: int) -> np.ndarray:
        start, end = self.index.document_span(number)
        return self.window(start, end - start)

    def document_at(self, token: int) -> int:
        return self.index.document_at(token)

    def document_span(self, number: int) -> tuple[int, int]:
        return self.index.document_span(number)

    def document_bounds(self, first: int, after: int) -> np.ndarray:
        return self.index.document_bounds(first, after)

    def document_starts_in(self, start: int, length: int) -> np.ndarray:
        return self.index.document_starts_in(start, length)


class _UnindexedFile:
    """Documents of a stream without an index: found by the token that ends them."""

    has_index = False
    has_loss_mask = False
    parts: tuple[FilePart, ...] = ()
    name: str
    num_tokens: int
    end_of_document: int | None

    def window(self, start: int, length: int) -> np.ndarray:
        raise NotImplementedError

    def loss_mask(self, start: int, length: int) -> np.ndarray:
        return np.ones(length, bool)

    @property
    def num_documents(self) -> int:
        return len(self._starts)

    def document(self, number: int) -> np.ndarray:
        start, end = self.document_span(number)
        return self.window(start, end - start)

    def document_at(self, token: int) -> int:
        return int(np.searchsorted(self._starts, token, side="right")) - 1

    def document_span(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self.num_documents:
            raise DataError(f"{self.name}: no document {number:,}; there are {self.num_documents:,}")
        bounds = [*self._starts[number : number + 2].tolist(), self.num_tokens]
        return bounds[0], bounds[1]

    def document_bounds(self, first: int, after: int) -> np.ndarray:
        if not 0 <= first <= after <= self.num_documents:
            raise DataError(f"{self.name}: no documents {first:,} to {after:,}; there are {self.num_documents:,}")
        return np.append(self._starts, self.num_tokens)[first : after + 1]

    def document_starts_in(self, start: int, length: int) -> np.ndarray:
        """Reads only the window and the token before it."""
        first = np.zeros(1 if start == 0 and length else 0, np.int64)
        if self.end_of_document is None:
            return first
        before = max(0, start - 1)
        # After the window's last token, a document would begin outside of it.
        tokens = self.window(before, max(0, start + length - 1 - before))
        return np.concatenate([first, before + 1 + np.flatnonzero(tokens == self.end_of_document)])

    @cached_property
    def _starts(self) -> np.ndarray:
        """All document starts, from one pass over the file; not needed to read windows."""
        runs = range(0, self.num_tokens, _SCAN) if self.end_of_document is not None else range(0)
        found = [self.document_starts_in(at, min(_SCAN, self.num_tokens - at)) for at in runs]
        return np.concatenate(found) if found else np.zeros(min(1, self.num_tokens), np.int64)


class ArrayFile(_UnindexedFile):
    """An `.npy` file, with numpy's header or raw."""

    def __init__(
        self, path: str, vocab_size: int, dtype: str | None = None, end_of_document: int | None = None
    ) -> None:
        self.name, self.end_of_document = path, end_of_document
        self._tokens = open_byte_file(path)
        found = _npy_header(self._tokens)
        if found is not None:
            self._dtype, self._offset, self.num_tokens = found
        else:
            self._dtype, self._offset = np.dtype(dtype or raw_dtype(vocab_size)).newbyteorder("<"), 0
            self.num_tokens = self._count_raw(given=dtype is not None)
        self.parts = (FilePart(".npy", path, self._tokens.size, self._offset, self._dtype.itemsize),)
        self.digest = sampled_digest(self._tokens, 2 if is_url(path) else 4)

    def window(self, start: int, length: int) -> np.ndarray:
        return _read(self._tokens, self._dtype, self._offset, start, length)

    def _count_raw(self, given: bool) -> int:
        size, item = self._tokens.size, self._dtype.itemsize
        if size % item:
            raise DataError(f"{self.name}: {size:,} bytes are not a whole number of {self._dtype.name} tokens")
        head = self.window(0, min(size // item, _DTYPE_CHECK_TOKENS)) if not given else np.empty(0)
        if len(head) == _DTYPE_CHECK_TOKENS and item == 2 and not head[1::2].any() and head[::2].any():
            raise DataError(
                f"{self.name}: every second {self._dtype.name} of the first {_DTYPE_CHECK_TOKENS} is zero, as if "
                "the tokens were uint32; set the source's dtype"
            )
        return size // item


class MemoryFile(_UnindexedFile):
    """Tokens in memory, with the positions where documents begin."""

    end_of_document = None

    def __init__(self, name: str, tokens: np.ndarray, starts: np.ndarray) -> None:
        self.name, self.num_tokens = name, len(tokens)
        self._tokens, self._document_starts = tokens, starts

    @cached_property
    def digest(self) -> str:
        return sha256(self._tokens.tobytes()).hexdigest()

    def window(self, start: int, length: int) -> np.ndarray:
        _check_window(self.name, self.num_tokens, start, length)
        return self._tokens[start : start + length]

    def document_starts_in(self, start: int, length: int) -> np.ndarray:
        first, after = np.searchsorted(self._document_starts, (start, start + length))
        return self._document_starts[first:after]

    @cached_property
    def _starts(self) -> np.ndarray:
        return self._document_starts


def raw_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def open_token_file(
    path: str, vocab_size: int, dtype: str | None = None, end_of_document: int | None = None
) -> TokenFile:
    """The reader for a path that ends in `.npy`, or is that of a Megatron pair with or without its suffix."""
    if path.endswith(".npy"):
        return ArrayFile(path, vocab_size, dtype, end_of_document)
    return MegatronFile(path.removesuffix(".bin").removesuffix(".idx"))


def _read(source: ByteFile, dtype: np.dtype, offset: int, start: int, length: int) -> np.ndarray:
    _check_window(source.name, (source.size - offset) // dtype.itemsize, start, length)
    return np.frombuffer(source.read(offset + start * dtype.itemsize, length * dtype.itemsize), dtype)


def _check_window(name: str, num_tokens: int, start: int, length: int) -> None:
    if start < 0 or length < 0 or start + length > num_tokens:
        raise DataError(f"{name}: has {num_tokens:,} tokens, not {length:,} from {start:,}")


def _npy_header(source: ByteFile) -> tuple[np.dtype, int, int] | None:
    """Type, offset and number of the tokens; None if there is no header.

    numpy's own reader evaluates the description as a Python literal, which fails in many ways on malicious input. numpy
    always writes it in the same form, so only this form is accepted.
    """
    head = source.read(0, min(source.size, _MAX_NPY_HEADER))
    if not head.startswith(_NPY_MAGIC):
        return None
    long_header = head[6:7] != b"\x01"
    first = 12 if long_header else 10
    length = int.from_bytes(head[8:first], "little")
    if head[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00") or first + length > len(head):
        raise DataError(f"{source.name}: header: version {head[6:8].hex('.')} with a description of {length:,} bytes")
    text = head[first : first + length]
    found = _NPY_DESCRIPTION.fullmatch(text)
    if found is None:
        raise DataError(f"{source.name}: header: {text[:80]!r} does not describe an array of tokens")
    kind, shape = found[1].decode(), found[2].decode()
    if kind[1] not in "iu" or kind[2:] not in ("1", "2", "4", "8"):
        raise DataError(f"{source.name}: header: type {kind} is not an integer type")
    if not _ONE_DIM.fullmatch(shape):
        raise DataError(f"{source.name}: header: shape ({shape}); tokens have one dim")
    dtype, count = np.dtype(kind), int(shape.rstrip(","))
    expected = first + length + count * dtype.itemsize
    if source.size != expected:
        raise DataError(f"{source.name}: header: {count:,} tokens need {expected:,} bytes, there are {source.size:,}")
    return dtype, first + length, count
