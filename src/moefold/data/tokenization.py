"""Tokenizers, and their use on rows by several processes, with the same result for any number of them.

`input_rows.py` cuts the input into tasks of about four megabytes. Workers read their part of the input themselves and
return tokens; the main process writes them in the order of the input. Processes exchange only strings, numbers and
bytes. What a row becomes is a table, `ENCODERS`: a text is a document; a conversation is a document with a loss mask;
a preference pair is two, document 2i the chosen and 2i + 1 the rejected one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, takewhile
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Literal, Protocol

import numpy as np

from moefold.data.chat import ASSISTANT, ChatTokenizer, Conversation, Encoded, Message
from moefold.data.input_rows import CHAT_COLUMNS, Row, Task, rows_of, text_of, value_of
from moefold.data.token_writers import TokenWriter
from moefold.errors import BackendError, DataError
from moefold.ops.engines import load_engine

BYTES = "bytes"
Kind = Literal["text", "chat", "preference"]
_USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """`end` is the end-of-document token, if there is one."""

    vocab_size: int
    end: int | None

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per byte; byte 0, which no text contains, ends a document."""

    vocab_size = 256
    end: int | None = 0

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class FileTokenizer:
    """A `tokenizer.json`, read by the tokenizers library, which is imported only then; special tokens are not added."""

    def __init__(self, path: str, end: str | None = None, needs_end: bool = False) -> None:
        try:
            library = load_engine("tokenizers")
        except BackendError as error:
            raise DataError(f"{path}: a tokenizer.json needs {error}; or use --tokenizer {BYTES}") from error
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            self._loaded = library.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain exceptions
            raise DataError(
                f"{file}: is not a tokenizer: {error}; give a tokenizer.json, a folder that has one, or `{BYTES}`"
            ) from error
        # Saved padding or truncation settings would change documents.
        self._loaded.no_padding()
        self._loaded.no_truncation()
        self.vocab_size = self._size()
        self.end = self._end(str(file), end, needs_end)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        found = self._loaded.encode_batch([text.decode("utf-8") for text in texts], add_special_tokens=False)
        return [np.asarray(one.ids, np.int64) for one in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._loaded.decode(list(ids), skip_special_tokens=False))

    def _size(self) -> int:
        # Ids may have gaps, so the number of tokens can be too small.
        return max(self._loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _end(self, path: str, given: str | None, needs_end: bool) -> int | None:
        names = (given,) if given is not None else _USUAL_END_TOKENS
        known = (self._loaded.token_to_id(name) for name in names)
        found = next((number for number in known if number is not None), None)
        if found is None and (needs_end or given is not None):
            raise DataError(
                f"{path}: has no token {' or '.join(map(repr, names))}; give the token that ends a document"
            )
        return None if found is None else int(found)


def open_tokenizer(name: str, end: str | None = None, needs_end: bool = False) -> Tokenizer:
    """`bytes`, a `tokenizer.json`, or a folder that holds one."""
    if name == BYTES:
        if end is not None:
            raise DataError(f"the byte tokenizer has no token {end!r}; a document ends with byte 0")
        return ByteTokenizer()
    return FileTokenizer(name, end, needs_end)


@dataclass(frozen=True)
class TokenizeOptions:
    """How rows become tokens; all options that a worker needs."""

    tokenizer: str = "bytes"
    end_token: str | None = None
    append_end: bool = False
    jsonl_key: str = "text"
    kind: Kind = "text"
    # Conversations: the roles that count in the loss, and a template in place of the tokenizer's own.
    loss_on: tuple[str, ...] = (ASSISTANT,)
    chat_template: str | None = None

    def open(self) -> Tokenizer | ChatTokenizer:
        if self.kind == "text":
            return open_tokenizer(self.tokenizer, self.end_token, needs_end=self.append_end)
        if self.tokenizer == BYTES:
            raise DataError(f"{self.kind} data needs --tokenizer FOLDER: a model's folder with its chat template")
        return ChatTokenizer(self.tokenizer, self.loss_on, self.chat_template)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.jsonl_key,) if self.kind == "text" else CHAT_COLUMNS


