"""From text to tokens: bytes, or a `tokenizer.json` through the tokenizers library, which is imported only then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from moefold.errors import DataError

BYTES = "bytes"
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """What tokenizing needs to know; `end` is the token after a document, if one is wanted."""

    vocab_size: int
    end: int | None

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]: ...


class ByteTokenizer:
    """One token per byte; zero, which no text contains, ends a document."""

    vocab_size = 256
    end: int | None = 0

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]


class FileTokenizer:
    """A `tokenizer.json`; it adds no special tokens of its own."""

    def __init__(self, path: str, end: str | None = None, needs_end: bool = False) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise DataError(
                f"{path}: a tokenizer.json needs the tokenizers library; pip install 'moefold[hf]', or use "
                f"--tokenizer {BYTES}"
            ) from error
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            self._loaded = Loaded.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain exceptions
            raise DataError(f"{file}: is no tokenizer: {error}") from error
        # Padding or truncation that was saved along would change documents.
        self._loaded.no_padding()
        self._loaded.no_truncation()
        self.vocab_size = self._size()
        self.end = self._end(str(file), end, needs_end)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        found = self._loaded.encode_batch([text.decode("utf-8") for text in texts], add_special_tokens=False)
        return [np.asarray(one.ids, np.int64) for one in found]

    def _size(self) -> int:
        # Numbers may have gaps, so the count of the vocabulary can be too small.
        return max(self._loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _end(self, path: str, given: str | None, needs_end: bool) -> int | None:
        names = (given,) if given is not None else _USUAL_ENDS
        known = (self._loaded.token_to_id(name) for name in names)
        found = next((number for number in known if number is not None), None)
        if found is None and (needs_end or given is not None):
            raise DataError(f"{path}: has no token {' or '.join(map(repr, names))}; name the one that ends a document")
        return None if found is None else int(found)


def open_tokenizer(name: str, end: str | None = None, needs_end: bool = False) -> Tokenizer:
    """`bytes`, a `tokenizer.json`, or a folder that holds one."""
    if name == BYTES:
        if end is not None:
            raise DataError(f"bytes have no token {end!r}; a document ends with byte 0")
        return ByteTokenizer()
    return FileTokenizer(name, end, needs_end)
