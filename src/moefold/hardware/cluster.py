"""GPUs as data, and clusters of them: how many accelerators, and how they reach each other.

A GPU has nominal figures as the maker or a benchmark states them, and the peak that MFU is a fraction of. What a run
really gets of these figures (the sustained share of a peak, the achieved share of a link) is in
`plan/timing/constants.py`. Memory is what can be allocated, which is less than the label on GPUs whose driver keeps a
part. Peaks are of dense bfloat16 matmuls, without sparsity (for GB200 and GB300 the 2,450 that NVIDIA's own benchmark
recipes divide by; for MI355X the 2,300 of AMD's).

A device that is not listed has no peak, and then there is no MFU. A guess would be worse: the PCIe and NVL GPUs of a
generation are slower than their namesakes, and a MIG slice is a fraction of its GPU.

In a cluster, neighbours in rank order sit together: ranks r and s share a domain of fast links if
r // domain == s // domain. Every accelerator has its own share of the network between domains.

A cluster that is not the usual one of its GPU is described in a YAML file (`read_cluster`): what differs from a GPU of
the table, or a whole GPU of one's own; the network; what an hour of a GPU costs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from moefold.config.strict import MAX_BYTES, STRICT, ScalarError, read_yaml
from moefold.errors import ConfigError, Problem, UnknownNameError
from moefold.hardware.machine import Machine

Network = Literal["ib", "roce", "efa"]


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Rates are per second and per direction, in units of 1e12 FLOP and 1e9 bytes."""

    name: str
    # Dense matmuls without sparsity; 0 where the format has no units of its own.
    bf16_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    memory_gb: float
    memory_tb_s: float
    # To the other accelerators of its domain, and how many those are by default.
    link_gb_s: float
    domain: int
    per_node: int
    # Its share of the node's network cards, and of the path to the host's memory.
    nic_gb_s: float
    host_gb_s: float
    # What kernels are built for; GPUs of one architecture run the same ones.
    architecture: str
    watts: float
    # Streaming multiprocessors, where it is known: plans ask for it, and kernels of few tiles leave some idle.
    sms: int = 0

    def matmul_units(self, bits: int) -> tuple[int, float]:
        """Of the narrowest units that take operands of so many bits: their bits, and 1e12 FLOP/s."""
        for width, tflops in ((4, self.fp4_tflops), (8, self.fp8_tflops)):
            if bits <= width and tflops:
                return width, tflops
        return 16, self.bf16_tflops

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9


