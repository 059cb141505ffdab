"""Over how many ranks each dimension of the work is cut. `dp` and `edp` follow from the world size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

ContextMode = Literal["ring", "all_to_all", "hierarchical"]
DispatcherName = Literal["all_to_all", "all_gather", "deduplicated", "two_level", "adaptive"]


@dataclass(frozen=True)
class ContextConfig:
    """How ranks that share a sequence attend to each other's tokens, by type of layer."""

    __pydantic_config__: ClassVar = STRICT

    # Layers that see the whole document, and layers that see a window of it.
    full: ContextMode = "ring"
    windowed: ContextMode = "ring"
    # Hierarchical: so many neighbours exchange heads, and the ring runs between such sets.
    inner: int = 1


@dataclass(frozen=True)
class LinkConfig:
    """What ranks pay to reach each other, for the adaptive dispatcher. Rates are in 1e9 bytes per second.

    The figures are of gloo between processes on one computer, one core for two of them; measure your own with
    `moefold bench dispatch --adaptive 20`.
    """

    __pydantic_config__: ClassVar = STRICT

    # One collective, however small.
    message_us: float = 275.0
    # What a rank receives row by row (all-to-all), from everyone (all-gather), and in sums (reduce-scatter).
    exchange_gb_s: float = 0.76
    gather_gb_s: float = 0.74
    sum_gb_s: float = 0.3
    # Rows gathered, added up or widened on the rank itself, and any small operation there.
    copy_gb_s: float = 100.0
    operation_us: float = 24.0


@dataclass(frozen=True)
class ParallelConfig:
    """The sizes of the two grids, and how tokens travel between them."""

    __pydantic_config__: ClassVar = STRICT

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    # Pipeline: virtual stages per rank, the order of microbatches, and which layers each stage holds, as in
    # `Et*3|(tt|)*29m|L`; None balances the layers' costs.
    vpp: int = 1
    schedule: str = "1f1b"
    stages: str | None = None
    context: ContextConfig = field(default_factory=ContextConfig)
    # Each microbatch is cut over as many ranks as its longest document needs, at most dp * cp.
    dynamic_cp: bool = False
    # Hybrid sharding: keep this many full copies of the (sharded) dense / expert parameters.
    dp_replicate: int = 1
    edp_replicate: int = 1
    # How tokens travel to experts on other ranks; adaptive takes the cheapest by what the link costs.
    dispatcher: DispatcherName = "all_to_all"
    link: LinkConfig = field(default_factory=LinkConfig)
    # Two levels: so many neighbours of an ep group share a host.
    ep_inner: int = 1
