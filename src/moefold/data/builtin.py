"""A corpus that every machine has: the source of Python's own standard library, one token per byte.

Each module is a document, followed by a zero byte, which no source file contains; so a vocabulary of 256 suffices.
About one file in sixteen, chosen by a hash of its name, is kept for validation. For a given Python the corpus is always
the same: files are sorted by name, and what differs between installations (tests, packages, generated and platform
files) is left out.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from moefold.data.tokens import MemoryFile
from moefold.errors import DataError

END = b"\x00"
_LARGEST_FILE = 1 << 18
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
    | {"pydoc_data", "lib-dynload", "sitecustomize.py", "usercustomize.py", "__phello__"}
)


def builtin_corpus(validation: bool, root: Path | None = None) -> MemoryFile:
    """The corpus, or the files kept from it."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for name in _names(root):
        if _is_validation(name) == validation:
            try:
                text = (root / name).read_bytes()
            except OSError as error:
                raise DataError(f"{root / name}: the builtin corpus cannot be read: {error.strerror}") from error
            if 0 < len(text) <= _LARGEST_FILE and END not in text:
                texts.append(text + END)
    if not texts:
        raise DataError(f"{root}: no source of the standard library; this Python came without it, so name token files")
    starts = np.cumsum([0, *map(len, texts[:-1])])
    return MemoryFile("builtin", np.frombuffer(b"".join(texts), np.uint8), starts)


def _names(root: Path) -> list[str]:
    found = []
    for top, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        kept = (name for name in files if name.endswith(".py") and name not in _LEFT_OUT)
        # Written when Python was built, different on each platform.
        found += [Path(top, name).relative_to(root).as_posix() for name in kept if not name.startswith("_sysconfig")]
    return sorted(found)


def _is_validation(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 16
