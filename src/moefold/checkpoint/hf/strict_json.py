"""JSON from a stranger -> plain data, or a typed error: bounded in size, no key twice, no NaN, UTF-8 only."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from moefold.errors import ConversionError, Problem

MAX_CONFIG_BYTES = 1 << 20


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The one JSON object in ``raw``."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        raise ConversionError(Problem(where, "nested too deep for what it is")) from None
    except ValueError as error:
        raise ConversionError(Problem(where, f"not JSON: {str(error)[:200]}")) from None
    if not isinstance(value, dict):
        raise ConversionError(Problem(where, f"a JSON object is expected, not a {type(value).__name__}"))
    return value


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a small, plain file."""
    with os.fdopen(open_plain(path), "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ConversionError(Problem(path.name, f"larger than {limit:,} bytes", "this is not such a file"))
    return parse_object(raw, path.name)


def open_plain(path: Path) -> int:
    """A descriptor for reading; links, pipes and folders are refused, so a name cannot lead out of its directory."""
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
        raise ConversionError(Problem(path.name, "is not a plain file"))
    return descriptor


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)[:60]!r} stands there twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")
