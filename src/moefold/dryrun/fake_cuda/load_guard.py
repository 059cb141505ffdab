"""Compile guard.cpp and load it. This must happen before torch is imported: torch reads its CUDA hooks once.

The library is kept in the user's cache under a hash of its source and of torch's version, like the CPU kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from moefold.errors import BackendError
from moefold.ops.compiled_cache import load_library

FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC")
_LOADED: list[ctypes.CDLL] = []


def load_guard() -> ctypes.CDLL:
    """The library; compiled at the first use on a machine (about ten seconds), loaded once per process."""
    if not _LOADED:
        if "torch" in sys.modules:
            raise BackendError("fake CUDA must be loaded before torch is imported; start it in a process of its own")
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        _LOADED.append(_typed(load_library(_stem(), _compile, ctypes.RTLD_GLOBAL)))
    return _LOADED[0]


def is_loaded() -> bool:
    return bool(_LOADED)


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BackendError("fake CUDA needs torch, which is not installed")
    return Path(found.origin).parent


def _stem() -> str:
    source = Path(__file__).with_name("guard.cpp").read_bytes()
    said = b"\0".join((source, version("torch").encode(), " ".join(FLAGS).encode()))
    return f"fake-cuda-{hashlib.sha256(said).hexdigest()[:24]}"


def _compile(made: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise BackendError("fake CUDA needs a C++ compiler, and there is none (no g++, no $CXX)")
    include = _torch() / "include"
    words = [compiler, *FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", "-o", str(made)]
    words += [str(Path(__file__).with_name("guard.cpp")), f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise BackendError(f"{compiler} cannot compile the CUDA guard for torch {version('torch')}: {said[:400]}")


def _typed(guard: ctypes.CDLL) -> ctypes.CDLL:
    number, count = ctypes.c_int64, ctypes.c_uint64
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "device": (ctypes.c_int, []),
        "set_device": (None, [ctypes.c_int]),
        "stream": (number, [ctypes.c_int]),
        "set_stream": (None, [number]),
        "new_stream": (number, [ctypes.c_int]),
        "launch": (count, [number]),
        "finished": (count, [number, number]),
        "record": (number, [number]),
        "wait": (None, [number, number]),
        "host_wait": (None, [number]),
        "forget": (None, [number]),
        "reset": (None, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(guard, f"fake_cuda_{name}")
        function.restype, function.argtypes = result, arguments
    return guard