_ALL = (
    #     name         bf16   fp8    fp4  memory TB/s   link dom node nic host arch     watts SMs
    Gpu("A100", 312, 0, 0, 80, 2.039, 300, 8, 8, 25, 32, "sm80", 400, 108),
    Gpu("A100-PCIe", 312, 0, 0, 80, 1.935, 16, 8, 8, 25, 32, "sm80", 300, 108),
    Gpu("H100", 989, 1979, 0, 80, 3.35, 450, 8, 8, 50, 64, "sm90", 700, 132),
    # A variant with 96 GB of slower memory, held at 500 W.
    Gpu("H100-96G-500W", 989, 1979, 0, 96, 2.4, 450, 8, 8, 50, 64, "sm90", 500, 132),
    Gpu("H800", 989, 1979, 0, 80, 3.35, 200, 8, 8, 50, 64, "sm90", 700, 132),
    Gpu("H20", 148, 296, 0, 96, 4.0, 450, 8, 8, 50, 64, "sm90", 400, 78),
    Gpu("H200", 989, 1979, 0, 141, 4.8, 450, 8, 8, 50, 64, "sm90", 700, 132),
    Gpu("B200", 2250, 4500, 9000, 180, 7.7, 900, 8, 8, 50, 64, "sm100", 1000, 148),
    # Held at 750 W, as some hosts do.
    Gpu("B200-750W", 2250, 4500, 9000, 180, 7.7, 900, 8, 8, 50, 64, "sm100", 750, 148),
    Gpu("GB200", 2450, 4900, 9800, 186, 8.0, 900, 72, 4, 50, 225, "sm100", 1200, 152),
    Gpu("B300", 2250, 4500, 13500, 270, 7.7, 900, 8, 8, 100, 64, "sm103", 1100, 148),
    Gpu("GB300", 2450, 4900, 14700, 279, 8.0, 900, 72, 4, 100, 225, "sm103", 1400, 152),
    Gpu("MI300X", 1307, 2615, 0, 192, 5.3, 448, 8, 8, 50, 64, "cdna3", 750),
    Gpu("MI325X", 1307, 2615, 0, 256, 6.0, 448, 8, 8, 50, 64, "cdna3", 1000),
    Gpu("MI355X", 2300, 4600, 9200, 288, 8.0, 538, 8, 8, 50, 64, "cdna4", 1400),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
_BY_LOWER_CASE: Mapping[str, Gpu] = MappingProxyType({gpu.name.lower(): gpu for gpu in _ALL})


def gpu_named(name: str) -> Gpu:
    """In any case: h100 is H100."""
    found = _BY_LOWER_CASE.get(name.lower())
    if found is None:
        raise UnknownNameError("gpu", name, GPUS)
    return found


# ---- the peak of a device by the name that torch gives it ----


# Variants with a dash in their name are not told apart by what torch prints.
_KNOWN = {name: gpu.bf16_tflops for name, gpu in GPUS.items() if "-" not in name}
_OTHER_PEAK = {"PCIE", "NVL", "MIG"}
# The A100's PCIe variant has the same peak.
_SAME_AS_PCIE = {"A100"}


def peak_flops(device: str, compute: str = "bfloat16") -> float | None:
    """FLOP/s of the device that torch calls `device` ("NVIDIA H100 80GB HBM3"); None if it is not known.

    Peaks are those of bfloat16, which are those of float16; wider formats use other units of the chip and have none.
    """
    words = re.findall(r"[A-Z0-9]+", device.upper())
    model = next((word for word in words if word in _KNOWN), None)
    if model is None or compute not in ("bfloat16", "float16"):
        return None
    others = _OTHER_PEAK.intersection(words) - ({"PCIE"} if model in _SAME_AS_PCIE else set())
    return None if others else _KNOWN[model] * 1e12


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    num_gpus: int
    # Accelerators that reach each other by fast links; a rack of GB200 has 72 of which runs mostly use 64.
    domain: int
    # One accelerator's share of the network between domains, in 1e9 bytes per second and direction.
    nic_gb_s: float
    # "ib" and "roce" behave alike here; small messages of "efa" are slow.
    network: Network = "ib"
    # Of one GPU, in any currency; None if nobody said so.
    cost_per_gpu_hour: float | None = None
    # Set where the accelerators are processes on one computer that was measured: its rates replace nominal ones.
    machine: Machine | None = None

    @property
    def usable_domain(self) -> int:
        """Ranks per domain: runs leave 8 of a rack's 72 aside, so that powers of two fit."""
        return 64 if self.domain == 72 else self.domain


def cluster_of(gpu: str, num_gpus: int, **changes: object) -> Cluster:
    """The usual cluster of this GPU; `changes` are fields to differ in."""
    spec = gpu_named(gpu)
    usual = Cluster(spec, num_gpus, spec.domain, spec.nic_gb_s)
    return replace(usual, **changes)  # type: ignore[arg-type]


def cluster_of_machine(machine: Machine, ranks: int) -> Cluster:
    """So many ranks, one thread each, on a computer that was measured. Each gets its part of the memory."""
    rank = Gpu(
        name=machine.name,
        bf16_tflops=machine.gemm_gflops / 1e3,
        fp8_tflops=0.0,
        fp4_tflops=0.0,
        memory_gb=machine.memory_gb / ranks,
        memory_tb_s=machine.gemm_gb_s / 1e3,
        link_gb_s=max(wire.gb_s for wire in machine.wires),
        domain=ranks,
        per_node=ranks,
        nic_gb_s=max(wire.gb_s for wire in machine.wires),
        host_gb_s=machine.traffic_gb_s,
        architecture="cpu",
        watts=1.0,
    )
    return Cluster(rank, ranks, ranks, rank.nic_gb_s, machine=machine)


# ---- a cluster of one's own ----


@dataclass(frozen=True)
class GpuOfFile:
    """A GPU of one's own: the one that it is ``like`` in all that is not given, or every figure by itself."""

    __pydantic_config__ = STRICT

    like: str | None = None
    name: str | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    memory_gb: float | None = None
    memory_tb_s: float | None = None
    link_gb_s: float | None = None
    domain: int | None = None
    per_node: int | None = None
    nic_gb_s: float | None = None
    host_gb_s: float | None = None
    architecture: str | None = None
    watts: float | None = None
    sms: int | None = None


@dataclass(frozen=True)
class ClusterFile:
    """What `moefold plan --cluster FILE` reads. `gpu` is a name of the table or a section."""

    __pydantic_config__ = STRICT

    gpu: str | GpuOfFile
    gpus: int | None = None
    domain: int | None = None
    nic_gb_s: float | None = None
    network: Network = "ib"
    cost_per_gpu_hour: float | None = None


# GPUs without units for a format have rate 0 for it.
_MAY_BE_ZERO = ("fp8_tflops", "fp4_tflops", "cost_per_gpu_hour")
_EXAMPLE = "a cluster file has `gpu: H100`, or `gpu: {like: H100, memory_gb: 94}`, and `nic_gb_s: 50`"


def read_cluster(path: str | Path, num_gpus: int | None = None) -> Cluster:
    """The cluster that a YAML file describes, of ``num_gpus`` GPUs if given; or every problem with the file."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
        data, problems = read_yaml(text)
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error.strerror}", _EXAMPLE)) from None
    except (UnicodeDecodeError, ScalarError) as error:
        raise ConfigError(Problem(str(path), f"is no YAML text: {error}", _EXAMPLE)) from None
    if problems:
        raise ConfigError(*(replace(each, path=f"{path}: {each.path}") for each in problems))
    try:
        read = _adapter().validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError(*_explained(path, error)) from None
    except ValueError as error:
        raise ConfigError(Problem(str(path), f"has a value that no cluster has: {error}", _EXAMPLE)) from None
    return _cluster_of_file(str(path), read, num_gpus)


def _cluster_of_file(path: str, read: ClusterFile, num_gpus: int | None) -> Cluster:
    problems = _not_positive(path, read)
    gpu = _gpu_of_file(path, read.gpu, problems)
    number = read.gpus if num_gpus is None else num_gpus
    if number is None:
        problems.append(Problem(f"{path}: gpus", "how many GPUs?", "add `gpus: 256`, or give --gpus 256"))
    if problems or gpu is None or number is None:
        raise ConfigError(*problems)
    return Cluster(
        gpu,
        number,
        read.domain or gpu.domain,
        read.nic_gb_s or gpu.nic_gb_s,
        read.network,
        read.cost_per_gpu_hour,
    )


def _gpu_of_file(path: str, given: str | GpuOfFile, problems: list[Problem]) -> Gpu | None:
    """The GPU, or None and one more problem."""
    section = GpuOfFile(like=given) if isinstance(given, str) else given
    where = f"{path}: gpu" if isinstance(given, str) else f"{path}: gpu.like"
    figures = {field.name: getattr(section, field.name) for field in fields(Gpu)}
    own: dict[str, Any] = {name: value for name, value in figures.items() if value is not None}
    if section.like is None:
        missing = [field.name for field in fields(Gpu) if field.name not in own and field.default is MISSING]
        if missing:
            words = f"without `like`, and without {', '.join(missing)}"
            problems.append(Problem(f"{path}: gpu", words, f"add them, or `like: H100` (one of {', '.join(GPUS)})"))
            return None
        return Gpu(**own)
    known = _BY_LOWER_CASE.get(section.like.lower())
    if known is None:
        problems.append(Problem(where, f"is {section.like[:40]!r}", f"use one of {', '.join(GPUS)}"))
        return None
    if own:
        # A GPU that differs must not pass for its namesake.
        own.setdefault("name", f"{known.name} (own)")
    return replace(known, **own)


def _not_positive(path: str, read: ClusterFile) -> list[Problem]:
    """Every number that is none a cluster can have, in both sections."""
    sections: dict[str, Any] = {"": read}
    if isinstance(read.gpu, GpuOfFile):
        sections["gpu."] = read.gpu
    found = []
    for prefix, section in sections.items():
        for field in fields(section):
            value = getattr(section, field.name)
            if not isinstance(value, int | float):
                continue
            if not isfinite(value) or value < 0 or (value == 0 and field.name not in _MAY_BE_ZERO):
                found.append(Problem(f"{path}: {prefix}{field.name}", f"is {value:g}", "use a positive number"))
    return found


def _explained(path: str | Path, error: ValidationError) -> list[Problem]:
    found = []
    for each in error.errors(include_url=False)[:20]:
        # pydantic names the branch of `gpu` that it tried; nobody wrote that.
        keys = [str(part) for part in each["loc"] if part not in ("str", "GpuOfFile")]
        if each["loc"][-1:] == ("str",):
            continue
        known = GpuOfFile if keys[:1] == ["gpu"] else ClusterFile
        fix = f"known here: {', '.join(field.name for field in fields(known))}"
        if keys == ["network"]:
            fix = f"use one of {', '.join(get_args(Network))}"
        unknown = each["type"] in ("unexpected_keyword_argument", "extra_forbidden")
        found.append(Problem(f"{path}: {'.'.join(keys)}", "unknown key" if unknown else each["msg"], fix))
    return found or [Problem(str(path), "describes no cluster", _EXAMPLE)]


@cache
def _adapter() -> TypeAdapter[ClusterFile]:
    return TypeAdapter(ClusterFile)
