"""A workload: everything a prediction depends on, whether it came from a moefold run or from a published record.

It is a model's shape, a cluster, the parallel degrees, the batch, and the options of the framework that runs it.
`plan/from_run.py` makes workloads from runs, `plan/published/records.py` from records; memory, time, search and reports
see only workloads, so the formulas that plan a run are those that are fitted to published ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from moefold.blueprint.model_shape import ModelShape
from moefold.hardware.cluster import Cluster
from moefold.plan.dispatch_choice import PlannedDispatcher

# How GEMM operands are held: whole words, or eight or four bits with scales per tensor, block or 32 values.
Format = Literal["float32", "fp16", "bf16", "fp8_delayed", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"]
# What is sharded over data-parallel ranks. zero1: optimizer states. zero3: parameters and gradients too (FSDP).
Sharding = Literal["none", "zero1", "zero2", "zero3"]
Dispatcher = Literal["local", PlannedDispatcher, "deepep", "hybridep"]
# Parts of a layer whose activations are dropped and recomputed. "full" is whole layers.
Recomputed = Literal["full", "attention", "core_attention", "mla_up", "norms", "feed_forward", "experts", "activation"]
# What launches kernels: one by one, some parts from a recorded graph, or the whole step from one.
Graphs = Literal["none", "partial", "full"]
# Frameworks differ in what they save (`plan/memory/saved_*.py`), overlap and launch (`plan/timing/`).
Framework = Literal["megatron", "fsdp2", "deepspeed", "jax", "moefold"]


@dataclass(frozen=True)
class ParallelDegrees:
    """Parallel degrees, the pipeline schedule and how parameters are sharded over data-parallel ranks."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    # Which layers each stage holds, in the notation of `blueprint/stages.py`; None balances them.
    stages: str | None = None
    sharding: Sharding = "zero1"
    # Full copies of what is sharded (hybrid sharding).
    replicate: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.world // (self.pp * self.ep * self.etp))


@dataclass(frozen=True)
class Batch:
    """What one step works through. A microbatch is `sequences` of `seq_len` tokens on each data-parallel rank."""

    seq_len: int
    sequences: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Of one microbatch, before context or tensor parallelism cut it."""
        return self.seq_len * self.sequences


@dataclass(frozen=True)
class Dtypes:
    """Formats of matmuls, and bytes per element of what is kept."""

    format: Format = "bf16"
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    # Master weights, 0 where the weights themselves are the masters, and both moments together.
    master_bytes: float = 4.0
    moments_bytes: float = 8.0

    @property
    def word(self) -> float:
        """Bytes of an element wherever it is not narrow: as it travels, and between matmuls."""
        return 4.0 if self.format == "float32" else 2.0


@dataclass(frozen=True)
class Options:
    """How the framework runs the work."""

    framework: Framework = "megatron"
    dispatcher: Dispatcher = "all_to_all"
    # Dispatch and combine of one microbatch overlap with the computation of another.
    ep_overlap: bool = False
    # Weight gradients are deferred to fill the waits.
    delay_wgrad: bool = False
    recompute: frozenset[Recomputed] = frozenset()
    graphs: Graphs = "none"
    # Parts that a partial graph holds: "attn", "mamba", "moe_router", "moe_preprocess", "mlp".
    graph_parts: frozenset[str] = frozenset()
    tp_overlap: bool = False
    gradient_overlap: bool = True
    # Rows of experts are kept in a pool of pages, so that graphs need no copies.
    paged_stash: bool = False
    # Activations, by name, and optimizer states that wait in the host's memory.
    offloaded: frozenset[str] = frozenset()
    optimizer_on_host: bool = False
    # So many layers of each pipeline rank keep all of their activations in the host's memory.
    offloaded_layers: int = 0
    # Busiest rank over the mean; forced balance is 1.
    imbalance: float = 1.0
    # Tokens over capacity are dropped, so no rank gets more than its share.
    drops: bool = False
    # torch.compile or another compiler fuses elementwise work.
    compiled: bool = False
    # Between matrices that tensor parallelism cuts, tokens are cut instead (else every rank keeps all of them).
    sequence_parallel: bool = True
    # Attention saves no scores: it recomputes them block by block.
    flash: bool = True
    # The prob is applied inside the experts' activation, so that their outputs need not be saved.
    weighted_inside: bool = True
    # Loss and gradient are written over the logits; else each pass makes its own copies.
    fused_loss: bool = True
    # Dropout keeps a mask.
    dropout: bool = False
    # The year and month of the framework, as a float (2025.5); kernels get better with time. 0 is not known.
    date: float = 0.0


@dataclass(frozen=True)
class Workload:
    model: ModelShape
    cluster: Cluster
    degrees: ParallelDegrees
    batch: Batch
    dtypes: Dtypes = field(default_factory=Dtypes)
    options: Options = field(default_factory=Options)

    @cached_property
    def local_tokens(self) -> float:
        """Of one microbatch, after context and tensor (sequence) parallelism cut it."""
        return self.batch.tokens / self.degrees.cp / self.degrees.tp

    @cached_property
    def global_tokens(self) -> float:
        return float(self.batch.tokens * self.batch.microbatches * self.degrees.dp)
