"""Probe the host for what decides which backends can run: GPUs, CPU features, packages, compiler. Read-only."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moefold.ops.engines import OPTIONAL, PACKAGES, installed_version
from moefold.ops.native.compile_c import compiler

# CPU instructions that moefold's speed depends on, and for what; by their names in /proc/cpuinfo.
CPU_FEATURES = {
    "amx_tile": "matmuls in tiles",
    "amx_bf16": "bfloat16 matmuls in tiles: several times the speed of float32",
    "avx512f": "vectors of 64 bytes",
    "avx512_bf16": "bfloat16 matmuls without tiles",
    "amx_fp16": "float16 matmuls in tiles",
    "avx512_fp16": "float16 matmuls without tiles",
    "avx2": "vectors of 32 bytes, the minimum for torch's CPU kernels",
}
# Libraries that replace the C library's allocator, by a part of their file name.
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


@dataclass(frozen=True)
class GpuInfo:
    name: str
    # Compute capability: (9, 0) is Hopper, (10, 0) is Blackwell.
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class HostInfo:
    # None where it is not installed; then nothing is known of GPUs.
    torch: str | None
    # The version of CUDA that torch was built with; None for a CPU build.
    cuda: str | None
    gpus: tuple[GpuInfo, ...]
    cpu: str
    cores: int
    threads: int
    cpu_features: frozenset[str]
    # The C library, or the library that replaces its allocator.
    allocator: str
    malloc_trim_disabled: bool
    # Installed packages of ``ops/engines.py`` and their versions.
    packages: dict[str, str]
    # The path of the C compiler; None without one.
    compiler: str | None
    gloo: bool
    nccl: bool

    @property
    def device(self) -> str:
        """The default device."""
        return "cuda" if self.gpus else "cpu"

    def version_of(self, package: str) -> str | None:
        """Of an installed package; None if it is not."""
        return self.torch if package == "torch" else self.packages.get(package)


def probe_host() -> HostInfo:
    """Also without torch, which is an extra of moefold: `moefold doctor` says what is missing."""
    cpu, features = cpu_name_and_features()
    allocator, trim_disabled = _allocator()
    return HostInfo(
        **_torch()._asdict(),
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_features=features,
        allocator=allocator,
        malloc_trim_disabled=trim_disabled,
        packages={name: found for name in PACKAGES if (found := installed_version(name))},
        compiler=compiler(),
    )


def package_rows(host: HostInfo) -> list[dict[str, str]]:
    """Every optional package: what is installed on this host, what is needed, and how to install it."""
    return [
        {
            "name": name,
            "package": engine.package,
            "installed": host.version_of(engine.package) or "no",
            "needs": engine.needs.removeprefix(engine.package).strip() or "any",
            "install": engine.install,
            "fits": "no" if engine.problem(host.version_of(engine.package)) else "yes",
        }
        for name, engine in OPTIONAL.items()
    ]


class _TorchInfo(NamedTuple):
    """The fields of HostInfo that torch knows, as they are where it is not installed."""

    torch: str | None = None
    cuda: str | None = None
    gpus: tuple[GpuInfo, ...] = ()
    threads: int = 0
    gloo: bool = False
    nccl: bool = False


def _torch() -> _TorchInfo:
    try:
        import torch
        import torch.distributed as dist
    except ModuleNotFoundError:
        return _TorchInfo()
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return _TorchInfo(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpus=tuple(GpuInfo(gpu.name, (gpu.major, gpu.minor), gpu.total_memory) for gpu in gpus),
        threads=torch.get_num_threads(),
        gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=dist.is_available() and dist.is_nccl_available(),
    )


def cpu_name_and_features() -> tuple[str, frozenset[str]]:
    """Its name and which of CPU_FEATURES it has; none where /proc/cpuinfo is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    features = frozenset(fields.get("flags", "").split()) & CPU_FEATURES.keys()
    return fields.get("model name", platform.machine()), features


def _allocator() -> tuple[str, bool]:
    """The allocator's name, and whether ``comm/spawn.py`` can disable its trimming."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        mapped = ""
    other = next((name for name in _ALLOCATORS if name in mapped), None)
    library, number = platform.libc_ver()
    return (other, False) if other else (f"{library} {number}".strip() or "unknown", library == "glibc")


def available_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """What can be allocated without swapping, as the kernel says, and no more than a container's limit leaves.

    None where neither is known.
    """
    found = [free for free in (_free_of_host(), _free_of_container(cgroup)) if free is not None]
    return min(found, default=None)


def _free_of_host() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return float(found[1]) * 1024 if found is not None and len(found) > 1 and found[1].isdecimal() else None


def _free_of_container(cgroup: Path) -> float | None:
    """Of cgroup v2; pages that cache files can be dropped, so they do not count as used."""
    try:
        limit, used = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    return float(limit) - max(0.0, float(used) - float(stat.get("file", "0")))
