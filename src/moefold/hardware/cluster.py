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
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moefold.errors import UnknownNameError
from moefold.hardware.machine import Machine


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
    #     name         bf16   fp8    fp4  memory TB/s   link dom node nic host arch     watts
    Gpu("A100", 312, 0, 0, 80, 2.039, 300, 8, 8, 25, 32, "sm80", 400),
    Gpu("A100-PCIe", 312, 0, 0, 80, 1.935, 16, 8, 8, 25, 32, "sm80", 300),
    Gpu("H100", 989, 1979, 0, 80, 3.35, 450, 8, 8, 50, 64, "sm90", 700),
    # A variant with 96 GB of slower memory, held at 500 W.
    Gpu("H100-96G-500W", 989, 1979, 0, 96, 2.4, 450, 8, 8, 50, 64, "sm90", 500),
    Gpu("H800", 989, 1979, 0, 80, 3.35, 200, 8, 8, 50, 64, "sm90", 700),
    Gpu("H20", 148, 296, 0, 96, 4.0, 450, 8, 8, 50, 64, "sm90", 400),
    Gpu("H200", 989, 1979, 0, 141, 4.8, 450, 8, 8, 50, 64, "sm90", 700),
    Gpu("B200", 2250, 4500, 9000, 180, 7.7, 900, 8, 8, 50, 64, "sm100", 1000),
    Gpu("GB200", 2450, 4900, 9800, 186, 8.0, 900, 72, 4, 50, 225, "sm100", 1200),
    Gpu("B300", 2250, 4500, 13500, 270, 7.7, 900, 8, 8, 100, 64, "sm103", 1100),
    Gpu("GB300", 2450, 4900, 14700, 279, 8.0, 900, 72, 4, 100, 225, "sm103", 1400),
    Gpu("MI300X", 1307, 2615, 0, 192, 5.3, 448, 8, 8, 50, 64, "cdna3", 750),
    Gpu("MI325X", 1307, 2615, 0, 256, 6.0, 448, 8, 8, 50, 64, "cdna3", 1000),
    Gpu("MI355X", 2300, 4600, 9200, 288, 8.0, 538, 8, 8, 50, 64, "cdna4", 1400),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})


def gpu_named(name: str) -> Gpu:
    if name not in GPUS:
        raise UnknownNameError("gpu", name, GPUS)
    return GPUS[name]


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
    # "ib" or "roce", which behave alike here, or "efa", whose small messages are slow.
    network: str = "ib"
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
