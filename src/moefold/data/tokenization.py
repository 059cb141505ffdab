"""Text and JSONL files into one token file, by several processes, with the same result for any number of them.

The input is cut into tasks of about four megabytes, always at the same places: a long JSONL file by byte ranges (a line
belongs to the range in which it begins), small files several at a time. Workers read their ranges themselves and return
tokens; the main process writes them in the order of the input. Only plain strings, numbers and bytes travel between.
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
from threading import Thread

import numpy as np

from moefold.data.byte_ranges import list_folder
from moefold.data.tokenizers import Tokenizer, open_tokenizer
from moefold.data.write import TokenWriter
from moefold.errors import DataError

_TASK_BYTES = 4 << 20
_TASK_FILES = 256
_JSONL = (".jsonl", ".ndjson")
# Of a folder, files with these endings and not hidden; a file that is named may have any.
_TEXTS = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".js", ".ts", *_JSONL)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".parquet", ".arrow")

# (path, first byte, byte after the last) of a JSONL file's lines, or of a whole text file.
Piece = tuple[str, int, int]
Task = tuple[Piece, ...]


@dataclass(frozen=True)
class Recipe:
    """How text becomes tokens; everything a worker needs to know."""

    tokenizer: str = "bytes"
    end_token: str | None = None
    append_end: bool = False
    jsonl_key: str = "text"

    def open(self) -> Tokenizer:
        return open_tokenizer(self.tokenizer, self.end_token, needs_end=self.append_end)


@dataclass(frozen=True)
class Done:
    """One task's tokens as raw bytes of a type, sizes of documents, how many were empty, how much text was read."""

    tokens: bytes
    dtype: str
    sizes: list[int]
    empty: int
    read: int


def input_files(inputs: Sequence[str]) -> tuple[list[str], int]:
    """Every file that is named, every text file of a folder that is named, and how many others lie there."""
    found: list[str] = []
    left_out = 0
    for path in inputs:
        names = list_folder(path)
        if names is None:
            found.append(path)
            continue
        texts = [name for name in names if name.endswith(_TEXTS) and not f"/{name}".count("/.")]
        if not texts:
            raise DataError(f"{path}: none of its {len(names):,} files ends in {', '.join(_TEXTS)}; name the files")
        left_out += len(names) - len(texts)
        found += [f"{path.rstrip('/')}/{name}" for name in texts]
    for path in found:
        if path.endswith(_PACKED):
            raise DataError(f"{path}: is packed; unpack it to text or JSONL first")
        if not os.path.isfile(path):
            raise DataError(f"{path}: there is no such file or folder")
    return found, left_out


def cut(files: Iterable[str]) -> Iterator[Task]:
    """The input in tasks, in order, at places that depend on the input alone."""
    waiting: list[Piece] = []
    for path in files:
        size = os.path.getsize(path)
        step = _TASK_BYTES if path.endswith(_JSONL) else max(1, size)
        for first in range(0, size, step):
            piece = (path, first, min(first + step, size))
            held = sum(end - start for _, start, end in waiting)
            if waiting and (held + piece[2] - first > _TASK_BYTES or len(waiting) == _TASK_FILES):
                yield tuple(waiting)
                waiting = []
            waiting.append(piece)
    if waiting:
        yield tuple(waiting)


def tokenize(tasks: Sequence[Task], recipe: Recipe, writer: TokenWriter, workers: int) -> Iterator[Done]:
    """Write everything; yields each task when its documents have been written."""
    if workers > 1 and len(tasks) > 1:
        results = _in_processes(tasks, recipe, workers)
    else:
        tokenizer = recipe.open()
        results = (run_task(task, recipe, tokenizer) for task in tasks)
    for done in results:
        writer.add_many(np.frombuffer(done.tokens, done.dtype), done.sizes)
        yield done


def run_task(task: Task, recipe: Recipe, tokenizer: Tokenizer) -> Done:
    texts = [text for piece in task for text in _texts(piece, recipe.jsonl_key)]
    kept = [text for text in texts if text]
    try:
        documents = tokenizer.encode(kept)
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"{task[0][0]} to {task[-1][0]}: cannot be tokenized: {error}") from error
    # As narrow as may be: this is what travels.
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = [np.asarray([tokenizer.end])] if recipe.append_end else []
    parts = [part.astype(dtype, copy=False) for document in documents if len(document) for part in (document, *end)]
    sizes = [len(document) + len(end) for document in documents if len(document)]
    joined = b"".join(part.tobytes() for part in parts)
    return Done(joined, dtype.str, sizes, len(texts) - len(sizes), sum(after - first for _, first, after in task))


def _texts(piece: Piece, key: str) -> Iterator[bytes]:
    path, first, after = piece
    try:
        with open(path, "rb") as file:
            if not path.endswith(_JSONL):
                yield _utf8(file.read(), path)
                return
            # A line that began in the range before is that range's.
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
        raise DataError(f"{path}: is not text: byte {error.start:,} is no UTF-8") from error
    return text


def _text_of_line(line: bytes, key: str, where: str) -> bytes:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is no JSON: {error}") from error
    if not isinstance(found, dict) or key not in found:
        known = ", ".join(map(repr, islice(found, 8))) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise DataError(f"{where}: has no key {key!r}; it is {known}")
    if not isinstance(found[key], str):
        raise DataError(f"{where}: {key!r} is a {type(found[key]).__name__}, not text")
    try:
        return str(found[key]).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {key!r} holds half a character (a lone surrogate) at {error.start:,}") from error


def _start_worker() -> None:
    # The main process answers Ctrl-C; and one thread per worker is what the number of workers means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A pool's workers wait for tasks for ever if the main process is killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# A worker opens its tokenizer once.
_tokenizer = lru_cache(maxsize=1)(Recipe.open)


def _work(task: Task, recipe: Recipe) -> Done:
    return run_task(task, recipe, _tokenizer(recipe))


def _in_processes(tasks: Iterable[Task], recipe: Recipe, workers: int) -> Iterator[Done]:
    """Results in order, with a bounded number of tasks under way, so that memory stays bounded too."""
    # What only opening can tell is better said here than by a worker that does not start.
    recipe.open()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    under_way: deque[Future[Done]] = deque()
    try:
        for task in tasks:
            under_way.append(pool.submit(_work, task, recipe))
            if len(under_way) >= 3 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker died, perhaps for lack of memory; use fewer with --workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
