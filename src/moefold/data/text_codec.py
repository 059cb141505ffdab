"""Text to tokens and back, and conversations to tokens by a model's own template: for generation and evaluation.

A tokenizer that came with a model is read by transformers, so that its special tokens and its chat template mean what
they mean there; no code of its folder is run. Models of a byte vocabulary need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from moefold.data.tokenization import BYTES
from moefold.errors import BackendError, DataError
from moefold.ops.engines import load_engine

Message = dict[str, str]


class TextCodec(Protocol):
    """`stop`: tokens that end a text."""

    vocab_size: int
    stop: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The conversation, and what announces the assistant's next words."""
        ...


class ByteCodec:
    """One token per byte of UTF-8; byte 0 ends a text, as in `moefold tokenize`."""

    vocab_size = 256
    stop = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Message]) -> list[int]:
        raise DataError("a byte vocabulary has no chat template; leave out --chat, or give --tokenizer DIR")


class FolderCodec:
    """A folder that transformers' AutoTokenizer reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            transformers = load_engine("transformers")
        except BackendError as error:
            raise DataError(f"{folder}: a tokenizer needs {error}") from error
        try:
            self._loaded = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library raises many kinds
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"{folder}: transformers reads no tokenizer here: {first[:200]}; a folder with tokenizer.json and "
                "tokenizer_config.json works"
            ) from error
        self.vocab_size = len(self._loaded)
        end = self._loaded.eos_token_id
        self.stop = frozenset() if end is None else frozenset({int(end)})

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._loaded(text)["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._loaded.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if not self._loaded.chat_template:
            raise DataError(
                f"{self.folder}: its tokenizer has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); leave out --chat to continue plain text"
            )
        text = self._loaded.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        return [int(token) for token in self._loaded(text, add_special_tokens=False)["input_ids"]]


def open_codec(asked: str | None, came_with: Path | None, vocab_size: int) -> TextCodec:
    """``asked``: `bytes` or a folder; None is what came with the model, or bytes if its vocabulary is just that."""
    if asked == BYTES or (asked is None and came_with is None and vocab_size == ByteCodec.vocab_size):
        codec: TextCodec = ByteCodec()
    elif asked is not None or came_with is not None:
        folder = Path(asked) if asked is not None else came_with
        assert folder is not None
        if not folder.is_dir():
            raise DataError(
                f"--tokenizer {folder}: there is no such folder; give one with tokenizer.json, or `{BYTES}`"
            )
        codec = FolderCodec(folder)
    else:
        raise DataError(
            f"the model has {vocab_size:,} tokens and no tokenizer beside it; give --tokenizer DIR with tokenizer.json"
        )
    if codec.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {codec.vocab_size:,} tokens, but the model only {vocab_size:,}: it is another model's; "
            "give --tokenizer DIR"
        )
    return codec


def read_text(path: Path) -> str:
    """A file of UTF-8, with a message for everything else."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line = before.count(b"\n") + 1
        raise DataError(
            f"{path}: line {line:,} is not UTF-8 (byte {error.start:,} is 0x{error.object[error.start]:02x}); "
            "convert it, for example with `iconv -f latin1 -t utf-8`"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; give the path of a text file") from error
