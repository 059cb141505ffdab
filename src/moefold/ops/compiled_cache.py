"""The caches of compiled code, which is executed: ours, and those of torch's compiler and Triton.

Ours is `$XDG_CACHE_HOME/moefold/native`. A library's name has what it was made from and the hash of its content:

    glu-<source, compiler, flags and CPU>.<sha256 of the file>.so

so that one rename publishes both, ranks that compile at the same time do not disturb each other, and a file that was
damaged or changed is found and made again. The directory must be private (`private_files.py`), and so must be the file.

torch's compiler keeps its libraries in /tmp/torchinductor_USER unless told otherwise: a name that anybody can create
before the user does. So torch and Triton are given directories beside ours; a directory that the user has chosen is
taken if it is private.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from moefold.errors import BackendError
from moefold.private_files import UntrustedPathError, open_own, private_directory, who_else

# The variable that names a compiler's cache -> the directory beside ours.
COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_ELSEWHERE = "set XDG_CACHE_HOME to a directory of your own"


def cache_directory(name: str = "native") -> Path:
    """A private directory; raises a BackendError that names the one that is not."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _private(home / "moefold" / name, _ELSEWHERE)


def _private(path: Path, otherwise: str) -> Path:
    try:
        return private_directory(path)
    except UntrustedPathError as error:
        raise BackendError(f"{error}, or {otherwise}") from None


def use_private_compiler_caches() -> None:
    """Before something is compiled by torch or Triton."""
    for variable, name in COMPILER_CACHES.items():
        if chosen := os.environ.get(variable):
            _private(Path(chosen), f"set {variable} to a directory of your own")
        else:
            os.environ[variable] = str(cache_directory(name))


def load_library(stem: str, build: Callable[[Path], None], mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """The library of this name; ``build`` writes it to a path if there is none whose content is what its name says."""
    folder = cache_directory()
    path = _found(folder, stem)
    if path is None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "out.so"
            build(made)
            os.chmod(made, 0o700)
            path = folder / f"{stem}.{hashlib.sha256(made.read_bytes()).hexdigest()}.so"
            made.replace(path)
    return ctypes.CDLL(str(path), mode=mode)


def _found(folder: Path, stem: str) -> Path | None:
    for path in sorted(folder.glob(f"{stem}.*.so")):
        try:
            descriptor = open_own(path, os.O_RDONLY)
        except OSError:
            # A link, or something that is no file: never loaded.
            continue
        with open(descriptor, "rb") as file:
            trusted = who_else(os.fstat(descriptor)) is None
            if trusted and hashlib.sha256(file.read()).hexdigest() == path.name.split(".")[-2]:
                return path
    return None
