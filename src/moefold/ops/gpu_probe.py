"""Probe GPUs, their links and the settings that slow them down; read-only, and without GPUs it says what is missing.

What torch does not say comes from `nvidia-smi` (driver, link matrix), from `/sys/class/infiniband` (adapters and their
rated speed) and from `/sys/module` (GPUDirect). Settings that slow NCCL down are a table, `SLOW_SETTINGS`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.ops.host_probe import GpuInfo, HostInfo

_SECONDS = 20.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SYS = Path("/sys")
# How near an adapter is to a GPU in `nvidia-smi topo -m`, nearest first.
_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Adapter:
    """A network adapter for RDMA, as the kernel describes its first port."""

    name: str
    # As rated: "400 Gb/sec (4X NDR)".
    rate: str
    state: str
    link_layer: str


@dataclass(frozen=True)
class Topology:
    """The link matrix of this host, by names such as GPU0 and NIC0."""

    links: dict[str, dict[str, str]]

    @property
    def gpus(self) -> list[str]:
        return [name for name in self.links if name.startswith("GPU")]

    @property
    def nvlink_domains(self) -> list[list[str]]:
        """Sets of GPUs that NVLink connects, directly or through each other; GPUs without NVLink are not in any."""
        domains: list[list[str]] = []
        for gpu in self.gpus:
            peers = {peer for peer in self.gpus if self.links[gpu].get(peer, "").startswith("NV")}
            if not peers:
                continue
            joined = [domain for domain in domains if peers & set(domain)]
            merged = [*(name for domain in joined for name in domain), gpu]
            domains = [domain for domain in domains if domain not in joined] + [list(dict.fromkeys(merged))]
        return domains

    def nearest_adapter(self, gpu: str) -> tuple[str, str] | None:
        """(adapter, distance) of the adapter that is fewest hops away."""
        found = [(name, way) for name, way in self.links[gpu].items() if name.startswith(("NIC", "mlx"))]
        ranked = [(_DISTANCES.index(way), name, way) for name, way in found if way in _DISTANCES]
        return min(ranked)[1:] if ranked else None


@dataclass(frozen=True)
class Finding:
    """Something that is missing or slow, and what to do about it."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class GpuReport:
    gpus: tuple[GpuInfo, ...]
    cuda: str | None
    driver: str | None
    nccl: str | None
    # The text of `nvidia-smi topo -m`, and the same as data.
    topology_text: str | None
    topology: Topology | None
    adapters: tuple[Adapter, ...]
    missing: tuple[Finding, ...]
    warnings: tuple[Finding, ...]


# ---- settings that slow NCCL or torch down ----


@dataclass(frozen=True)
class SlowSetting:
    """A variable with one of these values; no values means any."""

    name: str
    values: tuple[str, ...]
    why: str
    fix: str = "unset it, unless it is meant"


SLOW_SETTINGS = (
    SlowSetting("NCCL_IB_DISABLE", ("1",), "NCCL leaves InfiniBand and RoCE out and uses TCP between hosts"),
    SlowSetting("NCCL_NET", ("Socket", "socket"), "NCCL uses TCP between hosts"),
    SlowSetting("NCCL_P2P_DISABLE", ("1",), "GPUs of one host exchange through the host's memory, not over NVLink"),
    SlowSetting("NCCL_P2P_LEVEL", ("0", "LOC"), "GPUs of one host exchange through the host's memory, not over NVLink"),
    SlowSetting("NCCL_SHM_DISABLE", ("1",), "ranks of one host without P2P exchange over the network"),
    SlowSetting("NCCL_NET_GDR_LEVEL", ("0", "LOC"), "GPUDirect RDMA is off: messages are staged in the host's memory"),
    SlowSetting("NCCL_NVLS_ENABLE", ("0",), "no reductions inside NVSwitch"),
    SlowSetting("NCCL_SOCKET_IFNAME", ("lo",), "ranks of other hosts cannot be reached over the loopback interface"),
    SlowSetting("NCCL_ALGO", (), "one algorithm is forced for all message sizes"),
    SlowSetting("NCCL_PROTO", (), "one protocol is forced for all message sizes"),
    SlowSetting("CUDA_LAUNCH_BLOCKING", ("1",), "the host waits for every kernel"),
    SlowSetting("TORCH_NCCL_BLOCKING_WAIT", ("1",), "the host waits for every collective"),
    SlowSetting("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked by another one"),
    SlowSetting("NCCL_DEBUG", ("TRACE",), "NCCL writes a line per call", "use INFO"),
)


def slow_settings(environment: Mapping[str, str]) -> list[Finding]:
    return [
        Finding(f"{row.name}={environment[row.name]}", row.why, row.fix)
        for row in SLOW_SETTINGS
        if environment.get(row.name) and (not row.values or environment[row.name] in row.values)
    ]


# ---- the probe ----


