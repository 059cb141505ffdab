"""What this machine has that decides what can run on it. Only looks; changes nothing and computes nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.ops.native.compile_c import compiler

# Instructions that moefold's speed on a CPU depends on, and for what; by their names in /proc/cpuinfo.
CPU_FEATURES = {
    "amx_tile": "matrix products in tiles",
    "amx_bf16": "bfloat16 products in tiles: several times the speed of float32",
    "avx512f": "vectors of 64 bytes",
    "avx512_bf16": "bfloat16 products without tiles",
    "avx2": "vectors of 32 bytes, the least that torch's CPU kernels are made for",
}
# Packages that backends or verbs ask for beyond the core dependencies.
PACKAGES = ("triton", "transformers", "tokenizers", "tensorboard", "wandb")
# Libraries that take the place of the C library's allocator, by a part of their file's name.
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


@dataclass(frozen=True)
class GpuInfo:
    name: str
    # Compute capability: (9, 0) is Hopper, (10, 0) is Blackwell.
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class HostInfo:
    torch: str
    # The version of CUDA that torch was built with; None for a CPU build.
    cuda: str | None
    cards: tuple[GpuInfo, ...]
    cpu: str
    cores: int
    threads: int
    cpu_features: frozenset[str]
    # The C library, or what stands in for its allocator.
    allocator: str
    malloc_trim_disabled: bool
    # Installed packages of PACKAGES and their versions.
    packages: dict[str, str]
    # What compiles C, if anything does.
    compiler: str | None
    gloo: bool
    nccl: bool

    @property
    def device(self) -> str:
        """Where a run would go if nobody says."""
        return "cuda" if self.cards else "cpu"


def probe_host() -> HostInfo:
    cpu, features = _cpu()
    allocator, keeps = _allocator()
    return HostInfo(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cards=tuple(_gpu_info(index) for index in range(torch.cuda.device_count())),
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        cpu_features=features,
        allocator=allocator,
        malloc_trim_disabled=keeps,
        packages={name: found for name in PACKAGES if (found := _version(name))},
        compiler=compiler(),
        gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=dist.is_available() and dist.is_nccl_available(),
    )


def _gpu_info(index: int) -> GpuInfo:
    found = torch.cuda.get_device_properties(index)
    return GpuInfo(found.name, (found.major, found.minor), found.total_memory)


def _cpu() -> tuple[str, frozenset[str]]:
    """Its name and its features of CPU_FEATURES; none where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    said: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    features = frozenset(said.get("flags", "").split()) & CPU_FEATURES.keys()
    return said.get("model name", platform.machine()), features


def _allocator() -> tuple[str, bool]:
    """Who hands out memory, and whether it can be told to keep what it has, as ``ops/malloc.py`` does."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        mapped = ""
    other = next((name for name in _ALLOCATORS if name in mapped), None)
    library, number = platform.libc_ver()
    return (other, False) if other else (f"{library} {number}".strip() or "unknown", library == "glibc")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