def tokenizer_sha256(name: str) -> str | None:
    """Of the tokenizer.json; None for bytes."""
    if name == BYTES:
        return None
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class TaskResult:
    """Tokens of one task as raw bytes, lengths of its documents, number of empty documents, bytes of input.

    ``loss_mask`` has a byte per token; None if all tokens count.
    """

    tokens: bytes
    dtype: str
    sizes: list[int]
    num_empty: int
    num_bytes: int
    loss_mask: bytes | None = None


def tokenize(
    tasks: Iterable[Task], options: TokenizeOptions, writer: TokenWriter, workers: int
) -> Iterator[TaskResult]:
    """Write all documents; yields each task's result after its documents have been written."""
    tasks = iter(tasks)
    first = list(islice(tasks, 2))
    if workers > 1 and len(first) > 1:
        results = _run_in_pool(chain(first, tasks), options, workers)
    else:
        tokenizer = options.open()
        results = (run_task(task, options, tokenizer) for task in chain(first, tasks))
    for result in results:
        mask = None if result.loss_mask is None else np.frombuffer(result.loss_mask, np.uint8)
        writer.add_many(np.frombuffer(result.tokens, result.dtype), result.sizes, mask)
        yield result


def run_task(task: Task, options: TokenizeOptions, tokenizer: Tokenizer | ChatTokenizer) -> TaskResult:
    rows = [row for chunk in task for row in rows_of(chunk, options.columns)]
    documents, masks = ENCODERS[options.kind](rows, options, tokenizer)
    # The smallest dtype, as these bytes are sent to the main process.
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    kept = [document for document in documents if len(document)]
    return TaskResult(
        b"".join(document.astype(dtype, copy=False).tobytes() for document in kept),
        dtype.str,
        [len(document) for document in kept],
        len(documents) - len(kept),
        sum(chunk.num_bytes for chunk in task),
        None if masks is None else b"".join(mask.astype(np.uint8).tobytes() for mask in masks),
    )


# Documents, some of them empty, and their loss masks.
Documents = tuple[list[np.ndarray], list[np.ndarray] | None]


def encode_texts(rows: Sequence[Row], options: TokenizeOptions, tokenizer: Tokenizer) -> Documents:
    key = options.jsonl_key
    texts = [row.value if isinstance(row.value, bytes) else text_of(value_of(row, key), row, key) for row in rows]
    kept = [text for text in texts if text]
    try:
        documents = tokenizer.encode(kept)
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"{rows[0].where()} to {rows[-1].where()}: cannot be tokenized: {error}") from error
    if options.append_end and tokenizer.end is not None:
        documents = [np.append(each, tokenizer.end) if len(each) else each for each in documents]
    return documents + [np.zeros(0, np.int64)] * (len(texts) - len(kept)), None


def encode_chats(rows: Sequence[Row], options: TokenizeOptions, tokenizer: ChatTokenizer) -> Documents:
    found = []
    for row in rows:
        _refuse_text(row)
        messages = _messages(value_of(row, "messages"), row, "messages")
        encoded = _encode_chat(tokenizer, Conversation(messages, _tools(row)), row)
        if not encoded.loss_mask.any():
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise DataError(
                f"{row.where()}: no token counts in the loss: the conversation has {roles}, and --loss-on has "
                f"{', '.join(options.loss_on)}"
            )
        found.append(encoded)
    return [each.ids for each in found], [each.loss_mask for each in found]


def encode_pairs(rows: Sequence[Row], options: TokenizeOptions, tokenizer: ChatTokenizer) -> Documents:
    found: list[Encoded] = []
    for row in rows:
        _refuse_text(row)
        both = [value_of(row, "chosen"), value_of(row, "rejected")]
        if both[0] == both[1]:
            raise DataError(f"{row.where()}: 'chosen' and 'rejected' are the same")
        if all(isinstance(each, str) for each in both):
            pair = [_encode_answer(tokenizer, row, key) for key in ("chosen", "rejected")]
        else:
            pair = [_encode_chat(tokenizer, chat, row) for chat in _pair(row)]
        for key, encoded in zip(("chosen", "rejected"), pair):
            if not encoded.loss_mask.any():
                raise DataError(f"{row.where()}: {key!r}: no token counts in the loss; it needs an assistant's message")
        found += pair
    return [each.ids for each in found], [each.loss_mask for each in found]


