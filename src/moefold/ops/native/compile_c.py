"""Compile a C file of this package for this machine's CPU, once, and load it.

Kernels are compiled on the machine where they run, for its vector instructions. The library is kept in the user's cache
(`ops/compiled_cache.py`) under a hash of source, compiler, flags and CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from moefold.errors import BackendError
from moefold.ops.compiled_cache import load_library

# NaN and infinities keep their meaning everywhere.
_ALL = ("-O3", "-march=native", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
FLAGS = {
    # Sums may be reassociated for vectors.
    "glu": (*_ALL, "-fassociative-math", "-fno-signed-zeros"),
    # Every operation is rounded where it is written.
    "quantize": (*_ALL, "-ffp-contract=off"),
}


def compiler() -> str | None:
    """The path of the C compiler: $CC, or cc."""
    return shutil.which(os.environ.get("CC", "cc"))


@cache
def load(name: str) -> ctypes.CDLL:
    """The library compiled from ``name``.c; loaded once per process."""
    source = (Path(__file__).parent / f"{name}.c").read_bytes()
    command = compiler()
    if command is None:
        raise BackendError("kernels.backend: native needs a C compiler, and there is none (no cc, no $CC); use torch")
    fingerprint = _fingerprint(source, command, FLAGS[name])
    return load_library(f"{name}-{fingerprint}", lambda made: _compile(command, name, source, made))


def _fingerprint(source: bytes, command: str, flags: tuple[str, ...]) -> str:
    said = subprocess.run([command, "--version"], capture_output=True, check=False, process_group=0).stdout
    return hashlib.sha256(b"\0".join((source, said, " ".join(flags).encode(), _cpu()))).hexdigest()[:24]


def _cpu() -> bytes:
    """The CPU's name and flags, on which ``-march=native`` depends."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_bytes().splitlines() if listed.exists() else []
    flags = [line for line in lines if line.startswith((b"flags", b"Features", b"model name"))]
    return b"".join(flags[:2]) or platform.processor().encode()


def _compile(command: str, name: str, source: bytes, made: Path) -> None:
    text = made.with_name("source.c")
    text.write_bytes(source)
    words = [command, *FLAGS[name], "-o", str(made), str(text), "-lm"]
    # In its own process group: a signal that stops the run must not reach the compiler.
    done = subprocess.run(words, capture_output=True, check=False, process_group=0)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise BackendError(f"kernels.backend: {command} cannot compile {name}: {said[:400]}; use torch")