def probe_gpus(host: HostInfo, environment: Mapping[str, str] | None = None, sys: Path = _SYS) -> GpuReport:
    """``sys`` is the root of sysfs."""
    smi = shutil.which("nvidia-smi")
    text = None if smi is None else _output(smi, "topo", "-m")
    topology = None if text is None else parse_topology(text)
    adapters = read_adapters(sys)
    driver = _driver(smi)
    warnings = slow_settings(os.environ if environment is None else environment)
    warnings += _fabric_warnings(topology, adapters, bool(host.gpus), sys)
    return GpuReport(
        gpus=host.gpus,
        cuda=host.cuda,
        driver=driver,
        nccl=nccl_version(),
        topology_text=text,
        topology=topology,
        adapters=adapters,
        missing=tuple(_missing(host, driver, smi)),
        warnings=tuple(warnings),
    )


def nccl_version() -> str | None:
    """The NCCL that torch was built with, or that it loads."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def parse_topology(text: str) -> Topology | None:
    """The matrix of `nvidia-smi topo -m`; None if there is none in it."""
    lines = [_ANSI.sub("", line).split("\t") for line in text.splitlines()]
    head = next((line for line in lines if any(cell.strip() == "GPU0" for cell in line[1:])), None)
    if head is None:
        return None
    names = [cell.strip() for cell in head]
    links: dict[str, dict[str, str]] = {}
    for line in lines[lines.index(head) + 1 :]:
        name = line[0].strip()
        if name not in names:
            break
        cells = zip(names[1:], (cell.strip() for cell in line[1:]))
        links[name] = {other: way for other, way in cells if other.startswith(("GPU", "NIC", "mlx")) and way != "X"}
    # "GPU NUMA ID" is a column, not a GPU.
    gpus = {name for name in names if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", name)}
    return Topology({name: {k: v for k, v in row.items() if k in gpus} for name, row in links.items()})


def read_adapters(sys: Path = _SYS) -> tuple[Adapter, ...]:
    found = []
    for folder in sorted((sys / "class" / "infiniband").glob("*")):
        port = folder / "ports" / "1"
        found.append(Adapter(folder.name, _text(port / "rate"), _text(port / "state"), _text(port / "link_layer")))
    return tuple(found)


def _missing(host: HostInfo, driver: str | None, smi: str | None) -> list[Finding]:
    """What must be there before a run on GPUs can start."""
    found = []
    if host.cuda is None:
        why = f"torch {host.torch} is a build for CPUs only"
        found.append(Finding("torch with CUDA", why, "install the CUDA build of torch, see pytorch.org"))
    if driver is None:
        why = "no /proc/driver/nvidia and no answer from nvidia-smi"
        found.append(Finding("NVIDIA driver", why, "install it, or start the container with --gpus all"))
    if smi is None:
        found.append(Finding("nvidia-smi", "not in PATH: links are unknown", "it comes with the driver"))
    if not host.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "torch sees none" + ("" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}")
        found.append(Finding("GPU", why, "ask the scheduler for GPUs, or unset CUDA_VISIBLE_DEVICES"))
    if not host.nccl:
        found.append(Finding("NCCL", "torch was built without it", "install the CUDA build of torch for Linux"))
    return found


def _fabric_warnings(topology: Topology | None, adapters: tuple[Adapter, ...], gpus: bool, sys: Path) -> list[Finding]:
    found = []
    for adapter in adapters:
        if adapter.state and "ACTIVE" not in adapter.state:
            found.append(Finding(adapter.name, f"its port is {adapter.state}", "check the cable and the switch"))
    modules = ("nvidia_peermem", "nv_peer_mem")
    if gpus and adapters and not any((sys / "module" / name).exists() for name in modules):
        why = "GPUDirect RDMA: neither nvidia_peermem nor nv_peer_mem is loaded"
        fix = "modprobe nvidia_peermem; with dma-buf NCCL needs none: NCCL_DEBUG=INFO then says GDRDMA"
        found.append(Finding("GPUDirect", why, fix))
    if topology is not None and len(topology.gpus) > 1:
        domains = topology.nvlink_domains
        inside = max(map(len, domains), default=0)
        if inside < len(topology.gpus):
            why = f"NVLink connects {inside} of {len(topology.gpus)} GPUs of this host"
            fix = "keep tp and ep inside a domain, or ask `nvidia-smi nvlink -s` which links are down"
            found.append(Finding("NVLink", why, fix))
        far = [gpu for gpu in topology.gpus if (near := topology.nearest_adapter(gpu)) and near[1] == "SYS"]
        if far:
            fix = "see NCCL_IB_HCA, and where the adapters are plugged in"
            found.append(Finding("adapters", f"{', '.join(far)}: the nearest one is at another CPU socket", fix))
    found += [
        Finding("P2P", f"GPU {first} cannot read the memory of GPU {second}", "IOMMU or ACS on, or no common bridge")
        for first, second in _pairs_without_p2p(gpus)
    ]
    return found


def _pairs_without_p2p(gpus: bool) -> list[tuple[int, int]]:
    count = torch.cuda.device_count() if gpus else 0
    pairs = [(0, other) for other in range(1, count)]
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def _driver(smi: str | None) -> str | None:
    said = None if smi is None else _output(smi, "--query-gpu=driver_version", "--format=csv,noheader")
    if said and said.strip():
        return said.split()[0]
    found = re.search(r"Kernel Module\s+(?:for \w+\s+)?([\d.]+)", _text(Path("/proc/driver/nvidia/version")))
    return found[1] if found else None


def _output(*words: str) -> str | None:
    """None if it fails or takes too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