ENCODERS: dict[Kind, Callable[..., Documents]] = {
    "text": encode_texts,
    "chat": encode_chats,
    "preference": encode_pairs,
}


def _encode_chat(tokenizer: ChatTokenizer, chat: Conversation, row: Row) -> Encoded:
    try:
        return tokenizer.encode_chat(chat)
    except DataError as error:
        raise DataError(f"{row.where()}: {error}") from error


def _encode_answer(tokenizer: ChatTokenizer, row: Row, key: str) -> Encoded:
    """A prompt and an answer as plain text; the prompt's tokens are the same for both answers."""
    if tokenizer.end is None:
        raise DataError(f"{row.where()}: the tokenizer has no token that ends a text; give messages instead")
    prompt, answer = (text_of(value_of(row, name), row, name).decode() for name in ("prompt", key))
    before, after = tokenizer.encode_text(prompt), np.append(tokenizer.encode_text(answer), tokenizer.end)
    mask = np.arange(len(before) + len(after)) >= len(before)
    return Encoded(np.concatenate([before, after]), mask & bool(answer))


def _pair(row: Row) -> list[Conversation]:
    """Both conversations; the messages that they share are the prompt, whose tokens do not count."""
    assert isinstance(row.value, dict)
    given = row.value.get("prompt")
    prompt = [] if given is None else _messages(given, row, "prompt")
    both = [prompt + _messages(value_of(row, key), row, key) for key in ("chosen", "rejected")]
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*both))))
    return [Conversation(messages, _tools(row), shared) for messages in both]


def _messages(value: object, row: Row, key: str) -> list[Message]:
    """A list of objects with roles. Absent values, which tables have for every key of any row, are left out."""
    found = _from_json(value, row, key)
    if not isinstance(found, list) or not found:
        raise DataError(f"{row.where()}: {key!r} is a {type(value).__name__}, not a list of messages")
    messages = []
    for number, message in enumerate(found):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{row.where()}: {key!r}: message {number} has no role; it is {str(message)[:80]}")
        messages.append({name: each for name, each in message.items() if each is not None or name == "content"})
    return messages


def _tools(row: Row) -> list[Message] | None:
    assert isinstance(row.value, dict)
    found = _from_json(row.value.get("tools"), row, "tools")
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise DataError(f"{row.where()}: 'tools' is not a list of objects")
    return found


def _from_json(value: object, row: Row, key: str) -> object:
    """Tables often hold lists of objects as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{row.where()}: {key!r} is text, and not JSON: {error}") from error


def _refuse_text(row: Row) -> None:
    if isinstance(row.value, bytes):
        raise DataError(f"{row.where()}: is a text, not rows of messages; give .jsonl or .parquet")


def _start_worker() -> None:
    # Ctrl-C is handled by the main process. One thread per worker, as --workers says.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this, a pool's workers wait for tasks forever if the main process is killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# A worker opens its tokenizer once.
_tokenizer = lru_cache(maxsize=1)(TokenizeOptions.open)


def _run_in_worker(task: Task, options: TokenizeOptions) -> TaskResult:
    return run_task(task, options, _tokenizer(options))


def _run_in_pool(tasks: Iterable[Task], options: TokenizeOptions, workers: int) -> Iterator[TaskResult]:
    """Results in order; the number of pending tasks is bounded, and so is memory."""
    # Raises errors of the options here instead of in the workers.
    options.open()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    pending: deque[Future[TaskResult]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(_run_in_worker, task, options))
            if len(pending) >= 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker died, perhaps for lack of memory; use fewer with --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
