"""A cluster: how many accelerators, and how they reach each other.

Neighbours in rank order sit together: ranks r and s share a domain of fast links if r // domain == s // domain. Every
accelerator has its own share of the network between domains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moefold.hardware.gpu import Gpu, gpu_named
from moefold.hardware.machine import Machine


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
