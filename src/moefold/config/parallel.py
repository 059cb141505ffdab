"""Degrees of parallelism and how ranks exchange tokens. `dp` and `edp` follow from the world size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

ContextMode = Literal["ring", "all_to_all", "hierarchical"]
# The dispatchers. Each is a module of that name in moe/dispatch; docs/how-to-add/dispatcher.md says what else it needs.
NamedDispatcher = Literal[
    "all_to_all", "all_gather", "deduplicated", "two_level", "all_to_all_aligned", "all_to_all_bounded"
]
DispatcherName = Literal[NamedDispatcher, "adaptive"]
# Of other libraries, on GPUs, installed apart: docs/engines.md. Modules of these names in moe/dispatch call them.
EngineDispatcher = Literal["deepep", "deepep_elastic", "symmetric_memory"]
# As the planner knows them. hybridep is planned only: `checks/planned_only.py` refuses to train it.
PlannedDispatcherName = Literal["deepep", "hybridep"]
Sharding = Literal["none", "zero1", "zero2", "fsdp", "flat"]
ParamSync = Literal["direct", "hierarchical"]
Overlap = Literal["shared_experts", "tensor_parallel", "ulysses", "ep", "wgrad"]


@dataclass(frozen=True)
class ContextConfig:
    """How a context-parallel group computes attention, by type of layer."""

    __pydantic_config__: ClassVar = STRICT

    # Layers with full attention, and layers with a sliding window.
    full: ContextMode = "ring"
    windowed: ContextMode = "ring"
    # hierarchical: all-to-all of heads inside sets of this many neighbouring ranks, a ring between the sets.
    inner: int = 1


@dataclass(frozen=True)
class LinkConfig:
    """Link costs for the adaptive dispatcher. Bandwidths are in 1e9 bytes per second.

    The defaults were measured with gloo between processes on one computer; measure your own with
    `python -m benchmarks.adaptive 20` in a clone of the repository.
    """

    __pydantic_config__: ClassVar = STRICT

    # Latency of one collective.
    latency_us: float = 275.0
    # Bandwidth of all-to-all, all-gather and reduce-scatter, by the bytes that a rank receives.
    all_to_all_gb_s: float = 0.76
    all_gather_gb_s: float = 0.74
    reduce_scatter_gb_s: float = 0.3
    # Memory bandwidth of permuting, summing or casting rows on the rank, and the latency of any local operation.
    copy_gb_s: float = 100.0
    operation_us: float = 24.0


@dataclass(frozen=True)
class EchoConfig:
    """ECHO, elastic cloning of hot experts: ranks with fewer rows than the mean compute some for experts of others."""

    __pydantic_config__: ClassVar = STRICT

    # Spare slots of each rank: the most clones that it has at once in a layer.
    slots: int = 1
    # The fewest rows for which a clone is made: docs/walls.md says from how many on its weights are worth sending.
    min_rows: int = 1


@dataclass(frozen=True)
class RankOrderConfig:
    """Which ranks are neighbours along which axis: the axis whose ranks are consecutive first, pp last in both.

    As Megatron's `--order`. The axes named first stay inside a host or an NVLink domain; no result changes.
    """

    __pydantic_config__: ClassVar = STRICT

    # Of the attention grid: any order of tp, cp and dp, then pp.
    dense: str = "tp-cp-dp-pp"
    # Of the expert grid: any order of etp, ep and edp, then pp.
    expert: str = "etp-ep-edp-pp"


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the attention grid and the expert grid, and how tokens travel between them."""

    __pydantic_config__: ClassVar = STRICT

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    rank_order: RankOrderConfig = field(default_factory=RankOrderConfig)
    # Pipeline: virtual stages per rank, the schedule, and which layers each stage has, as in
    # `Et*3|(tt|)*29m|L`; None balances the layers' costs.
    vpp: int = 1
    schedule: str = "1f1b"
    stages: str | None = None
    context: ContextConfig = field(default_factory=ContextConfig)
    # Dynamic context parallelism: each microbatch is sharded over as many ranks as its longest document needs, at most
    # dp * cp.
    dynamic_cp: bool = False
    # What is sharded over data-parallel ranks. fsdp: parameters, gradients and optimizer states. flat: optimizer states
    # and master weights (ZeRO-1), with weights and gradients in flat buffers. Planned only: zero2 (gradients and
    # optimizer states), zero1 (optimizer states), none.
    sharding: Sharding = "fsdp"
    # Overlaps inside of a layer. shared_experts: the shared expert's first matmul runs beside the dispatch of the same
    # microbatch, its second beside combine, in forward and backward. tensor_parallel: tokens before and after sharded
    # matmuls travel in chunks, each beside the matmuls of another, in forward and backward. ulysses: so do queries,
    # keys and values on their way to the ranks of their heads, and attention's output on its way back. Overlaps of two
    # microbatches are in the schedule's name; planned only, because another framework adds them to any schedule: ep
    # (dispatch and combine of one microbatch beside the computation of another), wgrad (deferred weight gradients).
    overlap: tuple[Overlap, ...] = ()
    # With overlap tensor_parallel: chunks of the tokens of a microbatch around a sharded matmul.
    tp_chunks: int = 2
    # With overlap ulysses: chunks of a rank's tokens, in layers whose context.full or context.windowed is all_to_all.
    ulysses_chunks: int = 2
    # Chunks of a rank's tokens that go to the experts and back one after the other: while one is on its way, the
    # experts compute another of the same microbatch, in forward and backward. 1: all tokens at once, and the experts
    # wait. FSDP gathers weights once per step with more than 1.
    exchange_chunks: int = 1
    # How flat sharding sums gradients and gathers weights. direct: one collective over all ranks that share a buffer.
    # hierarchical: a reduce-scatter inside of each host, then one between hosts; an all-gather between hosts, then one
    # inside. Between hosts each rank passes on 1/(its host's ranks) of the bytes.
    param_sync: ParamSync = "direct"
    # Hierarchical: this many consecutive ranks share a host.
    ranks_per_host: int = 1
    # HSDP: this many replicas of the sharded dense / expert parameters.
    dp_replicate: int = 1
    edp_replicate: int = 1
    # Gradients that the step sums itself are summed in buckets of at most so many MiB, one collective each: all of them
    # in pipelines and overlapped schedules, else those that ranks of tp or etp share. FSDP sums a layer's at once. Flat
    # sharding gathers and sums in them: one of fewer layers arrives before its layers need it, and leaves when their
    # last backward ends.
    bucket_mb: float = 128.0
    # How tokens are dispatched to experts on other ranks; adaptive takes the cheapest by `link`.
    # By other libraries on GPUs: deepep, deepep_elastic, symmetric_memory. Planned only: hybridep.
    dispatcher: Literal[DispatcherName, EngineDispatcher, PlannedDispatcherName] = "all_to_all"
    # SMs that the kernels of dispatch and combine may use: with fewer, more of the GPU is left to matmuls beside an
    # exchange, and below what saturates the links the exchange is slower. None: the library's choice. deepep: even.
    dispatch_sms: int | None = None
    # How rows of experts travel between CPUs. shared_memory: among ranks of one host each reads what its peers wrote;
    # groups of several hosts use gloo, in pieces, both directions at once. gloo: its own all-to-all, always.
    cpu_exchange: Literal["shared_memory", "gloo"] = "shared_memory"
    link: LinkConfig = field(default_factory=LinkConfig)
    # two_level: this many neighbouring ranks of an ep group share a host.
    ep_inner: int = 1
    # Clone hot experts for each microbatch; None: every row is computed where its expert is.
    echo: EchoConfig | None = None
    # Aligned all-to-all: each expert's rows are rounded up to a multiple of this.
    row_multiple: int = 16
    # Bounded all-to-all: rows that the experts of a rank compute at most, and rows that a rank sends to another at
    # most, each over its mean. A step in which a row does not fit runs once more, with exact counts.
    row_bound: float = 1.25
    pair_bound: float = 1.5
