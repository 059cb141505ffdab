"""Tokenizers, and their use on text and JSONL files by several processes, with the same result for any number of them.

The input is split into tasks of about four megabytes, at positions that depend on the input alone: a long JSONL file by
byte ranges (a line belongs to the range in which it begins), small files several at a time. Workers read their ranges
themselves and return tokens; the main process writes them in the order of the input. Processes exchange only strings,
numbers and bytes.
"""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Protocol

import numpy as np

from moefold.data.byte_ranges import list_folder
from moefold.data.token_writers import TokenWriter
from moefold.errors import BackendError, DataError
from moefold.ops.engines import load_engine

BYTES = "bytes"
_USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
_TASK_BYTES = 4 << 20
_TASK_FILES = 256
_JSONL = (".jsonl", ".ndjson")
# Suffixes of the files that are taken from a folder, if not hidden; a file given by its path may have any.
_TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".js", ".ts", *_JSONL)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".parquet", ".arrow")

# (path, first byte, end byte) of lines of a JSONL file, or of a whole text file.
FileRange = tuple[str, int, int]
Task = tuple[FileRange, ...]


class Tokenizer(Protocol):
    """`end` is the end-of-document token, if there is one."""

    vocab_size: int
    end: int | None

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]: ...


class ByteTokenizer:
    """One token per byte; byte 0, which no text contains, ends a document."""

    vocab_size = 256
    end: int | None = 0

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]


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
            raise DataError(f"{file}: is not a tokenizer: {error}") from error
        # Saved padding or truncation settings would change documents.
        self._loaded.no_padding()
        self._loaded.no_truncation()
        self.vocab_size = self._size()
        self.end = self._end(str(file), end, needs_end)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        found = self._loaded.encode_batch([text.decode("utf-8") for text in texts], add_special_tokens=False)
        return [np.asarray(one.ids, np.int64) for one in found]

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
    """How text becomes tokens; all options that a worker needs."""

    tokenizer: str = "bytes"
    end_token: str | None = None
    append_end: bool = False
    jsonl_key: str = "text"

    def open(self) -> Tokenizer:
        return open_tokenizer(self.tokenizer, self.end_token, needs_end=self.append_end)


@dataclass(frozen=True)
class TaskResult:
    """Tokens of one task as raw bytes, lengths of its documents, number of empty documents, bytes of input."""

    tokens: bytes
    dtype: str
    sizes: list[int]
    num_empty: int
    num_bytes: int


def input_files(inputs: Sequence[str]) -> tuple[list[str], int]:
    """The given files and the text files of given folders, and the number of skipped files in these folders."""
    found: list[str] = []
    num_skipped = 0
    for path in inputs:
        names = list_folder(path)
        if names is None:
            found.append(path)
            continue
        texts = [name for name in names if name.endswith(_TEXTS) and not f"/{name}".count("/.")]
        if not texts:
            raise DataError(
                f"{path}: none of its {len(names):,} files ends in {', '.join(_TEXTS)}; give the files themselves"
            )
        num_skipped += len(names) - len(texts)
        found += [f"{path.rstrip('/')}/{name}" for name in texts]
    for path in found:
        if path.endswith(_COMPRESSED):
            raise DataError(f"{path}: is compressed; unpack it to text or JSONL first")
        if not os.path.isfile(path):
            raise DataError(f"{path}: there is no such file or folder")
    return found, num_skipped


def split_tasks(files: Iterable[str]) -> Iterator[Task]:
    """Tasks in the order of the input; where it is split depends on the input alone."""
    waiting: list[FileRange] = []
    for path in files:
        size = os.path.getsize(path)
        step = _TASK_BYTES if path.endswith(_JSONL) else max(1, size)
        for first in range(0, size, step):
            file_range = (path, first, min(first + step, size))
            num_bytes = sum(end - start for _, start, end in waiting)
            if waiting and (num_bytes + file_range[2] - first > _TASK_BYTES or len(waiting) == _TASK_FILES):
                yield tuple(waiting)
                waiting = []
            waiting.append(file_range)
    if waiting:
        yield tuple(waiting)


def tokenize(
    tasks: Sequence[Task], options: TokenizeOptions, writer: TokenWriter, workers: int
) -> Iterator[TaskResult]:
    """Write all documents; yields each task's result after its documents have been written."""
    if workers > 1 and len(tasks) > 1:
        results = _run_in_pool(tasks, options, workers)
    else:
        tokenizer = options.open()
        results = (run_task(task, options, tokenizer) for task in tasks)
    for result in results:
        writer.add_many(np.frombuffer(result.tokens, result.dtype), result.sizes)
        yield result


def run_task(task: Task, options: TokenizeOptions, tokenizer: Tokenizer) -> TaskResult:
    texts = [text for file_range in task for text in _texts(file_range, options.jsonl_key)]
    kept = [text for text in texts if text]
    try:
        documents = tokenizer.encode(kept)
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"{task[0][0]} to {task[-1][0]}: cannot be tokenized: {error}") from error
    # The smallest dtype, as these bytes are sent to the main process.
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = [np.asarray([tokenizer.end])] if options.append_end else []
    parts = [part.astype(dtype, copy=False) for document in documents if len(document) for part in (document, *end)]
    sizes = [len(document) + len(end) for document in documents if len(document)]
    joined = b"".join(part.tobytes() for part in parts)
    return TaskResult(joined, dtype.str, sizes, len(texts) - len(sizes), sum(after - first for _, first, after in task))


def _texts(file_range: FileRange, key: str) -> Iterator[bytes]:
    path, first, after = file_range
    try:
        with open(path, "rb") as file:
            if not path.endswith(_JSONL):
                yield _utf8(file.read(), path)
                return
            # A line that begins in the previous range belongs to that range.
            if first:
                file.seek(first - 1)
                file.readline()
            while (at := file.tell()) < after and (line := file.readline()):
                if line.strip():
                    yield _text_of_line(line, key, f"{path}: line at byte {at:,}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _utf8(text: bytes, path: str) -> bytes:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not text: byte {error.start:,} is not UTF-8") from error
    return text


def _text_of_line(line: bytes, key: str, where: str) -> bytes:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON: {error}") from error
    if not isinstance(found, dict) or key not in found:
        known = ", ".join(map(repr, islice(found, 8))) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise DataError(f"{where}: has no key {key!r}; it is {known}")
    if not isinstance(found[key], str):
        raise DataError(f"{where}: {key!r} is a {type(found[key]).__name__}, not text")
    try:
        return str(found[key]).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {key!r} has a lone surrogate at {error.start:,}") from error


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
