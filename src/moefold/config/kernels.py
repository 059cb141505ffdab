"""Which implementation computes the experts and the operations between matmuls; results differ by rounding only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

# Those that run experts; `auto` stands for one of them, chosen by device and format (`checks/kernels.py`).
NamedExperts = Literal["sequential", "grouped", "fused", "deepgemm", "mxfp8", "transformer_engine"]
ExpertBackend = Literal["auto", NamedExperts]
KernelBackend = Literal["torch", "triton", "native"]
LinearBackend = Literal["torch", "transformer_engine"]
PermuteBackend = Literal["backend", "transformer_engine"]
AttentionBackend = Literal[
    "auto", "sdpa", "triton", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex", "reference"
]
Graphs = Literal["none", "partial", "full"]
Compile = Literal["none", "regions"]


@dataclass(frozen=True)
class KernelsConfig:
    """Backends by name; one that cannot run on the machine is refused at the start, never replaced."""

    __pydantic_config__: ClassVar = STRICT

    # sequential: one matmul per expert, the reference. grouped: one grouped GEMM for all experts of the rank, for GPUs.
    # fused: permute, both matmuls, activation and combine as one operation, for CPUs. deepgemm, mxfp8,
    # transformer_engine: grouped GEMMs of other libraries, for GPUs: docs/engines.md. auto: sequential, grouped or
    # fused by device and compute format, said by `moefold check` and by the first line of a run.
    experts: ExpertBackend = "grouped"
    # Operations between matmuls. torch: torch's own, on any device. triton: one kernel per operation, on GPUs.
    # native: for CPUs; torch's, with the activation in C, compiled on first use.
    backend: KernelBackend = "torch"
    # Permuting rows around grouped GEMMs: as `backend` does it, or by Transformer Engine, on GPUs: docs/engines.md.
    permute: PermuteBackend = "backend"
    # Attention over packed documents. sdpa: torch's fused attention, a call per shape of document. triton: our kernels,
    # one launch forward and three backward. flash_attn_*: that version of the flash-attn package. flex: torch's
    # flex_attention, compiled. reference: all scores in memory. auto: triton where backend is triton, else sdpa.
    attention: AttentionBackend = "auto"
    # Matmuls of linear layers: torch's, or Transformer Engine's GEMM, in bfloat16 on GPUs: docs/engines.md.
    linear: LinearBackend = "torch"
    # CUDA graphs. Planned only: partial (parts of layers are recorded), full (the whole step).
    graphs: Graphs = "none"
    # torch.compile. regions: of an MoE layer, what lies between its exchanges: scores to probs, balance losses, the
    # order in which rows are sent, the experts' activation; each is one graph, and a graph break is an error.
    compile: Compile = "none"
