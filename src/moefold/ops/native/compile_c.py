"""Compile a C file of this package for the CPU it runs on, once, and load it.

A kernel for vectors is worth having only for the vectors that are there, so it is compiled on the machine itself. What
comes out is kept in the user's cache under a name made of everything that went in: another source, compiler or CPU is
another file. A file gets its name when it is whole, so that ranks that start at once do not disturb each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from moefold.errors import BackendError

# Sums may be taken in the order that vectors like; numbers that are none and infinities keep their meaning.
FLAGS = (
    *("-O3", "-march=native", "-std=c11", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)


def compiler() -> str | None:
    """What compiles C here: $CC, or cc."""
    return shutil.which(os.environ.get("CC", "cc"))


@cache
def load(name: str) -> ctypes.CDLL:
    """The library made of ``name``.c; a process asks the compiler once."""
    source = (Path(__file__).parent / f"{name}.c").read_bytes()
    command = compiler()
    if command is None:
        raise BackendError("precision.kernels: native needs a C compiler, and there is none (no cc, no $CC); use torch")
    made = _cache() / f"{name}-{_fingerprint(source, command)}.so"
    if not made.exists():
        _compile(command, source, made)
    return ctypes.CDLL(str(made))


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moefold" / "native"
    # Only this user may put anything here that will be run.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _fingerprint(source: bytes, command: str) -> str:
    said = subprocess.run([command, "--version"], capture_output=True, check=False, process_group=0).stdout
    return hashlib.sha256(b"\0".join((source, said, " ".join(FLAGS).encode(), _cpu()))).hexdigest()[:24]


def _cpu() -> bytes:
    """What ``-march=native`` depends on."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_bytes().splitlines() if listed.exists() else []
    flags = [line for line in lines if line.startswith((b"flags", b"Features", b"model name"))]
    return b"".join(flags[:2]) or platform.processor().encode()


def _compile(command: str, source: bytes, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        text, out = Path(folder) / "source.c", Path(folder) / "out.so"
        text.write_bytes(source)
        words = [command, *FLAGS, "-o", str(out), str(text), "-lm"]
        # In a group of its own: a signal that asks the run to stop is not for the compiler.
        done = subprocess.run(words, capture_output=True, check=False, process_group=0)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise BackendError(f"precision.kernels: {command} cannot compile {made.stem}: {said[:400]}; use torch")
        out.replace(made)
