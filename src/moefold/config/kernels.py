"""Which implementation computes the experts and the operations between matmuls; results differ by rounding only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

ExpertBackend = Literal["sequential", "grouped", "fused", "deepgemm", "mxfp8"]
KernelBackend = Literal["torch", "triton", "native"]
Graphs = Literal["none", "partial", "full"]


@dataclass(frozen=True)
class KernelsConfig:
    """Backends by name; one that cannot run on the machine is refused at the start, never replaced."""

    __pydantic_config__: ClassVar = STRICT

    # sequential: one matmul per expert, the reference. grouped: one grouped GEMM for all experts of the rank, for GPUs.
    # fused: permute, both matmuls, activation and combine as one operation, for CPUs. deepgemm, mxfp8: grouped GEMMs of
    # other libraries (DeepGEMM, torchao), for GPUs: docs/engines.md.
    experts: ExpertBackend = "grouped"
    # Operations between matmuls. torch: torch's own, on any device. triton: one kernel per operation, on GPUs.
    # native: for CPUs; torch's, with the activation in C, compiled on first use.
    backend: KernelBackend = "torch"
    # CUDA graphs. Planned only: partial (parts of layers are recorded), full (the whole step).
    graphs: Graphs = "none"
